"""A polite stop: Ctrl-C or SIGTERM asks, and the loop stops where it can save."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Within ``with StopRequest() as stop``, SIGINT and SIGTERM only set ``stop.requested``.

    A terminal sends Ctrl-C to every process of a run, and the launcher forwards it again, so a
    second signal means nothing more than the first one; the launcher is who ends processes that do
    not stop. Nested requests share what they learn: the outer one covers the time before the loop
    starts. Outside the main thread, which alone receives signals, this does nothing.

    The ranks of a run are told at different moments: they must agree (a reduction of
    ``requested``) before one of them leaves the loop, or the others wait in a collective.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._ask) for s in SIGNALS}
            self.requested |= any(outer.requested for outer in self._outer())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for outer in self._outer():
            outer.requested |= self.requested
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def _outer(self) -> list[StopRequest]:
        owners = [getattr(handler, "__self__", None) for handler in self._previous.values()]
        return [owner for owner in owners if isinstance(owner, StopRequest)]
