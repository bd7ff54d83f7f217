"""Faults in saves, in large numbers: the library's own file operations, in one process.

The saved state is small and follows a rule in which every step's rows count: a step or rows that
are lost or repeated change the final bytes. :mod:`internsp.app.checkpoint.disk` writes the files as
in a rank's thread, for two ranks.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from internsp.app.checkpoint import disk, manifest
from internsp.app.checkpoint.files import FilePlan
from internsp.app.checkpoint.manifest import Manifest
from internsp.errors import ConfigError
from tests.chaos.tally import Fault, Found
from tests.support.chaos_disk import Operation, Recorder, played, write_out
from tests.support.chaos_files import Injected

STEPS, EVERY, KEEP_LAST, KEEP_EVERY = 12, 2, 2, 6
KINDS = ("kill", "power", "full", "raise", "corrupt")
_WRONG = ("flip", "truncate", "extend", "remove", "empty", "folder", "link")


class Stand:
    """State of two ranks, saved every other step into ``run/checkpoints``."""

    def __init__(self, run: Path, plan: FilePlan | None = None) -> None:
        self.run, self.folder = run, run / "checkpoints"
        self.step, self.value = 0, torch.arange(24, dtype=torch.int64)
        self.plan = plan or FilePlan.make(self._state())
        self.memory = torch.zeros(self.plan.nbytes, dtype=torch.uint8)
        self.saved: list[tuple[int, int]] = []  # steps, and operations when each became valid
        self.attempt = 0

    def _state(self) -> dict[str, torch.Tensor]:
        return {"model.value": self.value}

    def resume(self) -> tuple[list[Path], list[Path]]:
        """Resume from the newest valid checkpoint; returns the valid ones and the skipped ones."""
        whole, damaged = [], []
        with suppress(ConfigError):
            for folder in disk.candidates(self.run):
                try:
                    content = manifest.read(folder)
                    manifest.check_files(folder, content, content.files)
                    whole.append(folder)
                except ConfigError:
                    damaged.append(folder)
        if whole:
            content = manifest.read(whole[0])
            chunk = content.tensors["model.value"].chunks[0]
            file = whole[0] / chunk.file
            data = bytearray(file.read_bytes() if file.is_file() else b"")[chunk.begin :]
            data = data[: chunk.length].ljust(chunk.length, b"\0")  # in case it was not verified
            self.step, self.value = content.step, torch.frombuffer(data, dtype=torch.int64)
        disk.discard_partial(self.folder)
        if whole:
            disk.abandon_later(self.folder, self.step)
        return whole, damaged

    def train(self, recorder: Recorder | None = None) -> None:
        """Run to the last step; re-raises an error of a save, after closing all files."""
        while self.step < STEPS:
            self.step += 1
            self.value = self.value * 6364136223846793005 + self.step
            if self.step % EVERY == 0:
                self._save()
                self.saved.append((self.step, len(recorder.done) if recorder else 0))

    def _save(self) -> None:
        final = disk.folder_of(self.folder, self.step)
        self.attempt += 1
        partial = disk.partial_of(final, f"stand-{os.getpid()}-{self.attempt}")
        self.plan.fill(self.memory, self._state())
        try:
            files = {}
            for rank in (0, 1):
                name = f"rank-{rank:05d}.safetensors"
                files[name] = disk.write_part(partial, name, self.memory.numpy().data)
            tensors = {k: v.model_dump(mode="json") for k, v in self.plan.tensors.items()}
            content = Manifest(
                step=self.step, run="stand", mesh={"world": 2}, config={}, loss_scaler=None,
                data={
                    "fingerprint": "", "sequences": self.step, "tokens": 0, "document": 0,
                    "token": 0,
                },
                values={}, tensors=tensors, files=files,
            ).model_dump(mode="json")  # fmt: skip
            disk.publish(partial, final, manifest.canonical(content), KEEP_LAST, KEEP_EVERY)
        except (OSError, Injected):
            shutil.rmtree(partial, ignore_errors=True)  # as the saver does
            raise


class Storage:
    """Injects random faults into saves and checks the state after each.

    Args:
        folder: an empty one, used by this object only.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "log"
        stand, recorder = self._stand("reference", [])
        self._plan = stand.plan
        with recorder.recording():
            stand.train(recorder)
        self._operations: list[Operation] = recorder.done
        self._saved = stand.saved
        self._last = stand.value

    def _stand(self, name: str, faults: list[dict[str, Any]]) -> tuple[Stand, Recorder]:
        run = self._folder / name
        run.mkdir()
        return Stand(run, getattr(self, "_plan", None)), Recorder(run, faults, self._log)

    def draw(self, chance: random.Random, number: int) -> Iterator[Found]:
        """``number`` faults, each checked separately."""
        for index in range(number):
            kind = KINDS[index % len(KINDS)]
            at = chance.randint(1, len(self._operations))
            fault = Fault(kind, "corruption" if kind == "corrupt" else "save's file operation")
            run = self._folder / f"run{index}"
            try:
                yield self._judge(fault, run, at, chance)
            finally:
                shutil.rmtree(run, ignore_errors=True)

    def _judge(self, fault: Fault, run: Path, at: int, chance: random.Random) -> Found:
        found = Found([fault], runs=0)
        what = f"{fault.kind} at operation {at} ({self._operations[at - 1][0]})"
        if fault.kind in ("kill", "power"):
            power = random.Random(chance.random()) if fault.kind == "power" else None
            write_out(played(self._operations[:at]), run, power)
            sure = max((step for step, count in self._saved if count <= at), default=0)
        elif fault.kind == "corrupt":
            write_out(played(self._operations), run, None)
            what = f"corrupt: {_corrupt(run / 'checkpoints', chance)}"
            sure = STEPS - EVERY
        else:
            error = errno.ENOSPC if fault.kind == "full" else errno.EIO
            sure, raised = self._break(run, at, error)
            if not raised:  # at an operation whose failure the library may ignore
                what += ", passed over"
        stand = Stand(run, self._plan)
        _, damaged = stand.resume()
        expected = 1 if fault.kind == "corrupt" else 0
        if len(damaged) != expected:
            found.unusable += abs(len(damaged) - expected)
            found.wrong.append(f"{what}: damaged are {[path.name for path in damaged]}")
        if stand.step < sure:
            found.lost += sure - stand.step
            found.wrong.append(f"{what}: step {sure} was valid, step {stand.step} is found")
        found.restarts += 1
        stand.train()
        if not torch.equal(stand.value, self._last):
            found.different += 1
            found.wrong.append(f"{what}: other values at the end")
        names = sorted(path.name for path in stand.folder.iterdir())
        names = [name for name in names if not name.startswith("abandoned-")]
        wanted = [*{f"step-{s:06d}" for s in (6, STEPS - EVERY, STEPS)}, "latest"]
        # Old ones that remain are removed by the next save, if there was one.
        names = [name for name in names if name in wanted or not disk.STEP.fullmatch(name)]
        if extra := set(names) - set(wanted):
            found.left += len(extra)
            found.wrong.append(f"{what}: left over are {sorted(extra)}")
        if missing := set(wanted) - set(names):
            found.unusable += len(missing)
            found.wrong.append(f"{what}: missing are {sorted(missing)}")
        return found

    def _break(self, run: Path, at: int, number: int) -> tuple[int, bool]:
        """Save until the error occurs; the last valid step by then, and whether it was raised."""
        run.mkdir()
        kind = "full" if number == errno.ENOSPC else "raise"
        faults = [{"id": 0, "kind": kind, "n": at, "when": "before"}]
        stand, recorder = Stand(run, self._plan), Recorder(run, faults, self._log)
        raised = False
        with recorder.recording():
            try:
                stand.train(recorder)
            except (OSError, Injected):
                raised = True
        return max((step for step, _ in stand.saved), default=0), raised


def _corrupt(checkpoints: Path, chance: random.Random) -> str:
    """Damage one file of the newest checkpoint."""
    folder = disk.steps_in(checkpoints)[0][1]
    path = chance.choice(sorted(folder.iterdir()))
    kind, data = chance.choice(_WRONG), bytearray(path.read_bytes())
    if kind == "flip":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
    elif kind in ("truncate", "empty"):
        path.write_bytes(data[: chance.randrange(len(data)) if kind == "truncate" else 0])
    elif kind == "extend":
        path.write_bytes(data + b"\0")
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to("/etc/hostname")
    return f"{kind} {path.name}"
