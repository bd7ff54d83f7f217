"""When a collective ends, for a trace: told by the thread that carries it, or by one that waits."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch.distributed as dist


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


def when_over(work: dist.Work, ended: Callable[[float], None]) -> None:
    """Let the thread that carries a collective tell its end, in the host's time."""
    with suppress(RuntimeError):  # it has no future
        work.get_future().add_done_callback(lambda _: ended(time.perf_counter()))
