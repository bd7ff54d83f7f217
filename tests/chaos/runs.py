"""Faults in training runs: real ranks, collectives and signals, and the resumed run.

A *chain* is one run: several attempts in the same folder, each with faults, started by the
library's launcher with ``checkpoint.resume = "auto"``. The last attempt has no faults and finishes
the last step. The result is compared with that of a run without faults.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from internsp.app.checkpoint import disk, manifest
from internsp.app.config import Config
from internsp.app.launch.launch import start
from internsp.app.report.metrics import read_metrics
from internsp.errors import ConfigError, InternspError
from tests.chaos.tally import Fault, Found
from tests.support import chaos
from tests.support.chaos_files import started

STEPS, EVERY, BATCH, LENGTH = 10, 2, 4, 17
TIMEOUT = 15  # seconds: parallel.timeout_seconds of the runs
HANG = 120.0  # seconds after which a run is killed and counted as hung
NAMED = 5.0  # seconds within which the death of a rank must be reported
_TEXT = Path(__file__).parents[2] / "tests" / "data" / "text"
_ENDING = ("kill", "raise", "leave", "stop", "full")
_SIGNALS = ("SIGTERM", "SIGHUP", "SIGINT")
_PASSING = ("delay", "SIGUSR1")
Plan = list[dict[str, Any]]


def settings(ranks: int, **sections: dict[str, Any]) -> Config:
    """The configuration of a run with a few thousand parameters, in fp64."""
    given: dict[str, dict[str, Any]] = {
        "model": {"hidden_size": 8, "layers": 2, "heads": 2, "intermediate_size": 16},
        "data": {"source": "text", "paths": [str(_TEXT)], "sequence_length": LENGTH, "held_out": 0},
        "parallel": {"weight": ranks, "timeout_seconds": TIMEOUT},
        "weight_parallel": {"min_shard_elements": 64},
        "optimizer": {"lr": 3e-3, "warmup_steps": 1},
        "train": {
            "name": "chaos", "steps": STEPS, "global_batch": BATCH, "eval_batches": 0,
            "dtype": "float64",
        },
        "checkpoint": {"every": EVERY, "keep_last": 2, "resume": "auto"},
        "launch": {"processes": ranks},
    }  # fmt: skip
    return Config.model_validate({k: v | sections.get(k, {}) for k, v in given.items()})


def draw(chance: random.Random, ranks: int, left: int) -> Plan:
    """Faults of one attempt: one that ends it, and perhaps some before it that do not.

    Args:
        left: steps left for the attempt, as far as known.
    """
    number = chance.choice((0, 1, 1, 2))
    passing = [_at(chance, chance.choice(_PASSING), ranks, left) for _ in range(number)]
    roll = chance.random()
    if roll < 0.12:
        ending = _at(chance, chance.choice(_SIGNALS), ranks, left)
    else:
        weights = (45, 25, 8, 5, 17)
        ending = _at(chance, chance.choices(_ENDING, weights)[0], ranks, left)
    return [*passing, ending]


def _at(chance: random.Random, kind: str, ranks: int, left: int) -> dict[str, Any]:
    """The point of a fault, counted so that most faults happen."""
    rank = chance.randrange(ranks)
    files = ("writer", "writer", "file") if rank == 0 else ("writer",)
    collectives = (*chaos.COLLECTIVES, "DIST", "step") if ranks > 1 else ("RS", "DIST", "step")
    points = files if kind == "full" else (*files, *collectives)
    if kind in _SIGNALS or kind == "SIGUSR1":
        points = (*collectives, "file") if rank == 0 else collectives
    if kind == "leave":
        points = collectives
    if kind == "stop" and ranks == 1:  # no other rank waits for it, so it would stay stopped
        kind = "kill"
    point = chance.choice(points)
    saves = max(left // EVERY, 1)
    most = {
        "writer": (20 if rank == 0 else 5) * saves, "file": 10 + 3 * left,
        "DIST": 10 + 8 * left, "step": left,
    }.get(point, 4 * left)  # fmt: skip
    n = chance.randint(1, most)
    if point == "step":
        n += STEPS - left  # counted from the first step of the run
    return {
        "kind": kind, "point": point, "n": n, "rank": rank, "seconds": round(chance.random(), 2),
        "when": chance.choice(("before", "after")),
    }  # fmt: skip


class Runs:
    """Chains of attempts, and the checks after each.

    Args:
        folder: an empty one, used by this object only; also for temporary files of its runs.
        mistakes: names of :data:`tests.support.chaos.MISTAKES`, applied in every rank.
        private: this process has a separate folder for temporary files.
        network: it also has its own network, whose link may be cut, and its own shared memory.
    """

    def __init__(
        self,
        folder: Path,
        mistakes: Sequence[str] = (),
        *,
        private: bool = False,
        network: bool = False,
    ) -> None:
        self._folder, self._mistakes, self._network = folder, list(mistakes), network
        self._references: dict[tuple[int, int], dict[str, Any]] = {}
        self._chains = 0
        self._weight = 2
        self._before = self._places() if private else set()
        self._private = private

    def cut(self, chance: random.Random) -> Found:
        """The link goes down while two ranks train, and stays down for that attempt."""
        assert self._network, "the link is this process's own"
        step = chance.randint(1, STEPS - 1)
        when = chance.choice(("before", "after"))
        fault = {"kind": "cut", "point": "step", "n": step, "rank": 0, "when": when, "seconds": 0}
        return self.chain(chance, (2, 2), [[fault]])

    def reference(self, ranks: int, weight: int) -> dict[str, Any]:
        """The run without faults: its last checkpoint and its rows of metrics."""
        if (ranks, weight) not in self._references:
            output = self._folder / f"reference{ranks}-{weight}"
            chaos.plan_of(output).write_text(json.dumps({"faults": []}))
            config = settings(ranks, parallel={"weight": weight})
            assert start(chaos.run, config, output) == 0
            self._references[ranks, weight] = {
                "path": output / "checkpoints" / f"step-{STEPS:06d}",
                "losses": [row.loss for row in read_metrics(output / "metrics.jsonl")],
                "tokens": [row.tokens for row in read_metrics(output / "metrics.jsonl")],
            }
        return self._references[ranks, weight]

    def chain(
        self,
        chance: random.Random,
        meshes: Sequence[int],
        plans: Sequence[Plan] | None = None,
        weight: int = 2,
    ) -> Found:
        """One run, started and resumed on ``meshes``; the last attempt has no faults.

        Args:
            meshes: ranks of each attempt.
            plans: the faults of each attempt but the last; random where not given.
            weight: ranks over which weights are sharded, if there are as many.
        """
        self._weight = weight
        for ranks in set(meshes):
            self.reference(ranks, min(ranks, weight))
        self._chains += 1
        output = self._folder / f"chain{self._chains}"
        found, sure, damaged = Found(), 0, set[str]()
        reached = 0
        for number, ranks in enumerate(meshes):
            last = number == len(meshes) - 1
            plan: Plan = []
            if not last:
                plan = plans[number] if plans else draw(chance, ranks, max(STEPS - reached, 1))
            plan = [{**fault, "id": index} for index, fault in enumerate(plan)]
            if number:
                found.restarts += 1
            happened, said = self._attempt(found, output, ranks, plan)
            found.faults += [Fault(f["kind"], _place(f)) for f in happened]
            if last and said:
                found.different += 1
                found.wrong.append(f"chain {self._chains}: the last attempt ended by {said}")
                break
            reached = self._look(found, output, sure, damaged, happened)
            sure = max(sure, reached)
            if not last and reached < STEPS and chance.random() < 0.15:
                if self._corrupt(output, chance, damaged):
                    found.faults.append(Fault("corrupt", "a file of a checkpoint"))
                    sure = reached = 0  # the checkpoint before it is valid too
        else:
            self._compare(found, output, meshes)
        if self._private:
            self._temporary(found)
        shutil.rmtree(output, ignore_errors=True)
        return found

    def _attempt(
        self, found: Found, output: Path, ranks: int, plan: Plan
    ) -> tuple[Plan, str]:
        """Start the ranks once; returns the faults that happened, and the error: "" if none."""
        given = {"faults": plan, "mistakes": self._mistakes}
        chaos.plan_of(output).write_text(json.dumps(given))
        before = len(chaos.lines_of(output))
        hung = threading.Event()

        def give_up() -> None:
            hung.set()
            for line in chaos.lines_of(output)[before:]:
                if "process" in line and started(line["pid"]) == line["started"]:
                    os.kill(line["pid"], signal.SIGKILL)

        watch = threading.Timer(HANG, give_up)
        watch.start()
        said, status = "", 0
        try:
            config = settings(ranks, parallel={"weight": min(ranks, self._weight)})
            status = start(chaos.run, config, output)
        except InternspError as error:
            said = str(error)
        finally:
            ended = time.monotonic()
            watch.cancel()
            if self._network:
                chaos.link(True)
        lines = chaos.lines_of(output)[before:]
        happened = [plan[line["fault"]] for line in lines if "fault" in line]
        times = [line["at"] for line in lines if "fault" in line]
        where = f"chain {self._chains}, {ranks} ranks, {happened}"
        if hung.is_set():
            found.hangs += 1
            found.wrong.append(f"{where}: hung; {said}")
        self._judge(found, happened, times, ended, said, status, where)
        self._leftovers(found, lines, where)
        return happened, said

    def _judge(
        self, found: Found, happened: Plan, times: list[float], ended: float, said: str,
        status: int, where: str,
    ) -> None:  # fmt: skip
        """Check how the command ended, how soon, and whether it names the failed rank."""
        kinds = {fault["kind"] for fault in happened}
        signals = [getattr(signal, kind) for kind in kinds & set(_SIGNALS)]
        ending = [f for f in happened if f["kind"] in (*_ENDING, "cut")]
        if ending:
            first = happened.index(ending[0])
            found.worst = max(found.worst, ended - times[first])
        if said and not ending:
            found.wrong.append(f"{where}: failed without a fault that ends it: {said}")
            found.unnamed += 1
        if said and ending and ending[0]["kind"] != "cut":
            names = {f"rank {fault['rank']}{after}" for fault in ending for after in (" ", ":")}
            if not any(name in said for name in names):
                found.unnamed += 1
                found.wrong.append(f"{where}: not named in {said}")
            if ending[0]["kind"] == "kill":
                found.named = max(found.named, ended - times[first])
        if signals and not ending and not said:
            allowed = {0, *(0 if s == signal.SIGTERM else 128 + s for s in signals)}
            if status not in allowed:
                found.wrong.append(f"{where}: status {status}")
                found.different += 1

    def _leftovers(self, found: Found, lines: list[dict[str, Any]], where: str) -> None:
        """Processes of an attempt that still exist three seconds after it."""
        owners = {line["pid"]: line for line in lines if "process" in line}
        deadline = time.monotonic() + 3.0
        while owners and time.monotonic() < deadline:
            owners = {p: o for p, o in owners.items() if started(p) == o["started"]}
            if owners:
                time.sleep(0.02)
        for pid, owner in owners.items():
            found.left += 1
            found.wrong.append(f"{where}: left over is the {owner['process']} of {owner['rank']}")
            os.kill(pid, signal.SIGKILL)

    def _temporary(self, found: Found) -> None:
        """Temporary files and shared memory that the chain created and did not remove."""
        now = self._places()
        for path in sorted(now - self._before):
            found.left += 1
            found.wrong.append(f"chain {self._chains}: left over is {path}")
        self._before = now

    def _places(self) -> set[Path]:
        """Files in places where a run must leave nothing after its launcher has ended."""
        folders = [Path(tempfile.gettempdir()), *([Path("/dev/shm")] if self._network else [])]
        found = {path for folder in folders for path in folder.iterdir()}
        # The fork server of these processes lives longer than one run, and so does its socket.
        return {p for p in found if p != self._folder and not p.name.startswith("pymp-")}

    def _look(
        self, found: Found, output: Path, sure: int, damaged: set[str], happened: Plan
    ) -> int:
        """Check between attempts: all checkpoints are valid, none was lost. The newest's step."""
        reached = 0
        for step, path in disk.steps_in(output / "checkpoints"):
            try:
                content = manifest.read(path)
                manifest.check_files(path, content, content.files)
                reached = max(reached, step)
                damaged.discard(path.name)  # written again
            except ConfigError as error:
                if path.name not in damaged:
                    found.unusable += 1
                    found.wrong.append(f"chain {self._chains}, {happened}: {error}")
        if reached < sure:
            found.unusable += 1
            found.wrong.append(
                f"chain {self._chains}, {happened}: step {sure} was valid, now {reached}"
            )
        return reached

    def _corrupt(self, output: Path, chance: random.Random, damaged: set[str]) -> bool:
        """Damage the newest checkpoint, if there is a valid one before it."""
        folders = [path for _, path in disk.steps_in(output / "checkpoints")]
        if len([path for path in folders if path.name not in damaged]) < 2:
            return False
        path = chance.choice(sorted(folders[0].iterdir()))
        data = bytearray(path.read_bytes())
        if chance.random() < 0.5:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
        else:
            path.write_bytes(data[: chance.randrange(len(data))])
        damaged.add(folders[0].name)
        return True

    def _compare(self, found: Found, output: Path, meshes: Sequence[int]) -> None:
        """The final checks: weights, tokens, files."""
        ranks, where = meshes[-1], f"chain {self._chains} on {list(meshes)}"
        reference = self.reference(ranks, min(ranks, self._weight))
        same = len(set(meshes)) == 1
        path = output / "checkpoints" / f"step-{STEPS:06d}"
        if not path.exists() or not _equal(path, reference["path"], same):
            found.different += 1
            found.wrong.append(f"{where}: other weights at the end")
        rows = read_metrics(output / "metrics.jsonl")
        losses = [row.loss for row in rows]
        if len(rows) != STEPS or (same and losses != reference["losses"]):
            found.different += 1
            found.wrong.append(f"{where}: metrics of steps {[row.step for row in rows]}")
        # The rows of each step in the final history: those of the last attempt that ran the step.
        taken = {}
        for line in chaos.lines_of(output):
            if "step" in line:
                taken[line["step"], line["rank"]] = line["taken"]
        for (step, rank), begin in taken.items():
            if rank == 0 and begin != (step - 1) * BATCH:
                off = (begin - (step - 1) * BATCH) * LENGTH
                found.lost += max(off, 0)
                found.repeated += max(-off, 0)
                found.wrong.append(f"{where}: step {step} began at row {begin}")
        wanted = {"config.toml", "metrics.jsonl", "report.html", "report.json",
                  "checkpoints", "logs", "run.lock"}  # fmt: skip
        extra = {p.name for p in output.iterdir()} - wanted
        extra |= {p.name for p in (output / "checkpoints").iterdir() if not _whole_name(p)}
        if extra:
            found.left += len(extra)
            found.wrong.append(f"{where}: left over are {sorted(extra)}")


