"""Tables of the report: communication and waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from internsp.app.report.timeline import COMMUNICATION, communication, mean_waits, step_times
from internsp.base.trace import Event

_WORST = 3
_TOGETHER = "together"

Traces = Mapping[int, Sequence[Event]]


def communication_rows(events: Traces) -> Iterator[dict[str, Any]]:
    """Hidden and exposed time by kind, and in total; nothing without a trace.

    Means over the ranks, in seconds: a rank without such communication counts as zero. ``worst`` is
    the exposed time of the rank where it is longest. The last row counts each moment once and has
    no payload.
    """
    found = []
    for trace in filter(None, events.values()):
        times = step_times(trace)
        found.append({**communication(trace), _TOGETHER: (0, 0, times.exposed, times.hidden)})
    for kind, name in {**COMMUNICATION, _TOGETHER: _TOGETHER}.items():
        rows = [each[kind] for each in found if kind in each]
        if kind == _TOGETHER or any(nbytes for _, nbytes, *_ in rows):  # in groups of one: nothing
            means = [sum(column) / len(found) for column in zip(*rows, strict=True)]
            yield {
                **dict(zip(("count", "nbytes", "exposed", "hidden"), means, strict=False)),
                "name": name,
                "worst": max((exposed for _, _, exposed, _ in rows), default=0.0),
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
