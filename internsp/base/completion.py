"""When a collective ends: known to its backend's thread, or to a thread that waits for it.

Loaded while a trace records.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from internsp.base.trace import Work


class WatchedWork:
    """A work handle for which a :class:`CompletionThread` waits; other threads wait here."""

    def __init__(self, work: Work, on_end: Callable[[float], None]) -> None:
        self._work = work
        self._on_end = on_end
        self._done = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        """Called on the completion thread: wait for the work, then call ``on_end``."""
        try:
            self._work.wait()
            self._on_end(time.perf_counter())
        except Exception as error:  # noqa: BLE001 - raised by wait(); the thread goes on
            self._error = error
        finally:
            # Before the waiter goes on: the thread lingers, and would keep a model and its groups.
            del self._work, self._on_end
            self._done.set()

    def wait(self) -> None:
        """Block until the work has ended.

        Raises:
            Exception: the error of the work; a ``RuntimeError`` if a peer has ended.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error


LINGER = 0.02
"""Seconds for which a :class:`CompletionThread` waits for more: to start one takes 0.2 ms."""


class CompletionThread:
    """Waits for work handles, the oldest first, on a thread that ends soon after the last one.

    Used for works without a future, and only while a trace records when they end, because the
    thread holds the interpreter lock for a moment at each end.
    """

    def __init__(self) -> None:
        self._queue: deque[WatchedWork] = deque()
        self._more = threading.Condition()
        self._runs = False

    def watch(self, work: Work, on_end: Callable[[float], None]) -> WatchedWork:
        """Call ``on_end`` with ``time.perf_counter()`` when ``work`` has ended without an error.

        Returns:
            A handle to wait for instead of ``work``.
        """
        watched = WatchedWork(work, on_end)
        with self._more:
            self._queue.append(watched)
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
                watched = self._queue.popleft()
            watched.run()


def call_when_done(work: Any, on_end: Callable[[float], None]) -> None:
    """Have the backend's thread call ``on_end`` with the host's time when ``work`` ends."""
    with suppress(RuntimeError):  # the work has no future
        work.get_future().add_done_callback(lambda _: on_end(time.perf_counter()))
