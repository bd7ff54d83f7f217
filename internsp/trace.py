"""Append-only log of what one rank did. Off by default; an object that is passed in, never global.

Kinds for weights: ``AG`` (gather launched), ``WAIT``, ``USE``, ``FREE``, ``RS`` (reduction
launched), ``FINISH``, ``EX`` (exchange between replicas launched); for sequences ``A2A``, and
``RING`` (keys and values that arrive along a ring, and gradients that come home); for the optimizer
``STEP``, ``PUBLISH`` and ``MATRIX`` (matrices to or from the ranks that step them); for the
timeline ``FORWARD`` and ``BACKWARD`` (the latter also where a block's recompute is over).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Times are ``time.perf_counter()`` seconds (with a clock, after :meth:`Trace.resolve`). For a
    collective, ``start`` is its launch and ``end`` its completion (``None`` while in flight); for
    ``WAIT`` they bound the time in which computing waited; for instants they are equal.
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
    """A clock whose times are known later only: that of a device which works behind the host."""

    def restart(self) -> None:
        """Called when a step begins."""

    def mark(self) -> Any:
        """The point that the host is queueing at now."""

    def seconds(self, mark: Any) -> float:
        """When it was reached, on the scale of ``time.perf_counter()``. May block."""


class Trace:
    """Events in the order in which they were recorded. ``record`` costs nothing when disabled.

    Args:
        clock: times are its marks until :meth:`resolve`; by default ``time.perf_counter``, whose
            are numbers at once.

    Attributes:
        now: gives the time for an event: seconds, or the clock's mark.
        exposed: seconds of waits; without a clock a wait adds its own, past :meth:`waited`.
    """

    def __init__(self, enabled: bool = False, clock: Clock | None = None) -> None:
        self.enabled = enabled
        self.clock = clock
        self.now: Callable[[], Any] = time.perf_counter if clock is None else clock.mark
        self.events: list[Event] = []
        self._waits: list[tuple[Any, Any]] = []
        self.exposed = 0.0

    def waited(self, start: Any, end: Any) -> None:
        """Count a wait between two results of :meth:`now`."""
        if self.clock is None:
            self.exposed += end - start
        else:
            self._waits.append((start, end))

    @property
    def exposed_seconds(self) -> float:
        """Time that computing waited for communication; counted also when disabled.

        With a clock, reading it blocks until the last wait is over.
        """
        self.exposed += self.seconds(self._waits)
        self._waits = []
        return self.exposed

    @exposed_seconds.setter
    def exposed_seconds(self, seconds: float) -> None:
        self._waits, self.exposed = [], seconds

    def begin_step(self) -> None:
        """Count exposed seconds anew."""
        self._waits, self.exposed = [], 0.0
        if self.clock is not None:
            self.clock.restart()

    def resolve(self) -> None:
        """Turn marks into seconds. Call it before looking at times; blocks with a clock only."""
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
        """Their sum, each between two results of :meth:`now`. Blocks with a clock only."""
        return sum((self._seconds(end) - self._seconds(start) for start, end in spans), 0.0)

    def _seconds(self, time: Any) -> float:
        # A collective of a CPU backend is stamped by its own thread, in the host's time.
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
        """Fill the end of the in-flight event ``index`` (no effect for -1 or after ``clear``)."""
        events = self.events  # another thread may clear them meanwhile
        if 0 <= index < len(events) and events[index].end is None:
            stamp = self.now() if end is None else end
            events[index] = replace(events[index], end=stamp)

    def lines(self, kinds: tuple[str, ...] | None = None) -> list[str]:
        """The events' lines, optionally only those of ``kinds``."""
        return [e.line() for e in self.events if kinds is None or e.kind in kinds]

    def clear(self) -> None:
        """Forget all events."""
        self.events = []


# When a collective ends: told by the thread that carries it, or by one that waits.


class Work(Protocol):
    """What is needed of ``dist.Work``."""

    def wait(self) -> Any:
        """Block (CPU) or make the current stream stand behind the collective."""


class Watched:
    """A work that a :class:`Watcher` waits for; others wait for the watcher."""

    def __init__(self, work: Work, ended: Callable[[float], None]) -> None:
        self._work = work
        self._ended = ended
        self._over = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        """On the watcher's thread: wait, and tell the time."""
        try:
            self._work.wait()
            self._ended(time.perf_counter())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for; others go on
            self._error = error
        finally:
            self._over.set()

    def wait(self) -> None:
        """Block until it is over.

        Raises:
            Exception: what the work has raised; a ``RuntimeError`` where a peer has gone.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error


class Watcher:
    """Waits for works, the oldest first, on a thread that lives while there are any.

    For works without a future, and only while a trace asks when they end: the thread needs the
    interpreter for a moment at each end.
    """

    def __init__(self) -> None:
        self._queue: deque[Watched] = deque()
        self._lock = threading.Lock()
        self._busy = False

    def watch(self, work: Work, ended: Callable[[float], None]) -> Watched:
        """Call ``ended`` with the time (``time.perf_counter()``) when ``work`` has ended well."""
        watched = Watched(work, ended)
        with self._lock:
            self._queue.append(watched)
            idle, self._busy = not self._busy, True
        if idle:
            threading.Thread(target=self._run, name="internsp-watcher", daemon=True).start()
        return watched

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._busy = False
                    return
                watched = self._queue.popleft()
            watched.run()


def when_over(work: Any, ended: Callable[[float], None]) -> None:
    """Let the thread that carries a ``dist.Work`` tell its end, in the host's time."""
    with suppress(RuntimeError):  # it has no future
        work.get_future().add_done_callback(lambda _: ended(time.perf_counter()))
