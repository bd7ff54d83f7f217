"""Offloaded tensors in host memory (``weight_parallel.offload``), and copies to and from a device.

With a device that has streams, host memory is pinned, and copies run on two streams of their own,
one for each direction, so that neither computation nor the host waits for them. A copy waits for
the work that the current stream has queued, and work that needs a copy waits for its event; so no
memory is used again before its copy has ended. Without streams (the host computes), copies into
separate memory are made all the same, and have ended when the call returns: the same code paths,
tested by value.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from internsp.base.accelerator import current_stream, has_streams

WEIGHTS, OPTIMIZER, GRADIENTS = "weights", "optimizer", "gradients"
ACTIVATIONS = "activations"
PIECE_BYTES = 1 << 26
"""Bytes of one kind of offloaded tensor on the device at a time, where it may be split anywhere."""


def pinned_bytes(nbytes: int) -> int:
    """Bytes that torch allocates for ``nbytes`` of pinned memory: the next power of two.

    So does its ``CachingHostAllocator``, unless its setting ``pinned_max_round_threshold_mb`` is
    smaller.
    """
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


Pairs = Sequence[tuple[Tensor, Tensor]]
"""Copies, each as (destination, source)."""


class CopyHandle:
    """Handle of copies that ``stream`` has queued; without one the host itself has made them."""

    def __init__(self, device: torch.device, stream: torch.Stream | None = None) -> None:
        self._device, self._event = device, None if stream is None else stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait for the copies. Does not block the host of a device."""
        if self._event is not None:
            torch.accelerator.current_stream(self._device.index).wait_event(self._event)

    def synchronize(self) -> None:
        """Block the host until the copies have ended."""
        if self._event is not None:
            self._event.synchronize()


