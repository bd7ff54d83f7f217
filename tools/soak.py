"""A run with repeated faults: checks for lost steps, leftovers and growing memory.

    python -m tools.soak --minutes 10 --document docs/dev/reliability.md

One run is trained in segments. Each has another mesh, chosen at random, and ends with a random
fault; the next one resumes (``checkpoint.resume = "auto"``). At the end the run's own files show
whether a step, a token or a sequence was lost or repeated. Meanwhile the anonymous memory of every
rank is sampled twice a second; for each rank and segment a line is fitted over its later steps.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomli_w
import tyro

from internsp.app.checkpoint import manifest
from internsp.app.checkpoint.disk import steps_in
from internsp.app.report.metrics import read_metrics
from tools.bench.memory import status
from tools.bench.report import Page, Table, put, say

ROOT = Path(__file__).resolve().parents[1]
BATCH, EVERY, TIMEOUT = 12, 50, 20
MESHES: tuple[tuple[int, dict[str, int]], ...] = (
    (1, {}),
    (2, {"weight": 2}),
    (2, {"sequence": 2}),
    (2, {"weight": 2, "sequence": 2}),
    (2, {"pipeline": 2}),
    (3, {"weight": 3}),
    (4, {"weight": 2, "sequence": 2}),
    (4, {"weight": 2, "pipeline": 2}),
    (4, {"weight": 4, "sequence": 4, "ring": 2}),
)
# By name: the process that gets the signal, and the signal.
FAULTS: dict[str, tuple[str, int]] = {
    "a rank killed": ("rank", signal.SIGKILL),
    "a rank stopped (SIGSTOP)": ("rank", signal.SIGSTOP),
    "the launcher killed": ("launcher", signal.SIGKILL),
    "SIGTERM": ("launcher", signal.SIGTERM),
    "SIGHUP": ("launcher", signal.SIGHUP),
    "Ctrl-C": ("launcher", signal.SIGINT),
}
POLITE = {"SIGTERM", "SIGHUP", "Ctrl-C"}
_LOOK, _LIMIT = 0.5, 180.0  # seconds: between two samples; limit for a segment to begin or to end
# The allocator takes new memory in the first two or three thousand steps, and none afterwards.
_SETTLED, _RANGE = 3000, 1000  # steps: before the fit begins; least number for a fit
_TORCHS = "torchinductor_"  # an empty folder that torch leaves behind


@dataclass(frozen=True)
class Arguments:
    """Train for some minutes under faults and changes of mesh."""

    minutes: float = 10.0
    """Time in which segments are started."""
    seed: int = 0
    """Seed of meshes, faults and times."""
    segment_seconds: float = 60.0
    """Mean time from a segment's first step to its fault."""
    document: Path | None = None
    """A page, between the marks of which the figures are written; none: only print."""


@dataclass
class Segment:
    """One start of the run, and its result.

    Attributes:
        memory: for each rank (its process), samples of (step, bytes).
        seconds: from the fault to the end of all processes.
        left: processes that remained.
        wrong: violations, in words.
    """

    world: int
    mesh: dict[str, int]
    fault: str
    begun: int = 0
    ended: int = 0
    memory: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    seconds: float = 0.0
    left: int = 0
    wrong: list[str] = field(default_factory=list)


def configuration(folder: Path) -> Path:
    """Configuration: two mixed texts, tokens on disk, and a model with steps of milliseconds."""
    for name in ("docs", "internsp"):
        files = sorted((ROOT / name).rglob("*.md" if name == "docs" else "*.py"))
        rows = (json.dumps({"text": file.read_text()}) + "\n" for file in files)
        (folder / f"{name}.jsonl").write_text("".join(rows))
    tables = [
        {"name": name, "source": "jsonl", "paths": [str(folder / f"{name}.jsonl")], "weight": part}
        for name, part in (("docs", 1.0), ("internsp", 2.0))
    ]
    sections: dict[str, dict[str, Any]] = {
        "model": {"hidden_size": 32, "layers": 2, "heads": 4},
        "data": {
            "sequence_length": 32, "mixture": tables, "cache_dir": str(folder), "held_out": 0.0,
        },
        "parallel": {"timeout_seconds": TIMEOUT, "device": "cpu"},
        "weight_parallel": {"min_shard_elements": 256},
        "optimizer": {"min_lr_ratio": 1.0},
        "train": {
            "steps": 1_000_000_000, "global_batch": BATCH, "micro_batches": 2,
            "eval_batches": 0, "log_every": 1000,
        },
        "checkpoint": {"every": EVERY, "keep_last": 2, "resume": "auto"},
    }  # fmt: skip
    path = folder / "soak.toml"
    path.write_text(tomli_w.dumps(sections))
    return path


