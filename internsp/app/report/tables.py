"""Tables of the report: communication, waits and the ranks' coordinates in the mesh."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from internsp.app.report.timeline import COMMUNICATION, communication, mean_waits, step_times
from internsp.base.trace import Event

COORDINATES = ("pipeline", "weight", "replica", "sequence", "data", "zero")
"""Keys of a rank's row that the mesh tables use, in addition to "rank"."""

_WORST = 3
_MAX_BLOCKS = 512
_MAX_GRID = 64
_TOGETHER = "together"

Traces = Mapping[int, Sequence[Event]]


def communication_rows(events: Traces) -> Iterator[dict[str, Any]]:
    """Hidden and exposed time by kind and phase, and in total; nothing without a trace.

    Means over the ranks, in seconds: a rank without such communication counts as zero. ``worst`` is
    the exposed time of the rank where it is longest. A row without a name is one phase of the row
    above. The last row counts each moment once and has no payload.
    """
    found = []
    for trace in filter(None, events.values()):
        times = step_times(trace)
        found.append(
            {**communication(trace), (_TOGETHER, None): (0, 0, times.exposed, times.hidden)}
        )
    for kind, name in {**COMMUNICATION, _TOGETHER: _TOGETHER}.items():
        phases = list(dict.fromkeys(  # in groups of one nothing is sent
            phase for each in found for (key, phase), (_, nbytes, *_) in each.items()
            if key == kind and (nbytes or kind == _TOGETHER)
        ))  # fmt: skip
        for phase in phases if len(phases) > 2 else phases[:1]:  # the first is all together
            rows = [each[kind, phase] for each in found if (kind, phase) in each]
            means = [sum(column) / len(found) for column in zip(*rows, strict=True)]
            yield {
                **dict(zip(("count", "nbytes", "exposed", "hidden"), means, strict=True)),
                "name": name if phase is None else "",
                "phase": "all" if phase is None else phase or "-",
                "worst": max(exposed for _, _, exposed, _ in rows),
                "total": kind == _TOGETHER,
            }


def waits_by_place(events: Traces) -> list[tuple[str, str, float, list[tuple[str, float]]]]:
    """Waits of the computing thread, longest first: the phase, what for, mean seconds, and the
    blocks that waited most."""
    places: dict[tuple[str, str], dict[str, float]] = {}
    for (kind, unit, phase), seconds in mean_waits(events).items():
        if seconds > 0:  # else no share of all could be told
            places.setdefault((phase, COMMUNICATION.get(kind, "")), {})[unit] = seconds
    rows = [
        (*place, sum(units.values()), sorted(units.items(), key=lambda item: -item[1])[:_WORST])
        for place, units in places.items()
    ]
    return sorted(rows, key=lambda row: -row[2])


def waits_by_block(events: Traces) -> tuple[list[str], dict[str, list[float]]]:
    """The phases in which blocks waited, and the mean seconds of each block in them."""
    waits = mean_waits(events)
    phases = list(dict.fromkeys(phase for _, _, phase in waits))
    names = sorted({unit for _, unit, _ in waits}, key=_natural)[:_MAX_BLOCKS]
    lines = {name: dict.fromkeys(phases, 0.0) for name in names}
    for (_, unit, phase), seconds in waits.items():
        if unit in lines:
            lines[unit][phase] += seconds
    return phases, {name: list(line.values()) for name, line in lines.items()}


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts ``layers.2`` before ``layers.10``."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in re.split(r"(\d+)", name)]


def mesh_grids(ranks: Sequence[Mapping[str, int]]) -> Iterator[list[dict[str, Any]]]:
    """The two factorings of the ranks, for each pipeline stage; nothing for very many ranks.

    A line of a grid is one group of its ``across`` axis.
    """
    stages = sorted({row.get("pipeline", 0) for row in ranks})
    for stage in stages if len(ranks) <= _MAX_GRID else ():
        rows = [row for row in ranks if row.get("pipeline", 0) == stage]
        grids: list[dict[str, Any]] = []
        for down, across in (("replica", "weight"), ("data", "sequence")):
            if not all(down in row and across in row for row in rows):
                continue
            columns = sorted({row[across] for row in rows})
            lines = {
                line: [
                    [r["rank"] for r in rows if (r[down], r[across]) == (line, c)] for c in columns
                ]
                for line in sorted({row[down] for row in rows})
            }
            title = f"stage {stage}: " if len(stages) > 1 else ""
            grids.append(
                {"title": title, "across": across, "down": down, "columns": columns, "lines": lines}
            )
        yield grids
