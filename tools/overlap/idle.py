"""Idle time of the link in one step: by phase, by block, and by cause.

Pure functions. The samples show how many bytes a rank's interface had sent at each time; link time
for which the rate would have carried more bytes than that is lost. A token bucket lets a sender
catch up with its burst, so that only sums over more than a few milliseconds are meaningful, and a
lost time may be slightly negative.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from internsp.app.report.timeline import merge, subtract
from tools.bench.bounds import MBIT

Intervals = list[tuple[float, float]]
Named = list[tuple[float, float, str]]

COLLECTIVES = ("AG", "RS", "EX", "A2A", "PUBLISH", "MATRIX")
FINISH = "finish"
NOTHING, BEHIND, FLYING = "nothing launched", "another rank behind", "in flight"


def phases(marks: Sequence[tuple[str, float]], last_launch: float | None) -> Named:
    """The step divided at its marks; backward after its last launch is called ``finish``."""
    out: Named = []
    for (name, start), (_, end) in itertools.pairwise(marks):
        start = start if out else 0.0
        split = last_launch if name == "backward" and last_launch is not None else end
        split = min(max(split, start), end)
        out += [(start, split, name), (split, end, FINISH)]
    return [(a, b, name) for a, b, name in out if b > a]


def blocks(events: Sequence[Sequence[Any]], end: float) -> Named:
    """The block that computes or waits for its weights, from one use to the next."""
    starts: list[tuple[float, str]] = []
    for kind, unit, _, phase, start, _, _ in events:
        if kind == "USE" or (kind == "WAIT" and phase != FINISH):
            starts.append((start, unit))
    starts.sort()
    nexts = [start for start, _ in starts[1:]] + [end]
    return [(a, b, unit) for (a, unit), b in zip(starts, nexts, strict=True) if b > a]


def causes(flights: Sequence[Intervals], end: float) -> Named:
    """Divide ``0 .. end`` by whether the link had anything to send.

    Args:
        flights: for each rank, from launch to end of every collective, in the order of launch (the
            same on all ranks). A collective can be sent once the last rank has launched it.
    """
    ready: Intervals = []
    asked: Intervals = []
    for together in zip(*flights, strict=True):
        first, last = min(a for a, _ in together), max(a for a, _ in together)
        done = max(b for _, b in together)
        ready.append((last, max(last, done)))
        asked.append((first, max(last, done)))
    named: Named = [(a, b, FLYING) for a, b in merge(ready)]
    named += [(a, b, BEHIND) for a, b in subtract(asked, ready)]
    named += [(a, b, NOTHING) for a, b in subtract([(0.0, end)], asked)]
    return sorted((max(a, 0.0), min(b, end), name) for a, b, name in named if a < end and b > 0.0)


def lost(
    samples: Sequence[Sequence[float]], rate_mbit: float, ways: Sequence[Named], end: float
) -> dict[tuple[str, ...], float]:
    """Seconds for which the link carried nothing, by the names in all ``ways`` at that time.

    Args:
        samples: ``(seconds, bytes sent so far)``, in order.
        ways: classifications of time; where one has no name for a time, the name is ``""``.
        end: of the step, which begins at 0.
    """
    sums: dict[tuple[str, ...], float] = {}
    edges = sorted({0.0, end, *(x for way in ways for a, b, _ in way for x in (a, b))})
    for (start, before), (stop, after) in itertools.pairwise(samples):
        if stop <= start:
            continue
        share = 1.0 - (after - before) / (rate_mbit * MBIT) / (stop - start)
        low, high = max(start, 0.0), min(stop, end)
        inside = [low, *(x for x in edges if low < x < high), high]
        for a, b in itertools.pairwise(inside):
            if b > a:
                names = tuple(_name(way, (a + b) / 2) for way in ways)
                sums[names] = sums.get(names, 0.0) + share * (b - a)
    return sums


def _name(way: Named, time: float) -> str:
    return next((name for a, b, name in way if a <= time < b), "")


def found(profiles: Sequence[dict[str, Any]], rate_mbit: float) -> dict[str, Any] | None:
    """Idle time of rank 0's link in a profiled step; ``None`` if no counter could be read.

    Args:
        profiles: of all ranks, rank 0's first; its ``zero`` is on a clock shared by all ranks.

    Returns:
        ``seconds`` of the step, ``idle`` seconds among them, and these divided among ``phases``,
        ``blocks`` (a list of block, phase, seconds, longest first) and ``causes``; the last two are
        empty for a variant without a trace.
    """
    own = profiles[0]
    if len(own["link"]) < 2:
        return None
    end = own["marks"][-1][1]
    flights = [_flights(profile, own["zero"]) for profile in profiles]
    launches = [a for a, _ in flights[0]]
    traced = bool(launches) and all(len(f) == len(launches) for f in flights)
    ways: list[Named] = [phases(own["marks"], max(launches) if traced else None)]
    ways += [blocks(own["events"], end), causes(flights, end)] if traced else [[], []]
    cells = lost(own["link"], rate_mbit, ways, end)
    by_phase, by_block, by_cause = _sums(cells, 0), _sums(cells, 1, 0), _sums(cells, 2)
    ordered = sorted(by_block.items(), key=lambda item: -item[1])
    return {
        "seconds": end,
        "idle": sum(cells.values()),
        "phases": {k[0]: v for k, v in by_phase.items()},
        "blocks": [(*names, value) for names, value in ordered] if traced else [],
        "causes": {k[0]: v for k, v in by_cause.items()} if traced else {},
    }


def _flights(profile: dict[str, Any], zero: float) -> Intervals:
    shift = profile["zero"] - zero
    return [(e[4] + shift, e[5] + shift) for e in profile["events"] if e[0] in COLLECTIVES]


def _sums(cells: dict[tuple[str, ...], float], *places: int) -> dict[tuple[str, ...], float]:
    sums: dict[tuple[str, ...], float] = {}
    for names, value in cells.items():
        key = tuple(names[place] for place in places)
        sums[key] = sums.get(key, 0.0) + value
    return sums


def sentence(label: str, row: dict[str, Any]) -> str:
    """The text for the report."""

    def listed(items: Sequence[tuple[str, float]]) -> str:
        return ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in items)

    share = row["idle"] / row["seconds"]
    out = (
        f"{label}: link idle in one step, {row['idle']:.3f} s of {row['seconds']:.3f} s "
        f"({share:.0%}), by phase: {listed(list(row['phases'].items()))}"
    )
    if row["blocks"]:
        most = [(f"{block or 'start'} {phase}", s) for block, phase, s in row["blocks"][:8]]
        out += f"; by block: {listed(most)}; why: {listed(list(row['causes'].items()))}"
    return out