class WatchedWork:
    """A started run: the processes of its session, whose leader is the launcher."""

    def __init__(self, config: Path, folder: Path, segment: Segment) -> None:
        words = [sys.executable, "-m", "internsp", "train", str(config)]
        words += ["--output", str(folder / "run"), "--launch.processes", str(segment.world)]
        for key, degree in segment.mesh.items():
            section = "sequence" if key == "ring" else "parallel"
            words += [f"--{section}.{key}", str(degree)]
        self.segment, self.metrics = segment, folder / "run" / "metrics.jsonl"
        self.log = folder / "log.txt"
        (folder / "tmp").mkdir(exist_ok=True)
        environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            log.write(f"\n== {segment.world} {segment.mesh} {segment.fault}\n".encode())
            self.process = subprocess.Popen(
                words, stdout=log, stderr=log, env=environment, start_new_session=True, cwd=folder
            )

    def look(self) -> int:
        """Record the memory of ranks that is their own; returns the last step in the metrics."""
        step = last_step(self.metrics)
        for rank in self.ranks():
            with suppress(OSError, KeyError):  # it has just ended
                held = status("RssAnon", rank)
                self.segment.memory.setdefault(rank, []).append((step, held))
        return step

    def ranks(self) -> list[int]:
        """Children of the fork server, which is a child of the launcher."""
        parents = self.alive()
        servers = {pid for pid, parent in parents.items() if parent == self.process.pid}
        return [pid for pid, parent in parents.items() if parent in servers]

    def ended(self, since: float) -> bool:
        """Wait until all processes have ended; returns whether they have."""
        while time.monotonic() - since < _LIMIT:
            self.process.poll()
            if not self.alive() and self.process.returncode is not None:
                return True
            time.sleep(0.05)
        return False

    def alive(self) -> dict[int, int]:
        """Processes that exist, and the parent of each."""
        found = {}
        for place in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # of a process that has just ended
                state, parent, _, session, *_ = place.read_text().rpartition(")")[2].split()
                if session == str(self.process.pid) and state != "Z":
                    found[int(place.parent.name)] = int(parent)
        return found

    def kill(self) -> None:
        """Kill the remaining processes."""
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def last_step(metrics: Path) -> int:
    """The step of the last complete row."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            rows = file.read().split(b"\n")[1:-1]
        return int(json.loads(rows[-1])["step"]) if rows else 0
    except (OSError, ValueError, KeyError):
        return 0


def run_segment(config: Path, folder: Path, segment: Segment, wait: float) -> None:
    """Start the run, let it train, inject the fault, and check how it ends."""
    segment.begun = max((step for step, _ in steps_in(folder / "run" / "checkpoints")), default=0)
    run = WatchedWork(config, folder, segment)
    try:
        since = time.monotonic()
        fault_at = math.inf
        while time.monotonic() < fault_at:
            time.sleep(_LOOK)
            step, now = run.look(), time.monotonic()
            fresh = run.metrics.exists() and run.metrics.stat().st_mtime > _began(run.process.pid)
            if fault_at == math.inf and fresh and step > segment.begun:
                fault_at = now + wait
            if run.process.poll() is not None:
                segment.wrong.append(f"ended by itself with {run.process.returncode}")
                return
            if fault_at == math.inf and now - since > _LIMIT:
                segment.wrong.append("did not begin")
                return
        segment.ended = last_step(run.metrics)
        whom, number = FAULTS[segment.fault]
        targets = [run.process.pid] if whom == "launcher" else run.ranks()
        if not targets:
            segment.wrong.append(f"there was no {whom}")
            return
        os.kill(random.choice(targets), number)
        since = time.monotonic()
        if not run.ended(since):
            segment.wrong.append("hung")
        segment.seconds = time.monotonic() - since
        segment.left = len(run.alive())
        status = run.process.returncode
        if segment.fault in POLITE:
            if status not in (0, 128 + number):
                segment.wrong.append(f"ended with {status}")
            segment.ended = last_step(run.metrics)
        elif status == 0:
            segment.wrong.append("ended with 0")
    finally:
        run.kill()
        names = [path.name for path in (folder / "tmp").iterdir()]
        left = [name for name in names if not name.startswith(_TORCHS)]
        if left:
            segment.wrong.append(f"left temporary files {left}")
            for name in left:
                with suppress(OSError):
                    (folder / "tmp" / name).unlink()


def _began(pid: int) -> float:
    with suppress(OSError):
        return Path(f"/proc/{pid}").stat().st_ctime
    return math.inf


def slopes(segments: Iterable[Segment]) -> list[tuple[float, float]]:
    """For each rank and segment that ran long enough: bytes per step, and the range of steps."""
    found = []
    for segment in segments:
        for read in segment.memory.values():
            first = next((step for step, _ in read if step), 0)
            later = [(step, held) for step, held in read if step > first + _SETTLED]
            if len(later) < 8 or later[-1][0] - later[0][0] < _RANGE:
                continue
            steps, held = zip(*later, strict=True)
            found.append((statistics.linear_regression(steps, held).slope, steps[-1] - steps[0]))
    return found


def growth(found: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean bytes per step and twice its standard error, weighted by each fit's range of steps."""
    total = sum(weight for _, weight in found)
    mean = sum(slope * weight for slope, weight in found) / total
    spread = sum((weight * (slope - mean)) ** 2 for slope, weight in found)
    few = len(found) / max(len(found) - 1, 1)
    return mean, 2 * math.sqrt(spread * few) / total


