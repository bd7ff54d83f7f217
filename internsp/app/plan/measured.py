"""Steps that a run has measured: their seconds, and how much they scatter.

Only finished steps of the run's last process count, without the first few, in which memory is
allocated and kernels are chosen.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from internsp.app.config import Config
from internsp.app.config.resume import saved_config
from internsp.app.report.page import load_report
from internsp.app.report.timeline import step_times
from internsp.errors import ConfigError
from internsp.mesh import MeshShape

WARM = 2  # first steps, which do not count
FEWEST = 8  # further steps that a run needs
SCATTER = 0.05  # of the median, on either side, within which four steps of five must be


@dataclass(frozen=True)
class MeasuredRun:
    """The steps of a run.

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
