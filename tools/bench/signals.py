"""Signal handling: a stopped benchmark cleans up completely, even if more signals arrive."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager, suppress
from types import FrameType
from typing import Any


class Deaf(AbstractContextManager["Deaf"]):
    """Ignore Ctrl-C and SIGTERM inside the context (in the main thread)."""

    def __enter__(self) -> Deaf:
        signals = (signal.SIGINT, signal.SIGTERM)
        self._before: list[tuple[signal.Signals, Any]] = []
        with suppress(ValueError):  # not the main thread: signals are not handled here anyway
            self._before = [(s, signal.signal(s, signal.SIG_IGN)) for s in signals]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)


def terminate_as_interrupt() -> None:
    """Make SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that ``with`` cleans up.

    SIGINT too: a shell starts background commands with it ignored.
    """

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, raise_it)
