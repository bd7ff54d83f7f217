"""When a collective ends: known to its backend's thread, or to a thread that waits for it.

Loaded while a trace records.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from internsp.base.trace import Work


class WatchedWork(Future[None]):
    """A work handle for which a :class:`CompletionThread` waits; other threads wait here."""

    def wait(self) -> None:
        """Block until the work has ended; raises its error (``RuntimeError`` if a peer has)."""
        self.result()


LINGER = 0.02
"""Seconds for which a :class:`CompletionThread` waits for more: to start one takes 0.2 ms."""


class CompletionThread:
    """Waits for work handles, the oldest first, on a thread that ends soon after the last one.

    Used for works without a future, and only while a trace records when they end, because the
    thread holds the interpreter lock for a moment at each end.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[Work, Callable[[float], None], WatchedWork]] = deque()
        self._more = threading.Condition()
        self._runs = False

    def watch(self, work: Work, on_end: Callable[[float], None]) -> WatchedWork:
        """Call ``on_end`` with ``time.perf_counter()`` when ``work`` has ended without an error.

        Returns:
            A handle to wait for instead of ``work``.
        """
        watched = WatchedWork()
        with self._more:
            self._queue.append((work, on_end, watched))
            self._more.notify()
            runs, self._runs = self._runs, True
        if not runs:
            threading.Thread(target=self._run, name="internsp-completion", daemon=True).start()
        return watched

    def _run(self) -> None:
        while True:
            with self._more:
                if not self._queue and not self._more.wait(LINGER):
                    self._runs = bool(self._queue)
                    if not self._runs:
                        return
                work, on_end, watched = self._queue.popleft()
            error = _error_of(work, on_end)
            # Before the waiter goes on: the thread lingers, and would keep a model and its groups.
            del work, on_end
            watched.set_exception(error)  # None where it ended well
            del watched, error


def _error_of(work: Work, on_end: Callable[[float], None]) -> Exception | None:
    """Wait for ``work``, then call ``on_end``; returns what was raised."""
    try:
        work.wait()
        on_end(time.perf_counter())
    except Exception as error:  # noqa: BLE001 - raised by wait(); the thread goes on
        return error
    return None


def call_when_done(work: Any, on_end: Callable[[float], None]) -> None:
    """Have the backend's thread call ``on_end`` with the host's time when ``work`` ends."""
    with suppress(RuntimeError):  # the work has no future
        work.get_future().add_done_callback(lambda _: on_end(time.perf_counter()))
