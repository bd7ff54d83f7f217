"""Offloads activations to host memory from a block's forward to its backward (``offload``).

A checkpointed block saves its input and, with selective checkpointing, the results of exchanges and
attention: one *group* of tensors a call. They are copied to the host as soon as they are saved, on
a stream of their own, and their device memory is freed when nothing else reads it. In backward, a
group is copied back on another stream while the block after it computes; the last blocks' groups
are not offloaded, since their backward follows at once. Host memory is from a pool that is bounded
and, on a device with streams, pinned; without streams the same copies go to a second CPU tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from internsp.base.host import ACTIVATIONS, CopyHandle, HostLink, HostPool
from internsp.base.sizes import size_in_bytes

Offload = int | str | None
"""``activation_checkpoint.offload``."""


def offloaded_blocks(offload: Offload, recomputing: int) -> int:
    """How many of the ``recomputing`` blocks are offloaded (the first ones); a limit for a size."""
    if offload is None:
        return 0
    return min(offload, recomputing) if isinstance(offload, int) else max(recomputing - 1, 0)


class ActivationOffload:
    """The offloaded activations of one chunk.

    Attributes:
        pool: host memory.
        count: number of recomputing blocks that are offloaded, the first ones.
    """

    def __init__(self, link: HostLink, offload: Offload, recomputing: int) -> None:
        limit = size_in_bytes(offload) if isinstance(offload, str) else None
        self.link, self.pool = link, HostPool(link, ACTIVATIONS, limit)
        self.count = offloaded_blocks(offload, recomputing)
        self._last: Callable[[], OffloadGroup | None] = lambda: None

    def group(self, block: int) -> OffloadGroup:
        """A new group for a forward of the recomputing block of index ``block``."""
        group = OffloadGroup(self, block < self.count, self._last)
        self._last = weakref.ref(group)
        return group


class OffloadGroup:
    """The tensors that one call of one block saves.

    Attributes:
        offloads: whether its tensors are offloaded; else they stay on the device, and backward
            only starts to copy back the group before it.
    """

    def __init__(
        self, owner: ActivationOffload, offloads: bool, before: Callable[[], OffloadGroup | None]
    ) -> None:
        self.link, self.pool = owner.link, owner.pool
        self.offloads, self._before = offloads, before
        self._members: list[Callable[[], SavedTensor | None]] = []
        self._fetched = False

    def save(self, tensor: Tensor) -> SavedTensor:
        """Save ``tensor`` for backward: on the host, if offloaded and the pool has room."""
        kept = SavedTensor(self, tensor)
        self._members.append(weakref.ref(kept))
        return kept

    def end_forward(self) -> None:
        """The end of the block's forward. If the block is not offloaded, no further copies to the
        host start before backward, so finish those in flight."""
        if not self.offloads:
            self.link.finish_copies_to_host()

    def fetch(self) -> None:
        """Start copying all tensors back, once. Does not block a device."""
        if not self._fetched:
            self._fetched = True
            self._copy_back([kept for ref in self._members if (kept := ref()) is not None])

    def copy_back_for(self, kept: SavedTensor) -> None:
        """Backward needs ``kept``: copy its group back, and the group that backward needs next."""
        self.fetch()
        if kept.on_host:  # a retained graph runs backward again
            self._copy_back([kept])
        before = self._before()
        if before is not None:
            before.fetch()

    def _copy_back(self, members: Sequence[SavedTensor]) -> None:
        offloaded = [kept for kept in members if kept.on_host]
        if not offloaded:
            return
        self.link.finish_copies_to_host()  # copies back start after copies to the host
        with torch.no_grad():
            copied = self.link.copy_to_device([kept.allocate() for kept in offloaded])
        for kept in offloaded:
            kept.copies.append(copied)

    @contextmanager
    def saving(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside, ``tensors`` that autograd saves are saved in this group."""
        held = [tensor.untyped_storage() for tensor in tensors]

        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            mine = tensor.is_floating_point() and any(storage is each for each in held)
            return self.save(tensor) if mine else tensor

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                yield
        finally:
            held.clear()  # autograd's saved tensors hold a reference to ``pack``


def _unpack(kept: Any) -> Tensor:
    return kept.unpack() if isinstance(kept, SavedTensor) else kept


class SavedTensor:
    """A tensor saved in host memory or on the device; unpacked, it has the same values and strides.

    Its host memory is released to the pool when it is freed, with its autograd graph.
    """

    def __init__(self, group: OffloadGroup, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._group, self._here = group, None
        self._shape, self._strides = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        self.copies: list[CopyHandle] = []
        elements = _storage_elements(tensor)
        host = (
            group.pool.acquire(elements * tensor.itemsize) if group.offloads and elements else None
        )
        if host is None:
            self._here = tensor
            return
        self._host = host
        weakref.finalize(self, _free_host, group.pool, host, self.copies)
        flat = tensor.as_strided((elements,), (1,), tensor.storage_offset())
        with torch.no_grad():
            group.link.copy_to_host([(host.view(tensor.dtype), flat)])

    @property
    def on_host(self) -> bool:
        """Whether it is in host memory only."""
        return self._here is None

    def allocate(self) -> tuple[Tensor, Tensor]:
        """Allocate device memory for it; return (destination, source) of the copy."""
        flat = torch.empty(self._host.numel() // self._dtype.itemsize, dtype=self._dtype,
                           device=self._device)  # fmt: skip
        self._here = flat.as_strided(self._shape, self._strides)
        return flat, self._host.view(self._dtype)

    def unpack(self) -> Tensor:
        """The tensor. A copy from the host belongs to the caller, and is freed with it."""
        self._group.copy_back_for(self)
        here = self._here
        assert here is not None, "the group was brought back"
        if self.copies:
            self.copies.pop().wait()
            self._here = None
        return here


def _free_host(pool: HostPool, host: Tensor, copies: Sequence[CopyHandle]) -> None:
    """Release host memory of a freed graph, after copies back to the device that are in flight."""
    for copied in copies:
        copied.wait()
    pool.release(host)


def _storage_elements(tensor: Tensor) -> int:
    """Number of elements from the tensor's first to its last in memory, gaps included."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)
