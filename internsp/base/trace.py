"""Append-only event log of one rank. Off by default; an object that is passed in, never global.

Event kinds for weights: ``AG`` (all-gather launched), ``WAIT``, ``USE``, ``FREE``, ``RS``
(reduce-scatter launched), ``FINISH`` (reduction finished), ``EX`` (reduction between replicas
launched); for sequences ``A2A`` (all-to-all) and ``RING`` (keys and values received along a ring,
and their gradients sent back); for the optimizer ``STEP``, ``PUBLISH`` (all-gather of updated
parameters) and ``MATRIX`` (matrices to or from the ranks that update them); for the timeline
``FORWARD`` and ``BACKWARD`` (the latter also where a block's recompute ends).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a trace.

    Times are ``time.perf_counter()`` seconds (with a clock, after :meth:`Trace.resolve`). For a
    collective, ``start`` is its launch and ``end`` its completion (``None`` while in flight); for
    ``WAIT`` they bound the time in which computation waited; for an instant they are equal.
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


class Clock(Protocol):
    """The clock of a device that runs asynchronously: times are known only later."""

    def restart(self) -> None:
        """Called when a step begins whose events are recorded. May block."""

    def mark(self) -> Any:
        """A mark of the current point of the device's stream. Does not block."""

    def seconds(self, mark: Any) -> float:
        """The time of a mark, on the scale of ``time.perf_counter()``. May block."""

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another, whenever the clock was restarted. May block."""


class Trace:
    """Events in the order in which they were recorded. ``record`` costs nothing when disabled.

    Args:
        clock: its marks are the times of events until :meth:`resolve`; by default times are
            ``time.perf_counter()`` seconds at once.

    Attributes:
        now: returns the time for an event: seconds, or a mark of the clock.
        measures: whether waits are measured in this step: always without a clock.
        exposed: seconds of waits. Without a clock, code that waits may add to it directly instead
            of calling :meth:`waited`.
    """

    def __init__(self, enabled: bool = False, clock: Clock | None = None) -> None:
        self.enabled, self.measures = enabled, True
        self.clock = clock
        self.now: Callable[[], Any] = time.perf_counter if clock is None else clock.mark
        self.events: list[Event] = []
        self._waits: list[tuple[Any, Any]] = []
        self.exposed = 0.0

    def waited(self, start: Any, end: Any) -> None:
        """Add a wait, between two results of :meth:`now`, to the exposed seconds."""
        if self.clock is None:
            self.exposed += end - start
        elif self.measures:
            self._waits.append((start, end))

    def take_waits(self) -> Callable[[], float | None]:
        """The exposed seconds so far, which are zero then; a call reads them, later.

        With a clock it blocks until the device has passed the last wait. ``None``: not measured.
        """
        waits, seconds, measured = self._waits, self.exposed, self.measures
        self._waits, self.exposed = [], 0.0
        return lambda: seconds + self.seconds(waits) if measured else None

    @property
    def exposed_seconds(self) -> float:
        """Seconds that computation waited for communication; counted also when disabled.

        With a clock, reading it blocks until the device has passed the last wait.
        """
        self.exposed += self.seconds(self._waits)
        self._waits = []
        return self.exposed

    @exposed_seconds.setter
    def exposed_seconds(self, seconds: float) -> None:
        self._waits, self.exposed = [], seconds

    def begin_step(self, measured: bool = True) -> None:
        """Set the exposed seconds to zero; restart the clock if events will need its times.

        Args:
            measured: of a step whose events are not recorded: let the clock mark its waits. The
                host takes a moment for each mark, and there are two for every collective.
        """
        self._waits, self.exposed = [], 0.0
        if self.clock is not None:
            self.measures = measured or self.enabled
            self.now = self.clock.mark if self.measures else lambda: None
            if self.enabled:
                self.clock.restart()

    def resolve(self) -> None:
        """Convert marks to seconds. Call it before reading times; blocks with a clock only."""
        if self.clock is None:
            return
        self.events = [
            replace(
                e,
                start=self._seconds(e.start),
                end=None if e.end is None else self._seconds(e.end),
            )
            for e in self.events
        ]

    def seconds(self, spans: Iterable[tuple[Any, Any]]) -> float:
        """Sum of the durations of ``spans``: pairs of results of :meth:`now`.

        Blocks with a clock only.
        """
        if self.clock is None:
            return sum((end - start for start, end in spans), 0.0)
        return sum((self.clock.between(start, end) for start, end in spans), 0.0)

    def _seconds(self, time: Any) -> float:
        # The end of a CPU backend's collective comes from its own thread, in host time.
        return time if self.clock is None or isinstance(time, float) else self.clock.seconds(time)

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
            start = self.now()
        if end is None and not in_flight:
            end = start
        self.events.append(Event(kind, unit, weight, phase, start, end, nbytes))
        return len(self.events) - 1

    def finish(self, index: int, end: float | None = None) -> None:
        """Set the end of the in-flight event ``index`` (no effect for -1 or after ``clear``)."""
        events = self.events  # kept, since another thread may call clear() meanwhile
        if 0 <= index < len(events) and events[index].end is None:
            stamp = self.now() if end is None else end
            events[index] = replace(events[index], end=stamp)

    def lines(self, kinds: tuple[str, ...] | None = None) -> list[str]:
        """The events' lines, optionally only those of ``kinds``."""
        return [e.line() for e in self.events if kinds is None or e.kind in kinds]

    def clear(self) -> None:
        """Delete all events."""
        self.events = []


class Work(Protocol):
    """The part of ``dist.Work`` that is used here."""

    def wait(self) -> Any:
        """Block (CPU), or make the current stream wait for the collective."""
