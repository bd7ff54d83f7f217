"""Graceful stop: Ctrl-C, SIGTERM or SIGHUP make the training loop stop after saving.

SIGUSR1 requests a checkpoint, after which the run continues."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a run: by Ctrl-C, a scheduler or service manager, a terminal that closes."""
SAVE = signal.SIGUSR1
"""Signal that requests a checkpoint; the run continues."""


class StopRequest:
    """Within ``with StopRequest() as stop``, a signal of ``SIGNALS`` only sets ``stop.requested``,
    and ``SAVE`` only increments ``stop.saves``.

    A terminal sends Ctrl-C to every process of a run, and the launcher forwards it again, so a
    second signal has no further effect; the launcher ends processes that do not stop. Outside the
    main thread, the only one that receives signals, this does nothing. A signal that the process
    was started to ignore (``nohup``, a shell's background job) stays ignored.

    Signals reach the ranks of a run at different moments: the ranks must all-reduce ``requested``
    before one of them leaves the loop, or the others wait in a collective.

    Attributes:
        number: the first stop signal that this rank, or another one, got; 0 if none.
        insisted: whether this process got a second stop signal; the launcher then kills its ranks.
        saves: number of save requests that this rank got.
    """

    def __init__(self) -> None:
        self.requested = self.insisted = False
        self.number = 0
        self.saves = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            wanted = [s for s in (*SIGNALS, SAVE) if signal.getsignal(s) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._on_signal) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def request(self, number: int) -> None:
        """Record that signal ``number`` requested a stop, on this rank or on another one."""
        self.requested = True
        self.number = self.number or number

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == SAVE:
            self.saves += 1
        else:
            self.insisted = bool(self.number)
            self.request(number)


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Within it a signal of ``SIGNALS`` ends the process, and runs no handler.

    For the time in which a rank waits for others that may never start: torch runs no handler while
    it waits, and there is nothing to save. A local rank ignores this: its launcher ends it.
    """
    local = multiprocessing.parent_process() is not None
    before: dict[signal.Signals, Any] = {}
    if not local and threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        before = {n: how for n, how in handlers.items() if callable(how)}
    try:
        for number in before:
            signal.signal(number, signal.SIG_DFL)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def status_of(number: int) -> int:
    """Exit status of a run that signal ``number`` stopped (0: no signal).

    0 after SIGTERM, too: a scheduler requested the stop, and everything was saved.
    """
    return 0 if number in (0, signal.SIGTERM) else 128 + number


def name_of(number: int) -> str:
    """Name of a signal for a user: ``SIGTERM``; for SIGINT also the key, Ctrl-C."""
    name = signal.Signals(number).name
    return f"{name} (Ctrl-C)" if number == signal.SIGINT else name