class HostLink:
    """Copies between one device and host memory, for the offloaded tensors of one model chunk.

    Attributes:
        allocated: bytes of host memory from :meth:`empty` that are still alive, by kind.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._current = current_stream(device)
        self._to_device, self._to_host = (
            torch.Stream(device) if has_streams(device) else None for _ in range(2)
        )
        self.allocated: Counter[str] = Counter()
        self._copies_to_host: deque[tuple[CopyHandle, object, Callable[[], None] | None]] = deque()
        self._staging: Tensor | None = None
        self._last_to_device = CopyHandle(device)  # the last that reads host memory
        self._last_to_host = CopyHandle(device)  # the last that writes it

    def empty(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A host tensor, pinned if the device has streams; counted as ``what`` while it lives."""
        made = torch.empty(tuple(shape), dtype=dtype, pin_memory=has_streams(self.device))
        size = {what: made.untyped_storage().nbytes()}
        self.allocated.update(size)
        weakref.finalize(made, self.allocated.subtract, size)
        return made

    def zeros(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """:meth:`empty`, filled with zeros."""
        return self.empty(what, shape, dtype).zero_()

    def empty_host_cache(self) -> None:
        """Return cached pinned memory to the system, after much of it was freed."""
        if has_streams(self.device):
            getattr(torch.accelerator, "empty_host_cache", lambda: None)()  # not in 2.11

    def on_copy_stream(self) -> AbstractContextManager[object]:
        """Context: work inside is queued on the stream of copies to the device.

        It runs after what the current stream has queued so far: an all-gather launched inside may
        write memory that queued work reads.
        """
        return self._on(self._to_device)

    def copy_to_device(self, pairs: Pairs) -> CopyHandle:
        """Copy from host memory to the device. Does not block the host of a device."""
        self._last_to_device = self._run(self._to_device, lambda: _copy(pairs))
        return self._last_to_device

    def copy_to_host(self, pairs: Pairs, then: Callable[[], None] | None = None) -> None:
        """Copy from the device to host memory. The caller must not use the device tensors again.

        They are kept until the next call, which makes the current stream wait for this call's
        copies.

        Args:
            then: called when the tensors are released.
        """
        self._start_copy_to_host(lambda: _copy(pairs), pairs, then)

    def add_to_host(
        self, total: Tensor, part: Tensor, then: Callable[[], None] | None = None
    ) -> None:
        """Add ``part``, on the device, to ``total`` in host memory; see :meth:`copy_to_host`.

        The device computes the sum.
        """

        def run() -> None:
            before = torch.empty_like(part)
            _copy([(before, total)])
            part.add_(before)
            _copy([(total, part)])

        self._start_copy_to_host(run, part, then)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffer of :meth:`copy_to_staging`."""
        return 0 if self._staging is None else self._staging.nbytes

    def record_event(self) -> CopyHandle:
        """Handle of the work queued so far; call it within :meth:`on_copy_stream`."""
        return self._run(self._to_device, lambda: None)

    def copy_to_staging(self, values: Tensor) -> Tensor:
        """Copy ``values``, flat, to a buffer on the device that the next call overwrites.

        Call it within :meth:`on_copy_stream`.
        """
        if self._staging is None or self._staging.numel() < values.nbytes:
            self._staging = torch.empty(values.nbytes, dtype=torch.uint8, device=self.device)
        there = self._staging[: values.nbytes].view(values.dtype)
        self.copy_to_device([(there, values)]).wait()
        return there

    def finish_copies_to_host(self) -> None:
        """Make the current stream wait for every copy to the host; release the device tensors."""
        while self._copies_to_host:
            self._finish_oldest_copy()

    def synchronize(self) -> None:
        """Block the host until no copy reads or writes host memory."""
        self.finish_copies_to_host()
        self._last_to_device.synchronize()
        self._last_to_host.synchronize()

    def iterate_on_device(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        """Iterate over ``parts`` on the device; each is copied one part ahead."""
        ahead: tuple[CopyHandle, Tensor] | None = None
        for part in (*parts, None):
            coming = None
            if part is not None:
                there = torch.empty_like(part, device=self.device)
                coming = self.copy_to_device([(there, part)]), there
            if ahead is not None:
                ahead[0].wait()
                yield ahead[1]
            ahead = coming

    def _start_copy_to_host(
        self, run: Callable[[], None], kept: object, then: Callable[[], None] | None
    ) -> None:
        self._last_to_host = self._run(self._to_host, run)
        self._copies_to_host.append((self._last_to_host, kept, then))
        if len(self._copies_to_host) > 1:
            self._finish_oldest_copy()

    def _finish_oldest_copy(self) -> None:
        copied, _, then = self._copies_to_host.popleft()
        copied.wait()
        if then is not None:
            then()

    def _run(self, stream: torch.Stream | None, work: Callable[[], None]) -> CopyHandle:
        with self._on(stream):
            work()
        return CopyHandle(self.device, stream)

    def _on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        if stream is None or self._current is None:
            return nullcontext()
        here = self._current()
        if here == stream:  # within on_copy_stream(): already in order
            return nullcontext()
        stream.wait_stream(here)
        return stream


class HostSum:
    """A sum in host memory that the device accumulates.

    Attributes:
        values: the flat sum; undefined unless ``has_value``.
        has_value: whether anything was added since :meth:`clear`.
    """

    def __init__(self, link: HostLink, numel: int, dtype: torch.dtype) -> None:
        self._link = link
        self.values = link.empty(GRADIENTS, (numel,), dtype)
        self.has_value = False

    def add(self, part: Tensor, then: Callable[[Tensor], None] | None = None) -> None:
        """Add ``part``, a device tensor with the sum's number of elements and dtype.

        Args:
            then: called with ``part`` when its copy has ended; by default ``part`` is freed.
        """
        flat = part.view(-1)
        after = None if then is None else partial(then, part)
        if self.has_value:
            self._link.add_to_host(self.values, flat, after)
        else:
            self._link.copy_to_host([(self.values, flat)], after)
        self.has_value = True

    def to_device(self, to: Tensor | None = None) -> Tensor:
        """A copy of the sum on the device, in ``to`` if given."""
        self._link.finish_copies_to_host()  # of additions to this sum
        there = torch.empty_like(self.values, device=self._link.device) if to is None else to
        self._link.copy_to_device([(there, self.values)]).wait()
        return there

    def clear(self) -> None:
        """Start a new sum: the next :meth:`add` overwrites the values."""
        self.has_value = False


class HostPool:
    """A pool of host buffers, each reused for requests of the same size.

    It never holds more bytes than were in use at some time: free buffers of other sizes are freed
    before a new one is allocated. A buffer may be released while a copy reads or writes it: the
    next copy to it waits for the current stream, which waits for all copies to the device.

    Args:
        what: see :meth:`HostLink.empty`.
        limit: maximal bytes in use; ``None``: no limit.
    """

    def __init__(self, link: HostLink, what: str, limit: int | None = None) -> None:
        self._link, self._what, self.limit = link, what, limit
        self._free: dict[int, list[Tensor]] = {}
        self.used = self.peak = 0

    @property
    def nbytes(self) -> int:
        """Bytes in use, and of free buffers."""
        return self.used + sum(size * len(pieces) for size, pieces in self._free.items())

    def acquire(self, nbytes: int) -> Tensor | None:
        """A buffer of ``nbytes`` (uint8); ``None`` beyond the limit."""
        if self.limit is not None and self.used + nbytes > self.limit:
            return None
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        if pieces := self._free.get(nbytes):
            return pieces.pop()
        if self._free:
            self._free.clear()
            self._link.empty_host_cache()
        return self._link.empty(self._what, (nbytes,), torch.uint8)

    def release(self, piece: Tensor) -> None:
        """Return a buffer to the pool."""
        self.used -= piece.nbytes
        self._free.setdefault(piece.nbytes, []).append(piece)


def _copy(pairs: Pairs) -> None:
    for to, source in pairs:
        to.copy_(source, non_blocking=True)
