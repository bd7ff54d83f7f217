"""Append-only log of what one rank did. Off by default; an object that is passed in, never global.

Kinds for weights: ``AG`` (gather launched), ``WAIT``, ``USE``, ``FREE``, ``RS`` (reduction
launched), ``DRAIN``; for sequences ``A2A``; for the optimizer ``STEP`` and ``PUBLISH``; for the
timeline ``FORWARD`` and ``BACKWARD``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Times are ``time.perf_counter()`` seconds. For a collective, ``start`` is its launch and
    ``end`` its completion (``None`` while in flight); for ``WAIT`` they bound the time in which
    the computing thread waited; for instants they are equal.
    """

    kind: str
    unit: str
    weight: str
    phase: str
    start: float
    end: float | None
    nbytes: int

    def line(self) -> str:
        """The event without its times, as the schedule prints it."""
        return f"{self.kind} {self.phase} {self.weight or self.unit}".rstrip()


class Trace:
    """Events in the order in which they were recorded. ``record`` costs nothing when disabled."""

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self.events: list[Event] = []
        self.exposed_seconds = 0.0
        """Time the computing thread waited for communication; counted also when disabled."""

    def record(
        self,
        kind: str,
        unit: str = "",
        weight: str = "",
        phase: str = "",
        nbytes: int = 0,
        start: float | None = None,
        end: float | None = None,
        in_flight: bool = False,
    ) -> int:
        """Append an event and return its index, or -1 when the trace is disabled.

        Args:
            in_flight: leave ``end`` open, to be filled by :meth:`finish`.
        """
        if not self.enabled:
            return -1
        if start is None:
            start = time.perf_counter()
        if end is None and not in_flight:
            end = start
        self.events.append(Event(kind, unit, weight, phase, start, end, nbytes))
        return len(self.events) - 1

    def finish(self, index: int, end: float | None = None) -> None:
        """Fill the end of the in-flight event ``index`` (no effect for -1 or after ``clear``)."""
        if 0 <= index < len(self.events) and self.events[index].end is None:
            stamp = time.perf_counter() if end is None else end
            self.events[index] = replace(self.events[index], end=stamp)

    def lines(self, kinds: tuple[str, ...] | None = None) -> list[str]:
        """The events' lines, optionally only those of ``kinds``."""
        return [e.line() for e in self.events if kinds is None or e.kind in kinds]

    def clear(self) -> None:
        """Forget all events."""
        self.events = []
