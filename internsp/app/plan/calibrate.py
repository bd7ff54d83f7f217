"""``internsp plan CONFIG --calibrate RUN``: the constants of a device, fitted to one's own runs.

As many constants as there are runs: with one the share of the peak that products reach, with two
also the share of a link's rate, with three the slowdown beside messages. A constant that none of
the runs depends on stays as it was. Where a run has a trace, its messages in flight count, too.
"""

from __future__ import annotations

import datetime
import math
import statistics
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch

from internsp.app.config import Config
from internsp.app.config.resume import saved_config
from internsp.app.plan.answer import seconds_lines
from internsp.app.plan.classes import table
from internsp.app.plan.configured import on_machines
from internsp.app.plan.devices import FITTED_FILE, NUMBERS, TERA, Device, Fitted, on_device
from internsp.app.plan.replayed import StepReplay, replayed
from internsp.app.plan.seconds import StepSeconds
from internsp.app.plan.step import make_plan
from internsp.app.process import terminal
from internsp.app.report.page import load_report
from internsp.app.report.timeline import human_seconds, step_times
from internsp.base.version import __version__
from internsp.errors import ConfigError
from internsp.mesh import MeshShape

WARM = 2  # first steps, which do not count
FEWEST = 8  # further steps that a run needs
SCATTER = 0.05  # of the median, on either side, within which four steps of five must be
CONSTANTS = ("products", "links", "slowdown")
_HEAD = "# Written by internsp plan --calibrate."
_LEAST = {"products": 1e-3, "links": 1e-3, "slowdown": 1e-2}
_MOST = {"products": 1.0, "links": 1.0, "slowdown": 4.0}
_ASSUMED = 1000.0  # a peak that is an assumption may be so many times too low
_TOLD = 0.01  # a constant is fitted if a tenth more of it changes something by as much
_ROUNDS = 20

Predict = Callable[[Device], StepSeconds]


@dataclass(frozen=True)
class MeasuredRun:
    """The steps of a run: finished ones of its last process, without the first few, in which memory
    is allocated and kernels are chosen.

    Attributes:
        seconds: of a step, the median.
        steps: how many were measured.
        scatter: of the median, on either side, within which four steps of five are.
        messages: seconds in which messages were in flight in the traced step, hidden or not, the
            mean of its ranks; ``None`` without a trace.
    """

    name: str
    config: Config
    shape: MeshShape
    seconds: float
    steps: int
    scatter: float
    messages: float | None = None


def read_run(folder: Path) -> MeasuredRun:
    """The steps of a run in ``folder``, whose configuration is in ``config.toml``.

    Raises:
        ConfigError: it is not the folder of a run, the run is too short, its steps scatter, or
            they have different numbers of sequences.
    """
    where, report = f"--calibrate {folder}", load_report(folder)
    rows = [row for row in report.metrics if row.run == report.metrics[-1].run][WARM:]
    if len(rows) < FEWEST:
        raise ConfigError(
            f"{where}: {len(rows)} steps after the first {WARM}; set train.steps to "
            f"{WARM + FEWEST} or more"
        )
    if any(row.sequences is not None for row in rows):
        raise ConfigError(
            f"{where}: its steps have different numbers of sequences; leave out train.batch_tokens"
        )
    seconds = [row.step_seconds for row in rows]
    scatter = scatter_of(seconds)
    if scatter > SCATTER:
        raise ConfigError(
            f"{where}: four steps of five are within {scatter:.1%} of the median, more than "
            f"{SCATTER:.0%}; run it again with nothing beside it on the machine"
        )
    world = report.mesh.get("world")  # a run that was killed has left none
    try:
        config = saved_config(tomllib.loads(report.config_toml))
    except (tomllib.TOMLDecodeError, ConfigError) as error:
        raise ConfigError(f"{folder / 'config.toml'}: {error}") from None
    shape = MeshShape(world or config.launch.processes, **config.degrees())
    found = [step_times(events).communication for events in report.timeline.values() if events]
    messages = statistics.fmean(found) if found else None
    median = statistics.median(seconds)
    return MeasuredRun(str(folder), config, shape, median, len(rows), scatter, messages)


