"""A polite stop: Ctrl-C, SIGTERM or SIGHUP asks, and the loop stops where it can save.

SIGUSR1 asks for a checkpoint, after which the run goes on."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a run to stop: Ctrl-C, a scheduler or service manager, a terminal that closes."""
SAVE = signal.SIGUSR1
"""What asks a run to save and go on."""


class StopRequest:
    """Within ``with StopRequest() as stop``, a signal of ``SIGNALS`` only sets ``stop.requested``,
    and ``SAVE`` only raises ``stop.saves``.

    A terminal sends Ctrl-C to every process of a run, and the launcher forwards it again, so a
    second signal means nothing more than the first one; the launcher is who ends processes that do
    not stop. Nested requests share what they learn: the outer one covers the time before the loop
    starts. Outside the main thread, which alone receives signals, this does nothing. A signal that
    the process was started to ignore (``nohup``, a shell's background job) stays ignored.

    The ranks of a run are told at different moments: they must agree (a reduction of
    ``requested``) before one of them leaves the loop, or the others wait in a collective.

    Attributes:
        number: the signal that asked first, of this rank or of the one that was asked; 0 if none.
        saves: how often this rank was asked to save.
    """

    def __init__(self) -> None:
        self.requested = False
        self.number = 0
        self.saves = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = catch(self._ask)
            for outer in self._outer():
                self._learn(outer)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for outer in self._outer():
            outer._learn(self)
        restore(self._previous)
        self._previous = {}

    def ask(self, number: int) -> None:
        """Note that signal ``number`` asked this rank, or another one, to stop."""
        self.requested = True
        self.number = self.number or number

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == SAVE:
            self.saves += 1
        else:
            self.ask(number)

    def _learn(self, other: StopRequest) -> None:
        self.requested |= other.requested
        self.number = self.number or other.number
        self.saves = max(self.saves, other.saves)

    def _outer(self) -> list[StopRequest]:
        owners = [getattr(handler, "__self__", None) for handler in self._previous.values()]
        return [owner for owner in owners if isinstance(owner, StopRequest)]


def catch(handler: Any) -> dict[signal.Signals, Any]:
    """Have ``handler`` called for ``SIGNALS`` and ``SAVE``, if not ignored; the handlers before."""
    wanted = [s for s in (*SIGNALS, SAVE) if signal.getsignal(s) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in wanted}


def restore(before: dict[signal.Signals, Any]) -> None:
    """Undo :func:`catch`."""
    for number, handler in before.items():
        signal.signal(number, handler)


def status_of(number: int) -> int:
    """What a run ends with that signal ``number`` has stopped; 0: none has.

    After SIGTERM 0, too: a scheduler has asked, and all was saved.
    """
    return 0 if number in (0, signal.SIGTERM) else 128 + number


def name_of(number: int) -> str:
    """In words, for a reader: ``SIGTERM``, and Ctrl-C by the name that readers know."""
    name = signal.Signals(number).name
    return f"{name} (Ctrl-C)" if number == signal.SIGINT else name
