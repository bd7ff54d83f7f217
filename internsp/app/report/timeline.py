"""Lanes of one step's timeline, and how much of its communication compute has hidden.

Everything here is a pure function of :class:`internsp.base.trace.Event`; nothing blocks or uses a
device. The computing thread either waits (``WAIT``) or works, so of every stretch of communication

- **exposed** is the part during a wait: nothing was computed meanwhile;
- **hidden** is the rest.

A step's compute is the step minus its waits. Times are seconds of ``time.perf_counter()``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from internsp.base.trace import Event

Interval = tuple[float, float]

COMMUNICATION: Mapping[str, str] = {
    "AG": "gathers",
    "RS": "reduce-scatters",
    "EX": "exchanges between replicas",
    "A2A": "all-to-alls",
    "RING": "keys and values",
    "PUBLISH": "parameter all-gathers",
    "MATRIX": "matrices to and from their owners",
}
"""Kinds of events that are communication, with their names."""

_DRAWN = {
    "compute": (),
    "gathers": ("AG",),
    "reduce-scatters": ("RS", "EX"),
    "all-to-alls": ("A2A", "RING"),
    "optimizer": ("STEP", "FINISH", "PUBLISH", "MATRIX"),
}
LANES = tuple(_DRAWN)
"""Lanes of a step's timeline, from top to bottom."""

WAITS = ("WAIT", "A2A_WAIT", "RING_WAIT")
"""Kinds of waits of the computing thread; those for sequence collectives have their own kinds."""

_LANE_OF = {kind: lane for lane, kinds in _DRAWN.items() for kind in kinds}
_PHASE_OF = {"FORWARD": "forward", "BACKWARD": "backward", "STEP": "optimizer"}


# Intervals. Lists returned here are sorted, disjoint and without empty members.


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of ``intervals``; touching ones are joined, empty ones left out."""
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def measure(intervals: Iterable[Interval]) -> float:
    """Total length of the union of ``intervals``."""
    return sum(end - start for start, end in merge(intervals))


def intersect(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The intersection of both unions."""
    first = merge(a)
    return subtract(first, subtract(first, b))


