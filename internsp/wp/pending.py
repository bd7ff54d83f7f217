"""Pending gradients: reductions in flight, drained in launch order and never too many (WP-6)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from internsp.mesh import WeightAxis
from internsp.trace import Trace
from internsp.wp.accumulation import WholeGradients
from internsp.wp.collectives import Collectives, Handle
from internsp.wp.pool import MemoryPool, Unit
from internsp.wp.shard import ShardedWeight, unflatten

Born = tuple[ShardedWeight, Tensor | None]
"""A weight and its whole gradient; ``None`` stands for zeros."""


@dataclass
class PendingGradient:
    """A reduction in flight: weights, buffers and work handle."""

    unit: Unit
    weights: list[ShardedWeight]
    """One large weight, or small ones whose shards lie one after another in every piece."""
    received: Tensor
    """``[size * piece]``, flat: one piece from every rank."""
    packed: Tensor | None
    pieces: Tensor
    """What was sent; this rank's own piece is in it."""
    handle: Handle


class PendingGradients:
    """A queue of reductions.

    Small weights of a unit that are born one after another travel together: they are kept until
    a large one, one of another axis, another unit or :meth:`flush` comes (DESIGN 8). The order
    stays (WP-2).

    Args:
        collectives: of the gradient group of each axis.
        pool: where received and packed pieces lie.
        limit: bytes of whole gradients that may be in flight; the oldest is drained first.
        small: whether a weight of so many bytes is small.

    Attributes:
        accumulating: whole gradients are summed in ``whole`` instead of being reduced; the next
            launch of each weight without it takes its sum along.
    """

    def __init__(
        self,
        collectives: Mapping[WeightAxis, Collectives],
        trace: Trace,
        pool: MemoryPool,
        limit: int,
        small: Callable[[int], bool] = lambda nbytes: False,
    ) -> None:
        self._collectives = collectives
        self._trace = trace
        self._pool = pool
        self._limit = limit
        self._small = small
        self._queue: deque[PendingGradient] = deque()
        self._nbytes = 0  # of whole gradients in the queue
        self._together: list[Born] = []
        self._unit: Unit | None = None  # of what is kept to travel together
        self.accumulating = False
        self.whole = WholeGradients(pool)

    def __len__(self) -> int:
        return len(self._queue) + bool(self._together)

    def launch(self, unit: Unit, weight: ShardedWeight, gradient: Tensor | None) -> None:
        """Start the reduction of ``weight``'s whole gradient; ``None`` stands for zeros (WP-2)."""
        if self.accumulating:
            self.whole.add(unit, weight, gradient)
        else:
            self._launch(unit, weight, gradient)

    def launch_accumulated(self) -> None:
        """Start the reductions of every sum that is left, in the declared order."""
        self.flush()  # small ones take their sums only now
        for unit, weight in self.whole:
            self._launch(unit, weight, None)

    def _launch(self, unit: Unit, weight: ShardedWeight, gradient: Tensor | None) -> None:
        small = self._small(weight.slot_nbytes) and weight.layout.size > 1
        if self._together:
            first = self._together[0][0]
            alike = first.axis is weight.axis and first.reduce_dtype == weight.reduce_dtype
            if not small or unit is not self._unit or not alike:
                self.flush()
        if small:
            self._unit = unit
            self._together.append((weight, gradient))
        else:
            self._start(unit, [weight], *self._pieces(weight, gradient))

    def flush(self) -> None:
        """Launch the small ones that were kept."""
        kept, self._together = self._together, []
        if not kept or self._unit is None:
            return
        if len(kept) == 1:
            self._start(self._unit, [kept[0][0]], *self._pieces(*kept[0]))
            return
        packed = self._packed(kept)
        self._start(self._unit, [weight for weight, _ in kept], packed, packed)

    def _packed(self, kept: list[Born]) -> Tensor:
        """Gradients that travel together, flat: in the piece of each rank one after another."""
        layout, dtype = kept[0][0].layout, kept[0][0].reduce_dtype
        shard = sum(weight.layout.shard_numel for weight, _ in kept)
        packed = self._pool.take(layout.size * shard, dtype)
        out = packed.view(layout.size, shard)
        ready = [g for w, g in kept if g is not None and w.layout.in_rows(g) and g.dtype == dtype]
        if len(ready) == len(kept) and not len(self.whole):
            torch._chunk_cat(ready, 0, layout.size, out=out)  # as FSDP2 packs: one call for all
            return packed
        parts = [self._pieces(weight, gradient) for weight, gradient in kept]
        torch.cat([pieces.view(layout.size, -1) for pieces, _ in parts], 1, out=out)
        for _, temporary in parts:
            if temporary is not None:
                self._pool.give(temporary)
        return packed

    def _pieces(
        self, weight: ShardedWeight, gradient: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """A whole gradient as it travels, flat, and the pool's buffer where it needed a copy."""
        if weight in self.whole:
            total = self.whole.take(weight, gradient)
            if total is not None:
                return total, total
        if gradient is not None and gradient.dtype == weight.reduce_dtype:
            pieces = weight.layout.packed_as_is(gradient)
            if pieces is not None:
                return pieces, None
        packed = self._pool.take(weight.layout.padded_numel, weight.reduce_dtype)
        if gradient is None:
            packed.zero_()
        else:
            weight.layout.pack(gradient, packed)
        return packed, packed

    def _start(
        self, unit: Unit, weights: list[ShardedWeight], pieces: Tensor, packed: Tensor | None
    ) -> None:
        self._make_room(pieces.nbytes)
        size = weights[0].layout.size
        received = pieces if size == 1 else self._pool.take(pieces.numel(), pieces.dtype)
        shares = {w.name: w.layout.shard_numel for w in weights}
        collectives = self._collectives[weights[0].axis]
        handle = collectives.reduce(received, pieces, unit.name, shares, "backward")
        self._queue.append(PendingGradient(unit, weights, received, packed, pieces, handle))
        self._nbytes += pieces.nbytes

    def _make_room(self, nbytes: int) -> None:
        """Drain until ``nbytes`` more are within the limit.

        No more than that: a whole unit drained at once would leave the link idle.
        """
        while self._queue and self._nbytes + nbytes > self._limit:
            self.drain_one()

    def _pop(self) -> PendingGradient:
        pending = self._queue.popleft()
        self._nbytes -= pending.received.nbytes
        return pending

    def drain_one(self) -> None:
        """Wait for the oldest reduction and add it to its shards' partial sums."""
        pending = self._pop()
        unit, weights = pending.unit, pending.weights
        collectives = self._collectives[weights[0].axis]
        collectives.wait(pending.handle, unit.name, weights[0].name, "drain")
        pending.handle.keep = ()
        received = pending.received
        if weights[0].layout.size == 1 and pending.packed is None:
            weights[0].lend_partial(received)  # nobody else has a part: the gradient is the sum
            self._trace.record("DRAIN", unit.name, weights[0].name, "drain")
            return
        total = collectives.total(received, pending.pieces)
        parts = unflatten(total, [weight.storage for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.add_partial(part)
            if self._trace.enabled:
                self._trace.record("DRAIN", unit.name, weight.name, "drain")
        self._give_back(pending)

    def drain(self) -> None:
        """Drain everything, in launch order."""
        self.flush()
        while self._queue:
            self.drain_one()

    def discard(self) -> None:
        """After a failure that all ranks met: let everything arrive, keep nothing (WP-10)."""
        self._together.clear()
        self.whole.discard()
        while self._queue:
            pending = self._pop()
            first = pending.weights[0]
            collectives = self._collectives[first.axis]
            collectives.wait(pending.handle, pending.unit.name, first.name, "drain")
            pending.handle.keep = ()
            self._give_back(pending)

    def _give_back(self, pending: PendingGradient) -> None:
        if pending.weights[0].layout.size > 1:
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
