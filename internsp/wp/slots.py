"""Where a weight is unsharded: slots of bytes (WP-1, WP-4).

A slot holds the unsharded weights of one unit; several units share it, one after another.
:mod:`internsp.schedule.queue` decides which group has which bytes, and until when; the memory is
here. With ``reuse=False`` each weight has memory of its own, allocated when its bytes are acquired
and freed when another group acquires them: the moments and the messages are the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from internsp.base.accelerator import Arrival, CurrentStream, StreamTurns, current_stream
from internsp.schedule import terms as schedule
from internsp.schedule.chunk import aligned
from internsp.schedule.terms import Group
from internsp.wp.parameter import ShardedParameter, SlotViews


@dataclass(eq=False)
class Unit(schedule.Unit[ShardedParameter]):
    """One unit at run time.

    Attributes:
        within: prefix of the names of all parameters of its block, replicated ones included;
            empty for a unit outside of the blocks.
        offsets: byte offset of each weight in the slot.
    """

    weights: list[ShardedParameter]
    within: str = ""
    offsets: dict[ShardedParameter, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the unit's unsharded weights in a slot."""
        return max((group.end for group in self.groups), default=0)

    def assign_bytes(self, groups: Sequence[Group[ShardedParameter]]) -> None:
        """Assign each weight its byte range in the slot, from the ranges of its ``groups``."""
        self.groups = groups
        for weight in self.weights:
            weight.unit = self
        for group in groups:
            offset = group.start
            for weight in group.weights:
                self.offsets[weight] = offset
                offset += aligned(weight.slot_nbytes) if weight.needs_gather else 0


@dataclass(frozen=True)
class Units:
    """The units of one chunk.

    Attributes:
        blocks: in the declared order.
        root: those outside of the blocks, without a head of its own; with the rests of blocks that
            hold units.
        head: the head, unless it is one of ``root`` (tied to the embedding).
    """

    blocks: Sequence[Unit]
    root: Sequence[schedule.Unit[ShardedParameter]]
    head: Unit | None

    @property
    def all(self) -> Sequence[schedule.Unit[ShardedParameter]]:
        """Each once."""
        return [*self.blocks, *self.root, *([self.head] if self.head is not None else [])]

    @property
    def by_completion(self) -> Sequence[schedule.Unit[ShardedParameter]]:
        """Each once, in the order in which a backward completes their gradients."""
        head = [self.head] if self.head is not None else []
        return [*head, *reversed(self.blocks), *self.root]


class SlotStreams:
    """Orders the streams that use one slot: each reader stands behind the gather of what it reads,
    each gather behind the readers of what it overwrites (WP-4).

    A kernel runs long after it was queued, so that the host's release of bytes says nothing about
    the device. One stream needs no help: at its launch a collective waits for what the launching
    stream has queued, and a wait orders the waiting stream after the collective. Several streams
    need this class (a user's own, or autograd's, which runs each node on the stream of its
    forward): a launch has one :class:`Arrival` for all its weights. On a device without streams
    every method does nothing.

    Args:
        current: see :func:`internsp.base.accelerator.current_stream`.

    Attributes:
        active: whether the device has streams.
    """

    def __init__(self, current: CurrentStream | None) -> None:
        self._current = current
        self.active = current is not None
        self._turns = StreamTurns()
        self._arrivals: dict[Hashable, Arrival] = {}  # of what lies in the slot

    def before_overwrite(self, *weights: Hashable) -> None:
        """Make the current stream, and so the gather, wait for all readers of the slot (WP-4)."""
        if self._current is None:
            return
        self._turns.take(self._current())
        for weight in weights:
            self._arrivals.pop(weight, None)

    def filled_by(self, arrival: Arrival, weights: Iterable[Hashable]) -> None:
        """Note whose arrival the streams that read ``weights`` must stand behind."""
        self._arrivals.update(dict.fromkeys(weights, arrival))

    def written(self, *weights: Hashable) -> None:
        """Note that the current stream itself has written ``weights``."""
        if self._current is not None:
            self.filled_by(Arrival(self._current()), weights)

    def read(self, *weights: Hashable) -> None:
        """Make the current stream, which reads ``weights`` next, wait for their gathers."""
        if self._current is None:
            return
        here = self._current()
        for weight in weights:
            arrival = self._arrivals.get(weight)
            if arrival is not None:
                arrival.order(here)
        self._turns.join(here)

    def keep_until_here(self, buffer: Tensor) -> None:
        """Keep ``buffer``, which is freed next, until the current stream has come here: the
        allocator would give it at once to the stream that allocated it."""
        if self._current is not None:
            buffer.record_stream(cast(Any, self._current()))