def scatter_of(seconds: Sequence[float]) -> float:
    """Half the distance from the first to the last tenth, in shares of the median."""
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / 2 / statistics.median(seconds)


@dataclass(frozen=True)
class Calibration:
    """What was fitted.

    Attributes:
        device: with the constants, under a name of its own.
        constants: names of those that were fitted.
        residuals: predicted over measured seconds, less 1, by run.
        untold: names of constants that no run depends on.
    """

    device: Device
    constants: tuple[str, ...]
    residuals: tuple[float, ...]
    untold: tuple[str, ...] = ()


def calibrate(runs: Sequence[MeasuredRun], device: Device) -> Calibration:
    """Fit the constants of ``device`` to ``runs``.

    Raises:
        ConfigError: the device has no rate for the runs' dtype; or no constant can be told.
    """
    cases: list[tuple[MeasuredRun, Predict]] = []
    for run in runs:  # as internsp plan predicts their seconds
        ranks = run.shape.world_size
        config = on_machines(on_device(run.config, device), ranks, device)
        cases.append((run, StepReplay(make_plan(config, ranks)).on))
    untold = tuple(name for name in CONSTANTS if not _depends(cases, device, name))
    free = tuple(name for name in CONSTANTS if name not in untold)[: len(runs)]
    if not free:
        raise ConfigError(
            f"--calibrate: no constant of {device.name} changes the seconds of these runs by "
            f"{_TOLD:.0%}; make a larger model or batch"
        )
    fitted = _fit(cases, device, free)
    names = tuple(Path(run.name).name for run in runs)
    found = replace(
        device, name=f"{device.name}-measured", fitted=replace(fitted, rows=names),
        source=f"{device.source}; constants: measured",
    )  # fmt: skip
    off = tuple(predict(found).total / run.seconds - 1 for run, predict in cases)
    return Calibration(found, free, off, untold)


def print_calibration(
    config: Config, ranks: int, device: Device, folders: Sequence[Path], write: Path | None = None
) -> None:
    """Fit ``device`` to the runs in ``folders``, write it, and print what it says of ``config``.

    Args:
        write: the file; ``None``: ``device.toml`` beside the first run.

    Raises:
        ConfigError: a run is none, too short or scatters; or the file cannot be written.
    """
    console = terminal.console()
    runs = [read_run(folder) for folder in folders]
    found = calibrate(runs, device)
    path = write or folders[0].resolve().parent / FITTED_FILE
    _write(path, text_of(found, runs, device))
    cells = [
        (run.name, run.steps, f"{run.scatter:.1%}", human_seconds(run.seconds),
         human_seconds(run.seconds * (1 + off)), f"{off:+.1%}")
        for run, off in zip(runs, found.residuals, strict=True)
    ]  # fmt: skip
    columns = ("<run", "steps", "scatter", "measured", "fitted", "off")
    console.print(table(f"Steps of {len(runs)} runs, the first {WARM} left out", columns, cells))
    for name in CONSTANTS:
        value, before = getattr(found.device.fitted, name), getattr(device.fitted, name)
        what = f"fitted, {before:.3g} before" if name in found.constants else "as before"
        console.print(f"{name} {value:.3g} ({what})", markup=False)
    if len(runs) == 1:
        console.print("one run fits one constant; give runs with other degrees to fit the others")
    if found.untold:
        console.print(f"these runs do not depend on: {', '.join(found.untold)}")
    console.print(f"{found.device.name} is in {path}: internsp plan --device-file", markup=False)
    shape = MeshShape(ranks, **config.degrees())
    seconds = replayed(config, ranks, found.device)
    for line in seconds_lines(config, shape, found.device, seconds):
        console.print(line, markup=False)


