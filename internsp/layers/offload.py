"""Activations in host memory from a block's forward to its backward (``offload``).

What a recomputing block keeps of its forward is its input, and with selective checkpointing the
results of exchanges and attention: one *group* a call. It leaves as soon as it is made, by a stream
of its own, and what the device had of it is freed when nothing else reads it. In backward a group
comes back by another stream while the block behind it is computed; the last blocks' stay, since
their backward follows at once. Host memory is drawn from a pool that is bounded and, on a device
with streams, pinned; without streams the same copies go to a second host allocation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from internsp.config.kept import size_in_bytes
from internsp.host import ACTIVATIONS, Copied, HostLink, HostPool

Offload = int | str | None
"""``activation_checkpoint.offload``."""


def offloaded_blocks(offload: Offload, recomputing: int) -> int:
    """How many of so many recomputing blocks are offloaded, the first ones; at most, for a size."""
    if offload is None:
        return 0
    return min(offload, recomputing) if isinstance(offload, int) else max(recomputing - 1, 0)


class ActivationOffload:
    """Of one chunk.

    Attributes:
        pool: host memory.
        count: recomputing blocks that are offloaded, the first ones.
    """

    def __init__(self, link: HostLink, offload: Offload, recomputing: int) -> None:
        limit = size_in_bytes(offload) if isinstance(offload, str) else None
        self.link, self.pool = link, HostPool(link, ACTIVATIONS, limit)
        self.count = offloaded_blocks(offload, recomputing)
        self._last: Callable[[], Group | None] = lambda: None

    def group(self, block: int) -> Group:
        """For a forward of the recomputing block of this number."""
        group = Group(self, block < self.count, self._last)
        self._last = weakref.ref(group)
        return group


class Group:
    """What one call of one block keeps.

    Attributes:
        leaves: it is offloaded; else it stays where it is, and brings back the group before it.
    """

    def __init__(
        self, owner: ActivationOffload, leaves: bool, before: Callable[[], Group | None]
    ) -> None:
        self.link, self.pool = owner.link, owner.pool
        self.leaves, self._before = leaves, before
        self._members: list[Callable[[], Kept | None]] = []
        self._fetched = False

    def keep(self, tensor: Tensor) -> Kept:
        """Keep ``tensor`` until its backward: away, if the group leaves and the pool has room."""
        kept = Kept(self, tensor)
        self._members.append(weakref.ref(kept))
        return kept

    def close(self) -> None:
        """The block's forward is over: where it stays, nothing else leaves before backward."""
        if not self.leaves:
            self.link.settle()

    def fetch(self) -> None:
        """Have all of it copied back, once. Does not block a device."""
        if not self._fetched:
            self._fetched = True
            self._bring([kept for ref in self._members if (kept := ref()) is not None])

    def needed(self, kept: Kept) -> None:
        """Backward has come to it: bring it back, and the group that is needed next."""
        self.fetch()
        if kept.away:  # a graph that is kept runs backward once more
            self._bring([kept])
        before = self._before()
        if before is not None:
            before.fetch()

    def _bring(self, members: Sequence[Kept]) -> None:
        away = [kept for kept in members if kept.away]
        if not away:
            return
        self.link.settle()  # behind what is still leaving
        with torch.no_grad():
            copied = self.link.fetch([kept.back() for kept in away])
        for kept in away:
            kept.coming.append(copied)

    @contextmanager
    def keeping(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside, of what autograd saves, ``tensors`` are kept here."""
        held = [tensor.untyped_storage() for tensor in tensors]

        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            mine = tensor.is_floating_point() and any(storage is each for each in held)
            return self.keep(tensor) if mine else tensor

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, _taken):
                yield
        finally:
            held.clear()  # what is saved remembers ``pack``


def _taken(kept: Any) -> Tensor:
    return kept.take() if isinstance(kept, Kept) else kept


class Kept:
    """A tensor in host memory, or here. It has its values, shape and strides whenever it is taken.

    Its host memory goes back to the pool when it dies, with the graph that it belongs to.
    """

    def __init__(self, group: Group, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._group, self._here = group, None
        self._shape, self._strides = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        self.coming: list[Copied] = []
        elements = _extent(tensor)
        host = group.pool.take(elements * tensor.itemsize) if group.leaves and elements else None
        if host is None:
            self._here = tensor
            return
        self._host = host
        weakref.finalize(self, _died, group.pool, host, self.coming)
        flat = tensor.as_strided((elements,), (1,), tensor.storage_offset())
        with torch.no_grad():
            group.link.store([(host.view(tensor.dtype), flat)])

    @property
    def away(self) -> bool:
        """Whether it lies in host memory alone."""
        return self._here is None

    def back(self) -> tuple[Tensor, Tensor]:
        """Memory for it here, and what to copy there."""
        flat = torch.empty(self._host.numel() // self._dtype.itemsize, dtype=self._dtype,
                           device=self._device)  # fmt: skip
        self._here = flat.as_strided(self._shape, self._strides)
        return flat, self._host.view(self._dtype)

    def take(self) -> Tensor:
        """The tensor. What was copied back is this caller's alone, and freed with it."""
        self._group.needed(self)
        here = self._here
        assert here is not None, "the group was brought back"
        if self.coming:
            self.coming.pop().wait()
            self._here = None
        return here


def _died(pool: HostPool, host: Tensor, coming: Sequence[Copied]) -> None:
    """A graph has ended. What comes for it nevertheless writes memory here, which is freed next."""
    for copied in coming:
        copied.wait()
    pool.give(host)


def _extent(tensor: Tensor) -> int:
    """Elements from its first to its last in memory."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)
