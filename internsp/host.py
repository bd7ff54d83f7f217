"""Host memory beside a device: what lies there (``weight_parallel.offload``), and how it is copied.

On a device with streams host memory is pinned, and copies run on two streams of their own, one for
each direction, so that neither computing nor the host waits for them. Each begins behind what the
current stream has queued; what needs it stands behind its event. So no memory is used again before
its copy has ended. Without streams (the host computes) the copies are real ones all the same, into
memory of their own, and over when they return: the same paths, tested by value.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from internsp.accelerator import current_stream, has_streams

WEIGHTS, OPTIMIZER, GRADIENTS = "weights", "optimizer", "gradients"
ACTIVATIONS = "activations"
PIECE = 1 << 26
"""Bytes of one kind that pass the device at a time, where they can be cut anywhere."""


def pinned(nbytes: int) -> int:
    """Bytes that torch takes for ``nbytes`` of pinned memory: the next power of two (its
    ``CachingHostAllocator``, unless ``pinned_max_round_threshold_mb`` of its settings is less)."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


Pairs = Sequence[tuple[Tensor, Tensor]]
"""(to, from) of copies."""


class Copied(Protocol):
    """Copies on their way."""

    def wait(self) -> None:
        """What the current stream does from now on comes behind them. Does not block a device."""

    def synchronize(self) -> None:
        """Block the host until they have ended."""


class _Over:
    """Of the host itself: copies have ended when they return."""

    def wait(self) -> None:
        """Nothing to do."""

    synchronize = wait


class _Event:
    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self._device, self._event = device, stream.record_event()

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()