def _whole_name(path: Path) -> bool:
    name = path.name
    return name == disk.LATEST or name.startswith("abandoned-") or (
        disk.STEP.fullmatch(name) is not None and not name.endswith(".replaced")
    )


def _place(fault: dict[str, Any]) -> str:
    point = fault["point"]
    names = {
        "writer": "file operation of the thread that writes", "file": "file operation of a rank",
        "DIST": "collective: torch.distributed", "step": "optimizer step",
    }  # fmt: skip
    return names.get(point, f"collective: {point}")


def _equal(one: Path, other: Path, same: bool) -> bool:
    """Whether two checkpoints hold the same bytes; on different meshes, the same within 1e-6."""
    mine, theirs = tensors(one), tensors(other)
    if not same:  # random states belong to a rank; there are as many as ranks that saved last
        mine, theirs = (
            {name: value for name, value in found.items() if not name.startswith("random.")}
            for found in (mine, theirs)
        )
    if mine.keys() != theirs.keys():
        return False
    if same:
        return all(torch.equal(mine[name], theirs[name]) for name in mine)
    return all(
        torch.allclose(mine[name].double(), theirs[name].double(), rtol=1e-6, atol=1e-9)
        for name in mine
    )


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint as bytes, assembled from its chunks."""
    content, found = manifest.read(path), {}
    for name, record in content.tensors.items():
        tensor = torch.zeros(record.shape, dtype=getattr(torch, record.dtype))
        for chunk in record.chunks:
            data = bytearray((path / chunk.file).read_bytes()[chunk.begin :][: chunk.length])
            if data:
                pairs = zip(chunk.offsets, chunk.sizes, strict=True)
                box = tuple(slice(offset, offset + size) for offset, size in pairs)
                tensor[box] = torch.frombuffer(data, dtype=tensor.dtype).view(chunk.sizes)
        found[name] = tensor
    return found
