"""Pending gradients: reductions in flight, drained in launch order and never too many (WP-6)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from internsp.wp.collectives import Collectives, Handle
from internsp.wp.pool import MemoryPool, Unit
from internsp.wp.shard import ShardedWeight


@dataclass
class PendingGradient:
    """A reduction in flight: weight, buffers and work handle."""

    unit: Unit
    weight: ShardedWeight
    received: Tensor
    """``[size * padded shard]``, flat: one piece from every rank."""
    packed: Tensor | None
    handle: Handle


class PendingGradients:
    """A queue of reductions.

    Args:
        collectives: of the gradient group.
        pool: where received and packed pieces lie.
        limit: units whose whole gradients may be in flight; the oldest unit is drained first.
    """

    def __init__(self, collectives: Collectives, pool: MemoryPool, limit: int) -> None:
        self._collectives = collectives
        self._pool = pool
        self._limit = limit
        self._queue: deque[PendingGradient] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def launch(self, unit: Unit, weight: ShardedWeight, gradient: Tensor | None) -> None:
        """Start the reduction of ``weight``'s whole gradient; ``None`` stands for zeros (WP-2)."""
        self._make_room(unit)
        layout = weight.layout
        pieces, packed = None, None
        dtype = weight.compute_dtype
        if gradient is not None:
            gradient = gradient if gradient.dtype == dtype else gradient.to(dtype)
            pieces = layout.packed_as_is(gradient)
        if pieces is None:
            pieces = packed = self._pool.take(layout.padded_numel, dtype)
            if gradient is None:
                packed.zero_()
            else:
                layout.pack(gradient, packed)
        received = pieces if layout.size == 1 else self._pool.take(layout.padded_numel, dtype)
        handle = self._collectives.reduce(received, pieces, unit.name, weight.name, "backward")
        self._queue.append(PendingGradient(unit, weight, received, packed, handle))

    def _make_room(self, unit: Unit) -> None:
        """Drain until ``unit`` and at most ``limit - 1`` others have gradients in flight."""
        if self._queue and self._queue[-1].unit is unit:
            return  # its first gradient has made the room
        while True:
            units = {id(p.unit) for p in self._queue} - {id(unit)}
            if len(units) < self._limit:
                return
            self.drain_one()

    def drain_one(self) -> None:
        """Wait for the oldest reduction and add it to its shard's partial sum."""
        pending = self._queue.popleft()
        weight = pending.weight
        self._collectives.wait(pending.handle, pending.unit.name, weight.name, "drain")
        pending.handle.keep = ()
        weight.add_partial(pending.received)
        self._collectives.trace.record("DRAIN", pending.unit.name, weight.name, "drain")
        self._give_back(pending)

    def drain(self) -> None:
        """Drain everything, in launch order."""
        while self._queue:
            self.drain_one()

    def discard(self) -> None:
        """After a failure that all ranks met: let everything arrive, keep nothing (WP-10)."""
        while self._queue:
            pending = self._queue.popleft()
            self._collectives.wait(pending.handle, pending.unit.name, pending.weight.name, "drain")
            pending.handle.keep = ()
            self._give_back(pending)

    def _give_back(self, pending: PendingGradient) -> None:
        if pending.weight.layout.size > 1:
            self._pool.give(pending.received)
        if pending.packed is not None:
            self._pool.give(pending.packed)


Reduce = Callable[[Unit, ShardedWeight, Tensor | None], None]


class Split:
    """One part of a backward that a pipeline schedule computes in two (arXiv 2401.10241).

    The input part computes the gradients of a chunk's inputs and gives no weight a gradient; the
    weight part, later, computes those and needs no whole weight: the gradient of a linear layer's
    weight is a product of its input and its output's gradient.

    Args:
        weights: whether it is the weight part.
        order: units and weights in the order in which reductions are launched (WP-2).
        reduce: launches one reduction; ``None`` for the gradient stands for zeros.
    """

    def __init__(
        self, weights: bool, order: Sequence[tuple[Unit, ShardedWeight]], reduce: Reduce
    ) -> None:
        self.weights = weights
        self._waiting = deque(order if weights else ())
        self._expected = {weight for _, weight in self._waiting}
        self._held: dict[ShardedWeight, Tensor] = {}
        self._reduce = reduce

    def born(self, unit: Unit, weight: ShardedWeight, gradient: Tensor) -> None:
        """Launch in the declared order: a birth waits for those before it."""
        if weight not in self._expected:
            self._reduce(unit, weight, gradient)
            return
        held = self._held
        held[weight] = gradient if weight not in held else held[weight] + gradient
        while self._waiting and self._waiting[0][1] in held:
            self._launch()

    def close(self) -> None:
        """Weights without a gradient take their place with zeros."""
        while self._waiting:
            self._launch()

    def _launch(self) -> None:
        unit, weight = self._waiting.popleft()
        self._expected.discard(weight)
        self._reduce(unit, weight, self._held.pop(weight, None))
