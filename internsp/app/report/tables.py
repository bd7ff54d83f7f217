"""Tables of the report: communication, waits and the ranks' coordinates in the mesh."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from internsp.app.report.timeline import (
    COMMUNICATION,
    Communication,
    StepTimes,
    communication,
    step_times,
    where_waited,
)
from internsp.base.trace import Event

COORDINATES = ("pipeline", "weight", "replica", "sequence", "data", "zero")
"""Keys of a rank's row that the mesh tables use, in addition to "rank"."""

_WORST = 3
_MAX_BLOCKS = 512
_MAX_GRID = 64

Traces = Mapping[int, Sequence[Event]]


@dataclass(frozen=True, slots=True)
class MeanRow:
    """A line of the communication table: means over the ranks, times in seconds.

    ``worst`` is the exposed time of the rank where it is longest. A row without a name is one phase
    of the row above. The ``total`` row counts each moment once and has no payload.
    """

    exposed: float
    hidden: float
    worst: float
    name: str = ""
    phase: str = ""
    count: float = 0.0
    nbytes: float = 0.0
    total: bool = False

    @classmethod
    def of(cls, rows: Sequence[Communication | StepTimes], ranks: int, **fields: object) -> MeanRow:
        """The mean of the ranks' ``rows``; a rank without such communication counts as zero."""
        exposed = sum(row.exposed for row in rows) / ranks
        hidden = sum(row.hidden for row in rows) / ranks
        return cls(exposed, hidden, max(row.exposed for row in rows), **fields)  # type: ignore[arg-type]

    @property
    def share(self) -> float | None:
        """The hidden part of the communication; ``None`` without communication."""
        together = self.exposed + self.hidden
        return self.hidden / together if together > 0 else None


def communication_rows(events: Traces) -> Iterator[MeanRow]:
    """Hidden and exposed time by kind and phase, and in total; nothing without a trace."""
    traces = [trace for trace in events.values() if trace]
    ranks = len(traces)
    found = [communication(trace) for trace in traces]
    for kind, name in COMMUNICATION.items():
        phases = list(dict.fromkeys(phase for each in found for key, phase in each if key == kind))
        for phase in phases if len(phases) > 2 else phases[:1]:  # the first is all together
            rows = [each[kind, phase] for each in found if (kind, phase) in each]
            count = sum(row.count for row in rows) / ranks
            nbytes = sum(row.nbytes for row in rows) / ranks
            label = {"name": name} if phase is None else {"phase": phase or "-"}
            yield MeanRow.of(rows, ranks, count=count, nbytes=nbytes, **label)
    if traces:
        yield MeanRow.of([step_times(trace) for trace in traces], ranks, total=True)


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """Waits in a phase for a kind of communication: mean seconds, share of all, worst blocks."""

    phase: str
    name: str
    seconds: float
    share: float
    worst: list[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Mean seconds waited in each block, by phase."""

    phases: list[str]
    rows: list[tuple[str, list[float]]]


def waiting(events: Traces) -> tuple[list[WaitingRow], Blocks]:
    """Waits of the computing thread: by phase and kind, longest first, and by block."""
    traces = [trace for trace in events.values() if trace]
    places: dict[tuple[str, str], dict[str, float]] = {}
    for trace in traces:
        for row in where_waited(trace):
            units = places.setdefault((row.phase, row.kind), {})
            units[row.unit] = units.get(row.unit, 0.0) + row.seconds / len(traces)
    sums = {place: sum(units.values()) for place, units in places.items()}
    total = sum(sums.values())
    rows = [
        WaitingRow(
            phase,
            COMMUNICATION.get(kind, ""),
            seconds,
            seconds / total,
            sorted(places[phase, kind].items(), key=lambda item: -item[1])[:_WORST],
        )
        for (phase, kind), seconds in sorted(sums.items(), key=lambda item: -item[1])
        if total > 0
    ]
    phases = list(dict.fromkeys(phase for phase, _ in places))
    names = sorted({u for found in places.values() for u in found}, key=_natural)[:_MAX_BLOCKS]
    by_phase = [[found for (p, _), found in places.items() if p == phase] for phase in phases]
    lines = [(u, [sum(f.get(u, 0.0) for f in found) for found in by_phase]) for u in names]
    return rows, Blocks(phases, lines)


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts ``layers.2`` before ``layers.10``."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in re.split(r"(\d+)", name)]


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranks by two coordinates; a line is one group of the ``across`` axis."""

    title: str
    across: str
    down: str
    columns: list[int]
    lines: dict[int, list[list[int]]]


def mesh_grids(ranks: Sequence[Mapping[str, int]]) -> Iterator[list[Grid]]:
    """The two factorings of the ranks, for each pipeline stage; nothing for very many ranks."""
    stages = sorted({row.get("pipeline", 0) for row in ranks})
    for stage in stages if len(ranks) <= _MAX_GRID else ():
        rows = [row for row in ranks if row.get("pipeline", 0) == stage]
        title = f"stage {stage}: " if len(stages) > 1 else ""
        yield [
            _grid(rows, down, across, title)
            for down, across in (("replica", "weight"), ("data", "sequence"))
            if all(down in row and across in row for row in rows)
        ]


def _grid(ranks: Sequence[Mapping[str, int]], down: str, across: str, title: str) -> Grid:
    columns = sorted({row[across] for row in ranks})
    cells = {
        line: [[r["rank"] for r in ranks if (r[down], r[across]) == (line, c)] for c in columns]
        for line in sorted({row[down] for row in ranks})
    }
    return Grid(title, across, down, columns, cells)