def subtract(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The union of ``a`` without the union of ``b``."""
    out: list[Interval] = []
    holes = merge(b)
    j = 0
    for start, end in merge(a):
        while j < len(holes) and holes[j][1] <= start:
            j += 1
        k = j
        while k < len(holes) and holes[k][0] < end:
            if holes[k][0] > start:
                out.append((start, holes[k][0]))
            start = max(start, holes[k][1])
            k += 1
        if end > start:
            out.append((start, end))
    return out


# Figures of a step.


def human_seconds(seconds: float) -> str:
    """``1.19 s`` or ``41.2 ms``."""
    return f"{seconds:.3g} s" if seconds >= 0.5 else f"{1000 * seconds:.3g} ms"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of one rank's step in seconds.

    ``exposed`` is the sum of all waits, also of those that no traced communication explains, so
    that ``compute + exposed == step``. ``hidden`` is the time outside waits in which communication
    was in flight; each moment counts once however many collectives were in flight.
    """

    step: float
    exposed: float
    hidden: float

    @property
    def compute(self) -> float:
        """The step minus its waits."""
        return self.step - self.exposed

    @property
    def communication(self) -> float:
        """Sum of exposed and hidden communication."""
        return self.exposed + self.hidden


class Communication(NamedTuple):
    """Collectives of one rank; of those in flight together a moment counts once.

    Those of different kinds may add up to more than the step's total: a moment with two kinds in
    flight counts in both.
    """

    collectives: int
    nbytes: int
    exposed: float
    hidden: float


def window_of(events: Iterable[Event]) -> Interval:
    """The interval from the first start to the last end; (0, 0) without events."""
    starts, ends = [], []
    for event in events:
        starts.append(event.start)
        ends.append(event.start if event.end is None else max(event.start, event.end))
    return (min(starts), max(ends)) if starts else (0.0, 0.0)


def spans(events: Sequence[Event], kinds: Collection[str]) -> list[Interval]:
    """Intervals of the events of ``kinds``; an event without an end lasts to the step's end."""
    window = window_of(events)
    return [_span(event, window) for event in events if event.kind in kinds]


def step_times(events: Sequence[Event]) -> StepTimes:
    """Compute, exposed and hidden communication of one rank's step."""
    start, end = window_of(events)
    waited, in_flight = spans(events, WAITS), spans(events, COMMUNICATION)
    return StepTimes(end - start, measure(waited), measure(subtract(in_flight, waited)))


def communication(events: Sequence[Event]) -> dict[str, Communication]:
    """Hidden and exposed communication of one rank's step, by kind."""
    waited = spans(events, WAITS)
    found = {}
    for kind in COMMUNICATION:
        if members := [event for event in events if event.kind == kind]:
            in_flight = spans(events, (kind,))
            exposed = measure(intersect(in_flight, waited))
            nbytes = sum(event.nbytes for event in members)
            found[kind] = Communication(len(members), nbytes, exposed, measure(in_flight) - exposed)
    return found


def where_waited(events: Sequence[Event]) -> dict[tuple[str, str, str], float]:
    """Seconds waited by kind of communication that was waited for, unit and phase, longest first.

    A wait is matched with the collective of the same unit and weight that was in flight during it
    and whose end is closest to the wait's end; its kind is "" if the trace has none.
    """
    window = window_of(events)
    flights: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        if event.kind in COMMUNICATION:
            flights.setdefault((event.unit, event.weight), []).append(event)
    groups: dict[tuple[str, str, str], list[Interval]] = {}
    for event in events:
        if event.kind in WAITS:
            kind = _awaited(event, flights.get((event.unit, event.weight), []), window)
            groups.setdefault((kind, event.unit, event.phase), []).append(_span(event, window))
    found = {place: measure(waited) for place, waited in groups.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def mean_waits(events: Mapping[int, Sequence[Event]]) -> dict[tuple[str, str, str], float]:
    """The mean of :func:`where_waited` over the ranks that were traced."""
    traces, found = [trace for trace in events.values() if trace], Counter[tuple[str, str, str]]()
    for trace in traces:
        found.update(where_waited(trace))
    return {place: seconds / len(traces) for place, seconds in found.items()}


# Lanes, for drawing.


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a lane. ``kind`` is "COMPUTE" or the kind of the event that the bar shows."""

    kind: str
    start: float
    end: float
    unit: str = ""
    weight: str = ""
    phase: str = ""
    nbytes: int = 0


def build_timeline(events: Sequence[Event]) -> dict[str, list[Bar]]:
    """Sort one rank's events of one step into :data:`LANES`: bars by their start.

    The compute lane has the waits (kind "WAIT") and between them what was computed (kind
    "COMPUTE"), split where ``USE``, ``FORWARD``, ``BACKWARD`` or ``STEP`` begin another unit or
    phase, and empty during the optimizer step. Finished reductions that took no time to finish are
    left out.
    """
    window = window_of(events)
    lanes: dict[str, list[Bar]] = {lane: [] for lane in LANES}
    for event in events:
        start, end = _span(event, window)
        lane = "compute" if event.kind in WAITS else _LANE_OF.get(event.kind)
        if lane is None or end < start or (end == start and event.kind in (*WAITS, "FINISH")):
            continue
        kind = "WAIT" if lane == "compute" else event.kind
        bar = Bar(kind, start, end, event.unit, event.weight, event.phase, event.nbytes)
        lanes[lane].append(bar)
    lanes["compute"] += _computing(events, window)
    return {k: sorted(v, key=lambda b: (b.start, b.end)) for k, v in lanes.items()}


def _computing(events: Sequence[Event], window: Interval) -> list[Bar]:
    busy = subtract([window], spans(events, (*WAITS, "STEP")))
    marks = sorted(
        (
            (e.start, e.unit, e.phase or _PHASE_OF.get(e.kind, ""))
            for e in events
            if e.kind == "USE" or e.kind in _PHASE_OF
        ),
        key=lambda mark: mark[0],
    )
    times = [mark[0] for mark in marks]
    bars: list[Bar] = []
    for start, end in busy:
        at = start
        while at < end:
            i = bisect_right(times, at)
            until = min(end, times[i]) if i < len(times) else end
            unit, phase = (marks[i - 1][1], marks[i - 1][2]) if i else ("", "")
            last = bars[-1] if bars else None
            if last and (last.end, last.unit, last.phase) == (at, unit, phase):
                bars[-1] = Bar("COMPUTE", last.start, until, unit, "", phase)
            else:
                bars.append(Bar("COMPUTE", at, until, unit, "", phase))
            at = until
    return bars


def _span(event: Event, window: Interval) -> Interval:
    """The event's interval; an event without an end lasts to the end of the window."""
    return event.start, window[1] if event.end is None else event.end


def _awaited(wait: Event, flights: Sequence[Event], window: Interval) -> str:
    start, end = _span(wait, window)
    best, distance = "", float("inf")
    for event in flights:
        launched, done = _span(event, window)
        # A completion is noticed at the end of its wait, so the two touch or overlap.
        if launched <= end and done >= start and abs(done - end) < distance:
            best, distance = event.kind, abs(done - end)
    return best
