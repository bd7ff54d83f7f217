"""Where a weight grows whole: slots with leases, and buffers for reductions (WP-1, WP-4, WP-6).

A slot holds the whole weights of one unit at a time. Its contents stay until another unit takes
the slot, and carry a tag for each weight, so that what is still right is not gathered again
(WP-11). With ``reuse=False`` each unit has memory of its own that is allocated when its slot is
leased and freed when another unit takes the slot: the same moments, the same messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from internsp.errors import PoolError
from internsp.wp.shard import ShardedWeight, Tag
from internsp.wp.streams import SlotStreams, Stream, current_stream

ALIGNMENT = 256  # bytes: what allocators and vector loads like


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment of weights in a slot."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
class Unit:
    """Weights that are gathered together: a transformer block, the embedding, the head.

    Attributes:
        weights: in the order of use (of registration in the model).
        slot: index of the slot among the pool's, fixed by the schedule (DESIGN 4.1).
    """

    name: str
    weights: list[ShardedWeight]
    slot: int = -1
    block: int = -1
    """Index among the chunk's blocks; -1 for units that are not blocks."""
    anchored: bool = False
    """Whether a module inside it triggers the gather of the next block; else its entry does."""
    recomputed: bool = False
    """Whether activation checkpointing recomputes it, so that backward gathers in forward order."""
    at_entry: bool = False
    """Whether the block takes all its weights at its entry (compiled, or all of them small)."""
    offsets: dict[ShardedWeight, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the unit's whole weights in a slot."""
        return sum(aligned(w.slot_nbytes) for w in self.weights if not w.resident)

    def place(self) -> None:
        """Give each weight its offset in the slot."""
        offset = 0
        for weight in self.weights:
            self.offsets[weight] = offset
            offset += 0 if weight.resident else aligned(weight.slot_nbytes)

    def extent(self, weight: ShardedWeight) -> tuple[int, int]:
        """First and last byte (excluded) of a weight's place in the slot."""
        start = self.offsets[weight]
        return start, start + aligned(weight.slot_nbytes)


class Slot:
    """One buffer of bytes and what is in it."""

    def __init__(self, index: int, nbytes: int, device: torch.device, reuse: bool) -> None:
        self.index = index
        self.nbytes = nbytes
        self.device = device
        self.reuse = reuse
        self.owner: Unit | None = None  # whose weights are in it
        self.holder: Unit | None = None  # who has the lease
        self.purpose = ""
        self.tags: dict[ShardedWeight, Tag] = {}
        self.streams = SlotStreams(current_stream(device))
        self._buffers: dict[Unit | ShardedWeight | None, Tensor] = {}
        self._places: dict[tuple[ShardedWeight, torch.dtype], tuple[Tensor, Tensor]] = {}
        if reuse:
            self._buffers[None] = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def lease(self, unit: Unit, purpose: str) -> None:
        """Take the right to use the slot.

        Raises:
            PoolError: when another unit holds it, naming both (WP-4).
        """
        if self.holder is not None and self.holder is not unit:
            raise PoolError(
                f"slot {self.index} asked for by {unit.name} ({purpose}) while it is held by "
                f"{self.holder.name} ({self.purpose}); blocks must run in the declared order, or "
                "set weight_parallel.unexpected_order = 'gather'"
            )
        self.holder, self.purpose = unit, purpose
        if self.owner is not unit:
            self._evict(unit)

    def release(self, unit: Unit) -> None:
        """Give the lease back (no effect without one); the contents stay until overwritten."""
        if self.holder is unit:
            self.holder, self.purpose = None, ""

    def flat(self, unit: Unit, weight: ShardedWeight) -> Tensor:
        """``weight``'s padded place in the slot, flat, in its compute dtype.

        An alias with a version counter of its own: filling the slot must not look to autograd
        like a change of saved tensors (DESIGN 4.1; WP-14 checks the tag in its stead).
        """
        return self._place(unit, weight)[0]

    def whole(self, unit: Unit, weight: ShardedWeight) -> Tensor:
        """``weight`` whole, a view of its place with one more version counter of its own."""
        return self._place(unit, weight)[1].data

    def _place(self, unit: Unit, weight: ShardedWeight) -> tuple[Tensor, Tensor]:
        """Flat and whole views, made once: a buffer keeps its storage for ever."""
        key = (weight, weight.compute_dtype)
        if key not in self._places:
            nbytes = weight.layout.padded_numel * weight.compute_dtype.itemsize
            with torch.inference_mode(False):  # what an evaluation makes, training uses
                flat = self._room(unit, weight)[:nbytes].view(weight.compute_dtype)
                self._places[key] = flat, weight.layout.whole_view(flat)
        return self._places[key]

    def _room(self, unit: Unit, weight: ShardedWeight) -> Tensor:
        """``weight``'s bytes, under a version counter of their own."""
        if weight in self._buffers:
            return self._buffers[weight].data
        start = unit.offsets[weight]
        buffer = self._buffers[None if self.reuse else unit].data
        return buffer[start : start + aligned(weight.slot_nbytes)]

    def occupy(
        self, unit: Unit, weight: ShardedWeight, gone: Iterable[ShardedWeight], poison: bool
    ) -> None:
        """``weight`` takes its place from those who are ``gone``: leases by weight.

        Whether it may, :class:`internsp.wp.line.Places` has decided. Without ``reuse`` each weight
        has memory of its own, for as long as it has its place.
        """
        changed = False
        for other in gone:
            changed = True
            self.tags.pop(other, None)
            if not self.reuse:
                self.streams.before_overwrite()
                self._buffers[other].untyped_storage().resize_(0)
        if not self.reuse:
            nbytes = aligned(weight.slot_nbytes)
            if weight not in self._buffers:
                with torch.inference_mode(False):
                    new = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                self._buffers[weight] = new
            elif self._buffers[weight].untyped_storage().nbytes() != nbytes:
                self._buffers[weight].untyped_storage().resize_(nbytes)
        if changed and poison:
            self._room(unit, weight).fill_(0xFF)  # NaN in every float type

    def storages(self) -> set[int]:
        """``data_ptr`` of the storages that the slot is made of now."""
        return {buffer.untyped_storage().data_ptr() for buffer in self._buffers.values()}

    def forget(self) -> None:
        """Nothing in the slot may be reused (WP-10)."""
        self.tags.clear()
        self.holder, self.purpose = None, ""

    def _evict(self, unit: Unit) -> None:
        if not self.reuse:
            if self.owner is not None:
                self.streams.before_overwrite()
                self._buffers[self.owner].untyped_storage().resize_(0)
            if unit not in self._buffers:
                with torch.inference_mode(False):
                    new = torch.empty(unit.nbytes, dtype=torch.uint8, device=self.device)
                self._buffers[unit] = new
            else:  # saved views alias this storage: grow the same one again
                self._buffers[unit].untyped_storage().resize_(unit.nbytes)
        self.owner = unit
        self.tags.clear()

    def live_nbytes(self) -> int:
        """Bytes this slot occupies now."""
        return sum(b.untyped_storage().nbytes() for b in self._buffers.values())


class MemoryPool:
    """The slots of one model chunk, and pooled buffers for its reductions.

    Args:
        sizes: bytes of each slot.
        reuse: ``weight_parallel.memory_pool``.
        poison: fill a slot with NaN bytes when it changes owner (for tests of stale reads).
    """

    def __init__(
        self, sizes: Sequence[int], device: torch.device, reuse: bool = True, poison: bool = False
    ) -> None:
        self.slots = [Slot(i, n, device, reuse) for i, n in enumerate(sizes)]
        self.device = device
        self.reuse = reuse
        self.poison = poison
        self._free: dict[tuple[int, torch.dtype], list[tuple[Tensor, Stream | None]]]
        self._free = defaultdict(list)
        self._current = current_stream(device)
        self.buffer_nbytes = 0
        self.buffer_allocations = 0

    @property
    def slot_nbytes(self) -> int:
        """Bytes of all slots: exact, and known before training starts (WP-1)."""
        return sum(s.nbytes for s in self.slots)

    def live_nbytes(self) -> int:
        """Bytes of whole weights that exist now."""
        return sum(s.live_nbytes() for s in self.slots)

    def lease(self, unit: Unit, purpose: str) -> Slot:
        """Lease ``unit``'s slot; see :meth:`Slot.lease`."""
        slot = self.slots[unit.slot]
        changed = slot.owner is not unit
        slot.lease(unit, purpose)
        if changed and self.poison:
            slot._buffers[None if self.reuse else unit].data.fill_(0xFF)  # NaN in every float type
        return slot

    def release_all(self, but: Unit | None = None) -> None:
        """End every lease, except that of ``but``; contents stay."""
        for slot in self.slots:
            if slot.holder is not but:
                slot.holder, slot.purpose = None, ""

    def forget(self) -> None:
        """After a failure: no lease, and nothing to be reused (WP-10)."""
        for slot in self.slots:
            slot.forget()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat buffer with undefined contents; give it back with :meth:`give`."""
        free = self._free[(numel, dtype)]
        if free:
            buffer, stream = free.pop()
            if stream is not None and self._current is not None:
                here = self._current()
                if here != stream:  # what was queued there may still read it
                    here.wait_stream(stream)
            return buffer
        self.buffer_allocations += 1
        self.buffer_nbytes += numel * dtype.itemsize
        return torch.empty(numel, dtype=dtype, device=self.device)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer of :meth:`take` that no collective uses any more."""
        if self.reuse:
            stream = None if self._current is None else self._current()
            self._free[(buffer.numel(), buffer.dtype)].append((buffer, stream))
        else:
            self.buffer_nbytes -= buffer.numel() * buffer.element_size()