def text_of(found: Calibration, runs: Sequence[MeasuredRun], base: Device) -> str:
    """The file of a fitted device, in the form of ``devices.toml``."""
    device = found.device
    constants = {name: float(format(getattr(device.fitted, name), ".6g")) for name in CONSTANTS}
    values = {key: (getattr(device, name), unit) for key, (name, unit) in NUMBERS.items()}
    numbers = {k: value if unit == 1 else value / unit for k, (value, unit) in values.items()}
    entry = {
        "source": device.source,
        "kind": device.kind,
        "peak": {dtype: rate / TERA for dtype, rate in device.peak.items()},
        **numbers,
        "attention": {k: [rate / TERA for rate in rates] for k, rates in device.attention.items()},
        "fitted": {**constants, "rows": device.fitted.rows},
        "measured": {
            "base": base.name,
            "date": datetime.datetime.now(tz=datetime.UTC).date(),
            "internsp": __version__,
            "torch": torch.__version__,
            "constants": found.constants,
            "steps": [run.steps for run in runs],
            "scatter": [round(run.scatter, 4) for run in runs],
            "residual": round(max(map(abs, found.residuals)), 4),
        },
    }
    about = "residual: the largest share by which a run's predicted seconds are off."
    return f"{_HEAD} A file for --device-file.\n# {about}\n{tomli_w.dumps({device.name: entry})}"


def _errors(cases: Sequence[tuple[MeasuredRun, Predict]], device: Device) -> list[float]:
    """Logarithms of predicted over measured: seconds, and messages in flight where traced."""
    found = []
    for run, predict in cases:
        ours = predict(device)
        found.append(math.log(ours.total / run.seconds))
        if run.messages and ours.messages:
            # A trace has one step: it counts as half of the seconds of many.
            found.append(0.5 * math.log(ours.messages / run.messages))
    return found


def _depends(cases: Sequence[tuple[MeasuredRun, Predict]], device: Device, name: str) -> bool:
    # Slowdown works on what links and products do; a tenth of it is less.
    least = 0.3 * _TOLD if name == "slowdown" else _TOLD
    value = getattr(device.fitted, name)
    other = replace(device, fitted=replace(device.fitted, **{name: 0.9 * value}))
    return any(
        abs(predict(other).total / predict(device).total - 1) > least for _, predict in cases
    )


def _fit(
    cases: Sequence[tuple[MeasuredRun, Predict]], device: Device, names: Sequence[str]
) -> Fitted:
    """Least squares by damped Gauss-Newton steps in the logarithms of the constants."""
    most = dict(_MOST)
    if not device.fitted.rows:
        most["products"] = most["links"] = _ASSUMED

    def at(point: torch.Tensor) -> tuple[Fitted, torch.Tensor]:
        values: dict[str, Any] = {
            name: min(max(math.exp(float(x)), _LEAST[name]), most[name])
            for name, x in zip(names, point, strict=True)
        }
        fitted = replace(device.fitted, **values)
        errors = _errors(cases, replace(device, fitted=fitted))
        return fitted, torch.tensor(errors, dtype=torch.float64)

    start = [math.log(max(getattr(device.fitted, name), _LEAST[name])) for name in names]
    point, damping = torch.tensor(start, dtype=torch.float64), 1e-3
    fitted, errors = at(point)
    unit = torch.eye(len(names), dtype=torch.float64)
    for _ in range(_ROUNDS):
        slopes = torch.stack([(at(point + 1e-3 * way)[1] - errors) / 1e-3 for way in unit], dim=1)
        step = torch.linalg.solve(slopes.T @ slopes + damping * unit, -slopes.T @ errors).clamp(
            -1.0, 1.0
        )
        tried, fresh = at(point + step)
        if fresh.square().sum() < errors.square().sum():
            point, fitted, errors, damping = point + step, tried, fresh, damping / 10
            if step.abs().max() < 1e-4:
                break
        else:
            damping *= 10
            if damping > 1e3:
                break
    return fitted


def _write(path: Path, text: str) -> None:
    try:
        if path.is_file() and not path.read_text(encoding="utf-8").startswith(_HEAD):
            raise ConfigError(f"{path} was not written by --calibrate; name another with --write")
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {path}: {error.strerror}") from error
