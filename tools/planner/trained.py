"""Steps of ``internsp train`` on this machine, predicted from those of one run.

Runs take turns, as many times as asked for. ``internsp plan --calibrate`` fits the share of the
peak that products reach to the first; the steps of the others are those that ``internsp plan``
replays: other degrees, two stages, more ranks. Ranks beyond the machine's cores share them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from internsp.app.config.load import load_config
from internsp.app.plan.calibrate import WARM, MeasuredRun, calibrate, scatter_of
from internsp.app.plan.devices import Device, device_named
from internsp.app.plan.replayed import replayed
from internsp.app.report.page import load_report
from internsp.mesh import MeshShape
from tools.planner.own import on_share, order_line, share, waits_of

STEPS = 12
BASE = f"""
[model]
hidden_size = 384
layers = 6
heads = 6
[data]
source = "stdlib"
sequence_length = 512
[parallel]
weight = 2
[train]
steps = {STEPS}
global_batch = 4
[checkpoint]
save = false
[launch]
processes = 2
"""
CASES: dict[str, dict[str, object]] = {
    "weight 2": {},
    "weight 1": {"parallel.weight": 1},
    "sequence 2": {"parallel.sequence": 2},
    "2 micro-batches": {"train.micro_batches": 2},
    "recompute": {"activation_checkpoint.mode": "full"},
    "two stages, 4 micro-batches": {
        "parallel.weight": 1, "parallel.pipeline": 2, "train.micro_batches": 4,
    },
    "four ranks": {"parallel.weight": 4, "launch.processes": 4},
    "four ranks, weight 2": {"launch.processes": 4},
}  # fmt: skip


@dataclass
class Case:
    """A configuration's measured steps.

    Attributes:
        steps: seconds of each step, by round.
        waits: seconds of each in which rank 0 waited for messages.
    """

    name: str
    folder: Path
    steps: list[list[float]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def run(self) -> None:
        """One run, in a folder of its own."""
        config, output = self.folder / "base.toml", self.folder / f"{len(self.steps)}"
        config.write_text(BASE, encoding="utf-8")
        keys = [f"--{key}={value}" for key, value in CASES[self.name].items()]
        command = [sys.executable, "-m", "internsp", "train", str(config), "--output", str(output)]
        done = subprocess.run([*command, *keys], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{self.name}: {done.stdout}{done.stderr}")
        rows = load_report(output).metrics[WARM:]
        self.steps.append([row.step_seconds for row in rows])
        self.waits += [row.exposed_comm_seconds or 0.0 for row in rows]

    def measured(self) -> MeasuredRun:
        """All rounds as one run."""
        config = load_config(self.folder / "0" / "config.toml")
        shape = MeshShape(config.launch.processes, **config.degrees())
        every = [seconds for own in self.steps for seconds in own]
        return MeasuredRun(
            self.name, config, shape, median(every), len(every), scatter_of(every)
        )


def table(cases: Sequence[Case], base: Device) -> Iterator[str]:
    """Measured beside predicted steps; the first case gave the constant."""
    runs = [case.measured() for case in cases]
    found = calibrate(runs[:1], base).device
    yield f"fitted on {cases[0].name}: products {found.fitted.products:.3g}"
    yield "| run | seconds | rounds from, to | predicted | error | waits | predicted |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    pairs = []
    for case, run in zip(cases, runs, strict=True):
        part = share(run.shape.world_size) / share(runs[0].shape.world_size)
        step = replayed(run.config, run.shape.world_size, on_share(found, part))
        each = [median(own) for own in case.steps]
        pairs.append((run.seconds, step.total))
        yield (
            f"| {case.name} | {run.seconds:.4g} | {min(each):.4g}, {max(each):.4g} | "
            f"{step.total:.4g} | {100 * (step.total / run.seconds - 1):+.1f} % | "
            f"{median(case.waits):.3g} | {waits_of(step):.3g} |"
        )
    yield order_line(pairs)


def run(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Train ``names`` in turns, and predict all from the first."""
    with tempfile.TemporaryDirectory() as made:
        cases = [Case(name, Path(made) / f"{number}") for number, name in enumerate(names)]
        for case in cases:
            case.folder.mkdir()
        for _ in range(rounds):
            for case in cases:
                case.run()
        yield from table(cases, device_named("cpu"))