class HostLink:
    """Copies between one device and host memory, for the offloaded parts of one model chunk.

    Attributes:
        held: bytes of host memory that :meth:`empty` has given and that live still, by what it is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._current = current_stream(device)
        self._inward, self._outward = (
            torch.Stream(device) if has_streams(device) else None for _ in range(2)
        )
        self.held: Counter[str] = Counter()
        self._leaving: deque[tuple[Copied, object, Callable[[], None] | None]] = deque()
        self._staging: Tensor | None = None
        self._fetched: Copied = _Over()  # the last that reads host memory
        self._stored: Copied = _Over()  # the last that writes it

    def empty(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory, pinned where the device has streams; counted as ``what`` while it lives."""
        made = torch.empty(tuple(shape), dtype=dtype, pin_memory=has_streams(self.device))
        size = {what: made.untyped_storage().nbytes()}
        self.held.update(size)
        weakref.finalize(made, self.held.subtract, size)
        return made

    def zeros(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """:meth:`empty`, filled with zeros."""
        return self.empty(what, shape, dtype).zero_()

    def trim(self) -> None:
        """Much host memory was freed: torch keeps what was pinned, and is to give it back."""
        if has_streams(self.device):
            getattr(torch.accelerator, "empty_host_cache", lambda: None)()  # not in 2.11

    def aside(self) -> AbstractContextManager[object]:
        """Work inside is queued on the stream of copies to the device, not where it computes.

        Behind what is queued there now: a gather launched inside may write what was read so far.
        """
        return self._on(self._inward)

    def fetch(self, pairs: Pairs) -> Copied:
        """Copy from host memory to the device."""
        self._fetched = self._run(self._inward, lambda: _copy(pairs))
        return self._fetched

    def store(self, pairs: Pairs, then: Callable[[], None] | None = None) -> None:
        """Copy from the device, to host memory; the device's tensors are given away.

        They are kept until their copies have ended, those of one call while the next one's run.

        Args:
            then: called when they have.
        """
        self._leave(lambda: _copy(pairs), pairs, then)

    def add(
        self, total: Tensor, part: Tensor, then: Callable[[], None] | None = None
    ) -> None:
        """:meth:`store` ``part`` added to ``total``, which lies on the host. The device adds."""

        def run() -> None:
            before = torch.empty_like(part)
            _copy([(before, total)])
            part.add_(before)
            _copy([(total, part)])

        self._leave(run, part, then)

    @property
    def staged_bytes(self) -> int:
        """Bytes of :meth:`staged`."""
        return 0 if self._staging is None else self._staging.nbytes

    def here(self) -> Copied:
        """What is queued within :meth:`aside` so far."""
        return self._run(self._inward, lambda: None)

    def staged(self, values: Tensor) -> Tensor:
        """``values``, flat, on the device until the next call; both within :meth:`aside`."""
        if self._staging is None or self._staging.numel() < values.nbytes:
            self._staging = torch.empty(values.nbytes, dtype=torch.uint8, device=self.device)
        there = self._staging[: values.nbytes].view(values.dtype)
        self.fetch([(there, values)]).wait()
        return there

    def settle(self) -> None:
        """The current stream stands behind every copy to the host; nothing given away is kept."""
        while self._leaving:
            self._left()

    def rest(self) -> None:
        """Block the host until no copy reads or writes host memory."""
        self.settle()
        self._fetched.synchronize()
        self._stored.synchronize()

    def through(self, values: Tensor) -> Iterator[Tensor]:
        """``values``, flat, on the device, a part after the other, the next one on its way."""
        ahead: tuple[Copied, Tensor] | None = None
        for part in (*values.split(max(PIECE // values.element_size(), 1)), None):
            coming = None
            if part is not None:
                there = torch.empty_like(part, device=self.device)
                coming = self.fetch([(there, part)]), there
            if ahead is not None:
                ahead[0].wait()
                yield ahead[1]
            ahead = coming

    def _leave(
        self, run: Callable[[], None], kept: object, then: Callable[[], None] | None
    ) -> None:
        self._stored = self._run(self._outward, run)
        self._leaving.append((self._stored, kept, then))
        if len(self._leaving) > 1:
            self._left()

    def _left(self) -> None:
        copied, _, then = self._leaving.popleft()
        copied.wait()
        if then is not None:
            then()

    def _run(self, stream: torch.Stream | None, work: Callable[[], None]) -> Copied:
        with self._on(stream):
            work()
        return _Over() if stream is None else _Event(self.device, stream)

    def _on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        if stream is None or self._current is None:
            return nullcontext()
        here = self._current()
        if here == stream:  # within aside(): in its own order
            return nullcontext()
        stream.wait_stream(here)
        return stream


class HostSum:
    """A sum in host memory, to which the device adds.

    Attributes:
        values: flat; undefined while ``full`` is not set.
        full: whether something was added since :meth:`clear`.
    """

    def __init__(self, link: HostLink, numel: int, dtype: torch.dtype) -> None:
        self._link = link
        self.values = link.empty(GRADIENTS, (numel,), dtype)
        self.full = False

    def add(self, part: Tensor, then: Callable[[Tensor], None] | None = None) -> None:
        """Add ``part``, of its elements and dtype, on the device.

        Args:
            then: what it is given to when its copy has ended; else it is freed.
        """
        flat = part.view(-1)
        after = None if then is None else partial(then, part)
        if self.full:
            self._link.add(self.values, flat, after)
        else:
            self._link.store([(self.values, flat)], after)
        self.full = True

    def fetch(self, to: Tensor | None = None) -> Tensor:
        """A copy on the device, in ``to`` if given."""
        self._link.settle()  # what is still on its way to it
        there = torch.empty_like(self.values, device=self._link.device) if to is None else to
        self._link.fetch([(there, self.values)]).wait()
        return there

    def clear(self) -> None:
        """Forget it."""
        self.full = False


class HostPool:
    """Host memory that is used again for pieces of the same size.

    It never has more than was in use at some time: what does not fit is freed before anything new
    is made. A piece may be given back while a copy reads it, or writes to it: the next copy to it
    begins behind what the current stream has queued, and that stands behind all that was fetched.

    Args:
        what: see :meth:`HostLink.empty`.
        limit: bytes in use at most; ``None``: what there is.
    """

    def __init__(self, link: HostLink, what: str, limit: int | None = None) -> None:
        self._link, self._what, self.limit = link, what, limit
        self._free: dict[int, list[Tensor]] = {}
        self.used = self.most = 0

    @property
    def nbytes(self) -> int:
        """In use, and free to be used again."""
        return self.used + sum(size * len(pieces) for size, pieces in self._free.items())

    def take(self, nbytes: int) -> Tensor | None:
        """A piece of so many bytes (uint8); ``None`` beyond the limit."""
        if self.limit is not None and self.used + nbytes > self.limit:
            return None
        self.used += nbytes
        self.most = max(self.most, self.used)
        if pieces := self._free.get(nbytes):
            return pieces.pop()
        if self._free:
            self._free.clear()
            self._link.trim()
        return self._link.empty(self._what, (nbytes,), torch.uint8)

    def give(self, piece: Tensor) -> None:
        """Give a piece back."""
        self.used -= piece.nbytes
        self._free.setdefault(piece.nbytes, []).append(piece)


def _copy(pairs: Pairs) -> None:
    for to, source in pairs:
        to.copy_(source, non_blocking=True)