class Slot:
    """One buffer of bytes, in which the weights of a unit lie at their offsets.

    Attributes:
        views: views of each weight's bytes in each dtype; made once, since a buffer keeps its
            storage.
        plain: no stream is ordered and no memory allocated before a gather.
    """

    def __init__(self, index: int, nbytes: int, device: torch.device, reuse: bool) -> None:
        self.index = index
        self.nbytes = nbytes
        self.device = device
        self.streams = SlotStreams(current_stream(device))
        self._whole = torch.empty(nbytes, dtype=torch.uint8, device=device) if reuse else None
        self._buffers: dict[ShardedParameter, Tensor] = {}
        self.views: dict[tuple[ShardedParameter, torch.dtype], SlotViews] = {}
        self.plain = reuse and not self.streams.active

    def acquire(
        self, unit: Unit, weights: Iterable[ShardedParameter], evicted: Sequence[ShardedParameter],
        poison: bool,
    ) -> None:  # fmt: skip
        """Prepare the bytes of ``weights`` for their gather, which overwrites ``evicted``.

        Sets ``in_slot`` of each weight.

        Args:
            poison: see :class:`MemoryPool`.
        """
        for weight in evicted:
            self._free(weight)
        if self.streams.active:
            self.streams.before_overwrite(*weights)
        for weight in weights if self._whole is None else ():
            self._allocate(weight)
        for weight in weights if evicted and poison else ():
            self._bytes(unit, weight).fill_(0xFF)  # NaN in every float type
        for weight in weights:
            weight.in_slot = self._view(unit, weight)

    def free(self, unit: schedule.Unit[ShardedParameter]) -> None:
        """Free the memory of ``unit``'s weights where each has its own (``reuse=False``).

        The next gather fills the same views again.
        """
        for weight in unit.weights:
            self._free(weight)

    def _free(self, weight: ShardedParameter) -> None:
        if weight in self._buffers:
            self.streams.before_overwrite()
            self.streams.keep_until_here(self._buffers[weight])
            self._buffers[weight].untyped_storage().resize_(0)

    def _view(self, unit: Unit, weight: ShardedParameter) -> SlotViews:
        """Views of a weight's bytes.

        They are aliases with version counters of their own, so that filling the slot does not look
        to autograd like a change of saved tensors (design.md 4.1; WP-14 compares versions instead).
        """
        key = (weight, weight.compute_dtype)
        found = self.views.get(key)
        if found is None:
            # Not an inference tensor: training uses views that an evaluation made, too.
            with torch.inference_mode(False):
                found = weight.views_in(self._bytes(unit, weight))
            self.views[key] = found
        return found

    def _bytes(self, unit: Unit, weight: ShardedParameter) -> Tensor:
        """``weight``'s bytes, with a version counter of their own."""
        if self._whole is None:
            return self._buffers[weight].data
        start = unit.offsets[weight]
        return self._whole.data[start : start + aligned(weight.slot_nbytes)]

    def _allocate(self, weight: ShardedParameter) -> None:
        nbytes = aligned(weight.slot_nbytes)
        if weight not in self._buffers:
            with torch.inference_mode(False):
                new = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self._buffers[weight] = new
        elif self._buffers[weight].untyped_storage().nbytes() != nbytes:
            # Saved views alias this storage: grow the same one again.
            self._buffers[weight].untyped_storage().resize_(nbytes)

    def storages(self) -> set[int]:
        """``data_ptr`` of the storages that make up the slot now."""
        return {buffer.untyped_storage().data_ptr() for buffer in self._memory()}

    def live_nbytes(self) -> int:
        """Bytes this slot occupies now."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._memory())

    def _memory(self) -> list[Tensor]:
        return [*self._buffers.values(), *([self._whole] if self._whole is not None else [])]


class MemoryPool:
    """The slots of one model chunk.

    Args:
        sizes: bytes of each slot.
        reuse: units share a slot's memory (``weight_parallel.memory_pool``); if false, each weight
            has memory of its own.
        poison: fill bytes that held other weights with NaN before a gather (for tests of stale
            reads).
    """

    def __init__(
        self, sizes: Sequence[int], device: torch.device, reuse: bool = True, poison: bool = False
    ) -> None:
        self.slots = [Slot(i, n, device, reuse) for i, n in enumerate(sizes)]
        self.device = device
        self.reuse = reuse
        self.poison = poison

    @property
    def slot_nbytes(self) -> int:
        """Bytes of all slots: exact, and known before training starts (WP-1)."""
        return sum(s.nbytes for s in self.slots)

    def live_nbytes(self) -> int:
        """Bytes that all slots occupy now."""
        return sum(s.live_nbytes() for s in self.slots)
