"""A link to host memory whose copies run late, as they may on a device with streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from internsp.base.host import HostLink, Pairs
from internsp.parallel import build


class Late:
    """Copies that run when they are waited for, after earlier ones of the same direction."""

    def __init__(self, queue: deque[Late], work: Callable[[], None]) -> None:
        self._queue, self._work, self.over = queue, work, False
        queue.append(self)

    def wait(self) -> None:
        while not self.over:
            first = self._queue.popleft()
            first._work()
            first.over = True

    synchronize = wait


class LateLink(HostLink):
    """A link whose copies run as late as allowed; their targets are NaN until then.

    The two directions are independent of each other, as two streams are.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._to_device: Any = deque()
        self._to_host: Any = deque()

    def copy_to_device(self, pairs: Pairs) -> Any:
        spoil(pairs)
        return super().copy_to_device(pairs)

    def copy_to_host(self, pairs: Pairs, then: Callable[[], None] | None = None) -> None:
        spoil(pairs)
        super().copy_to_host(pairs, then)

    def _run(self, stream: Any, work: Callable[[], None]) -> Any:
        return Late(stream, work)

    def _on(self, stream: Any) -> AbstractContextManager[object]:
        return nullcontext()


class HastyLink(LateLink):
    """Deliberately wrong: it frees memory before its copy has ended."""

    def _finish_oldest_copy(self) -> None:
        _, _, then = self._copies_to_host.popleft()
        if then is not None:
            then()


def spoil(pairs: Pairs) -> None:
    for to, _ in pairs:
        to.fill_(torch.nan)


def install(kind: type[HostLink], monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Models parallelized from now on in this process use links of this kind."""
    if monkeypatch is None:
        build.HostLink = kind  # type: ignore[misc]
    else:
        monkeypatch.setattr(build, "HostLink", kind)