def checked(folder: Path, segments: list[Segment]) -> dict[str, Any]:
    """Check the run's own files after all segments."""
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    steps = [row.step for row in rows]
    _, path = max(steps_in(folder / "run" / "checkpoints"))
    saved = manifest.read(path)
    again = sum(max(0, one.ended - two.begun) for one, two in pairwise(segments))
    return {
        "steps": len(rows),
        "steps lost or twice": len(set(range(1, len(rows) + 1)) ^ set(steps))
        + len(steps)
        - len(set(steps)),
        "tokens lost or twice": abs((rows[-1].total_tokens or 0) - sum(row.tokens for row in rows)),
        "sequences lost or twice": abs(saved.data.sequences - saved.step * BATCH),
        "steps done again": again,
        "loss": (rows[0].loss, statistics.fmean(row.loss for row in rows[-50:])),
    }


def report(segments: list[Segment], found: dict[str, Any]) -> Page:
    """The figures."""
    by_fault = Counter(segment.fault for segment in segments)
    slowest = max(segments, key=lambda segment: segment.seconds)
    table = [
        ["found", ""],
        ["segments", str(len(segments))],
        ["changes of mesh", str(sum(a.mesh != b.mesh or a.world != b.world
                                    for a, b in pairwise(segments)))],
        *([name, str(count)] for name, count in sorted(by_fault.items())),
        ["steps", f"{found['steps']:,}"],
        ["steps done again after a fault", f"{found['steps done again']:,}"],
        *([key, f"{found[key]:,}"] for key in found if key.endswith("lost or twice")),
        ["hangs", str(sum("hung" in s.wrong for s in segments))],
        ["processes left over", str(sum(s.left for s in segments))],
        ["anything else amiss", str(sum(len(s.wrong) for s in segments))],
        ["longest time from a fault to the end of all processes, s",
         f"{slowest.seconds:.1f} ({slowest.fault})"],
        ["loss, first step and mean of the last 50", "{:.3f}, {:.3f}".format(*found["loss"])],
    ]  # fmt: skip
    if fits := slopes(segments):
        mean, error = growth(fits)
        ranks = f"{mean * 1000 / 1024:+.1f} ± {error * 1000 / 1024:.1f}"
        table.append(["growth of a rank's memory, KiB in 1,000 steps", ranks])
        table.append(["fitted over, ranks of segments and their steps",
                      f"{len(fits)}, {int(sum(weight for _, weight in fits)):,}"])  # fmt: skip
    facts = [
        "trains one run for some minutes, on 1 to 4 processes of this machine",
        "each segment has another mesh and number of ranks and ends with a fault; the next one "
        "resumes by itself",
    ]
    remarks = [
        f"A segment begins by reading the newest checkpoint (one every {EVERY} steps), so the "
        "steps after it are done again.",
        "The growth is the mean of lines fitted to each rank's anonymous memory from its "
        f"{_SETTLED}th step of a segment on, with twice its standard error over ranks and "
        "segments.",
        f"Stopped ranks are noticed after `parallel.timeout_seconds` ({TIMEOUT} s here).",
    ]
    return Page(facts, [Table(table, remarks=remarks)])


def soak(given: Arguments, folder: Path) -> tuple[list[Segment], dict[str, Any]]:
    """Run all segments in ``folder``, then check its files."""
    random.seed(given.seed)
    config = configuration(folder)
    segments: list[Segment] = []
    faults: list[str] = []
    end = time.monotonic() + 60 * given.minutes
    while time.monotonic() < end or not segments or segments[-1].fault not in POLITE:
        faults = faults or random.sample(list(FAULTS), len(FAULTS))
        others = [m for m in MESHES if not segments or m != (segments[-1].world, segments[-1].mesh)]
        world, mesh = random.choice(others)
        fault = faults.pop() if time.monotonic() < end else "SIGTERM"
        segment = Segment(world, mesh, fault)
        segments.append(segment)
        run_segment(config, folder, segment, given.segment_seconds * random.uniform(0.5, 1.5))
        say(f"{world} ranks {mesh}: steps {segment.begun} to {segment.ended}, {fault}, "
            f"{segment.seconds:.1f} s {'; '.join(segment.wrong)}")  # fmt: skip
        if segment.wrong and not segment.ended:
            say((folder / "log.txt").read_text()[-3000:])
            break
    return segments, checked(folder, segments)


def main(arguments: list[str]) -> int:
    """Returns 0 if nothing was lost, left behind or wrong."""
    given = tyro.cli(Arguments, args=arguments, description=__doc__)
    # The parent may ignore signals (nohup, a background job), and the runs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        segments, found = soak(given, Path(folder))
    page = report(segments, found)
    print(page.text())
    for segment in segments:
        for wrong in segment.wrong:
            say(f"{segment.world} ranks {segment.mesh}, {segment.fault}: {wrong}")
    if given.document is not None:
        put(given.document, "soak", page.markdown(["python", "-m", "tools.soak", *arguments]))
    lost = sum(value for key, value in found.items() if key.endswith("lost or twice"))
    return int(bool(lost or any(s.wrong or s.left for s in segments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
