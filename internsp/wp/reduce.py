"""Where a gradient goes: summed on this rank, reduced over the group, finished into the shard.

When a reduction is launched, and when the oldest is finished, is decided in
:mod:`internsp.wp.reductions`; here it is done. Two forms of accumulation over micro-batches:
sharded (each is reduced, sums have the size of a shard) and full (unsharded gradients are summed
and reduced once, as within ``no_sync`` of torch's DDP: as many times less to send, for the memory
of every unsharded gradient in fp32 or wider).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from internsp.accelerator import Stream, current_stream
from internsp.host import GRADIENTS, HostSum
from internsp.mesh import WeightAxis
from internsp.trace import Trace
from internsp.wp.collectives import Collectives, Handle
from internsp.wp.layout import ShardLayout
from internsp.wp.parameter import ShardedParameter, unflatten
from internsp.wp.schedule import runs_of
from internsp.wp.slots import Unit


@dataclass
class PendingGradient:
    """A reduction in flight: weights, buffers and work handle."""

    unit: Unit
    weights: Sequence[ShardedParameter]
    """One large weight, or small ones of one dtype, whose shards lie in a row in every piece."""
    received: Tensor
    """``[size * piece]``, flat: one piece from every rank."""
    packed: Tensor | None
    pieces: Tensor
    """What was sent; this rank's own piece is in it."""
    handle: Handle


class Buffers:
    """Pooled flat buffers for reductions: each serves again and again (WP-6).

    Args:
        reuse: ``weight_parallel.memory_pool``; without it what is given back is freed.

    Attributes:
        nbytes: of all that exist.
        allocations: ever made.
    """

    def __init__(self, device: torch.device, reuse: bool = True) -> None:
        self._device, self._reuse = device, reuse
        self._free: dict[tuple[int, torch.dtype], list[tuple[Tensor, Stream | None]]]
        self._free = defaultdict(list)
        self._current = current_stream(device)
        self.nbytes = self.allocations = 0

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
        self.allocations += 1
        self.nbytes += numel * dtype.itemsize
        return torch.empty(numel, dtype=dtype, device=self._device)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer of :meth:`take` that no collective uses any more."""
        if self._reuse:
            stream = None if self._current is None else self._current()
            self._free[(buffer.numel(), buffer.dtype)].append((buffer, stream))
        else:
            self.nbytes -= buffer.nbytes


class GradientReducer:
    """The gradients of a chunk's sharded parameters, from ready to reduced (WP-6).

    Args:
        collectives: of the gradient group of each axis.
        buffers: where received and packed pieces lie.

    Attributes:
        ready: unsharded gradients that no reduction has taken yet; several uses' are summed.
        touched: weights with a reduction in this backward, in launch order; whether this rank had
            a gradient.
        whole: sums of unsharded gradients that no reduction has taken yet.
        frozen: weights whose gradients are dropped, since their parameters were frozen behind the
            forward; they take their places in the order, with zeros.
    """

    def __init__(
        self, collectives: Mapping[WeightAxis, Collectives], trace: Trace, buffers: Buffers
    ) -> None:
        self._collectives = collectives
        self._trace = trace
        self.buffers = buffers
        self._queue: deque[list[PendingGradient]] = deque()
        self.ready: dict[ShardedParameter, Tensor] = {}
        self.touched: dict[ShardedParameter, bool] = {}
        self.whole = UnshardedSums(buffers)
        self.frozen: set[ShardedParameter] = set()

    def __len__(self) -> int:
        return len(self._queue)

    def accumulate(self, unit: Unit, weights: Sequence[ShardedParameter]) -> None:
        """Add what is ready of ``weights`` to their sums. No message."""
        for weight in weights:
            gradient = self._taken(weight)
            self.whole.add(unit, weight, gradient)

    def reduce_scatter(self, unit: Unit, weights: Sequence[ShardedParameter]) -> None:
        """Start the reduction of what is ready of ``weights``, zeros where nothing is (WP-2)."""
        runs = runs_of(weights, attrgetter("reduce_dtype")) if len(weights) > 1 else (weights,)
        self._queue.append([self._start(unit, run) for run in runs])

    def _start(self, unit: Unit, weights: Sequence[ShardedParameter]) -> PendingGradient:
        shares = {weight.name: weight.layout.shard_numel for weight in weights}
        if len(weights) == 1:
            pieces, packed = self._pieces(weights[0], self._taken(weights[0]))
        else:
            pieces = packed = self._packed(weights, [self._taken(weight) for weight in weights])
        size = weights[0].layout.size
        received = pieces if size == 1 else self.buffers.take(pieces.numel(), pieces.dtype)
        collectives = self._collectives[weights[0].axis]
        handle = collectives.reduce_scatter(received, pieces, unit.name, shares, "backward")
        return PendingGradient(unit, weights, received, packed, pieces, handle)

    def finish_oldest(self) -> None:
        """Wait for the oldest reduction and add it to its shards' reduced gradients."""
        for pending in self._queue.popleft():
            self._finish(pending)

    def _finish(self, pending: PendingGradient) -> None:
        unit, weights = pending.unit, pending.weights
        collectives = self._collectives[weights[0].axis]
        collectives.wait(pending.handle, unit.name, weights[0].name, "finish")
        pending.handle.keep = ()
        received = pending.received
        if weights[0].layout.size == 1 and pending.packed is None:
            weights[0].borrow_grad(received)  # no other rank has a part: the gradient is the sum
        else:
            total = collectives.sum_received(received, pending.pieces)
            if len(weights) == 1:
                weights[0].add_reduced_grad(total.view(weights[0].layout.shard_shape))
            else:
                parts = unflatten(total, [weight.storage for weight in weights])
                for weight, part in zip(weights, parts, strict=True):
                    weight.add_reduced_grad(part)
            if weights[0].layout.size > 1:
                self.buffers.give(received)
            if pending.packed is not None:
                self.buffers.give(pending.packed)
        if self._trace.enabled:
            for weight in weights:
                self._trace.record("FINISH", unit.name, weight.name, "finish")

    def discard(self) -> None:
        """After a failure that all ranks met: let everything arrive (WP-10).

        What has arrived lies in the shards' reduced gradients, to be dropped with them.
        """
        while self._queue:
            self.finish_oldest()
        self.ready.clear()
        self.touched.clear()
        self.whole.discard()

    def _taken(self, weight: ShardedParameter) -> Tensor | None:
        gradient = self.ready.pop(weight, None)
        self.touched[weight] = gradient is not None or self.touched.get(weight, False)
        return gradient

    def _packed(
        self, weights: Sequence[ShardedParameter], gradients: Sequence[Tensor | None]
    ) -> Tensor:
        """Gradients that travel together, flat: in the piece of each rank one after another."""
        size, dtype = weights[0].layout.size, weights[0].reduce_dtype
        shard = sum([weight.layout.shard_numel for weight in weights])
        packed = self.buffers.take(size * shard, dtype)
        out = packed.view(size, shard)
        pairs = list(zip(weights, gradients, strict=True))
        ready = [g for w, g in pairs if g is not None and w.layout.in_rows(g) and g.dtype == dtype]
        if len(ready) == len(pairs) and not len(self.whole):
            torch._chunk_cat(ready, 0, size, out=out)  # as FSDP2 packs: one call for all
            return packed
        parts = [self._pieces(weight, gradient) for weight, gradient in pairs]
        torch.cat([pieces.view(size, -1) for pieces, _ in parts], 1, out=out)
        for _, temporary in parts:
            if temporary is not None:
                self.buffers.give(temporary)
        return packed

    def _pieces(
        self, weight: ShardedParameter, gradient: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """An unsharded gradient as it travels, flat.

        And the pooled buffer where it needed a copy.
        """
        if weight in self.whole:
            total = self.whole.take(weight, gradient)
            if total is not None:
                return total, total
        if gradient is not None and gradient.dtype == weight.reduce_dtype:
            pieces = packed_as_is(weight.layout, gradient)
            if pieces is not None:
                return pieces, None
        packed = self.buffers.take(weight.layout.padded_numel, weight.reduce_dtype)
        if gradient is None:
            packed.zero_()
        else:
            weight.layout.pack(gradient, packed)
        return packed, packed


def packed_as_is(layout: ShardLayout, gradient: Tensor) -> Tensor | None:
    """``gradient`` flat, as it travels, without a copy, or ``None`` if it needs one."""
    if layout.padded:
        return None
    front = gradient.movedim(layout.dim, 0) if layout.dim else gradient
    return front.view(-1) if front.is_contiguous() else None


class UnshardedSums:
    """Sums of unsharded gradients that no reduction has taken yet, in the order in which they were
    first ready.

    That order is the declared one on every rank (WP-2), since a weight without a gradient takes
    its place too.

    Args:
        buffers: where the sums lie; they serve every step anew.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self._sums: dict[ShardedParameter, tuple[Unit, Tensor | HostSum | None]] = {}
        self._hosted: dict[ShardedParameter, HostSum] = {}

    def __contains__(self, weight: ShardedParameter) -> bool:
        return weight in self._sums

    def __len__(self) -> int:
        return len(self._sums)

    def __iter__(self) -> Iterator[tuple[Unit, ShardedParameter]]:
        return iter([(unit, weight) for weight, (unit, _) in self._sums.items()])

    @property
    def nbytes(self) -> int:
        """Bytes of the sums that exist now."""
        sums = [total for _, total in self._sums.values() if total is not None]
        return sum((t.values if isinstance(t, HostSum) else t).nbytes for t in sums)

    def add(self, unit: Unit, weight: ShardedParameter, gradient: Tensor | None) -> None:
        """Add an unsharded gradient; ``None`` stands for zeros. No message."""
        _, total = self._sums.get(weight, (unit, None))
        if gradient is not None:
            if isinstance(total, Tensor):
                weight.layout.add(gradient, total)
            else:
                wide = torch.promote_types(weight.compute_dtype, torch.float32)
                part = self.buffers.take(weight.layout.padded_numel, wide)
                weight.layout.pack(gradient, part)
                total = self._offloaded(weight, total, part) or part
        self._sums[weight] = (unit, total)

    def _offloaded(
        self, weight: ShardedParameter, total: HostSum | None, part: Tensor
    ) -> HostSum | None:
        """``part`` added to ``weight``'s sum in host memory, where its gradients lie there."""
        if weight.link is None or GRADIENTS not in weight.offload:
            return None
        if total is None:
            if weight not in self._hosted:
                self._hosted[weight] = HostSum(weight.link, part.numel(), part.dtype)
            total = self._hosted[weight]
            total.clear()
        total.add(part, self.buffers.give)
        return total

    def take(self, weight: ShardedParameter, gradient: Tensor | None) -> Tensor | None:
        """The sum with ``gradient`` added, as it travels: flat, padded, as it is sent.

        A pooled buffer, which the caller gives back; ``None``: there was no gradient.
        """
        unit, total = self._sums[weight]
        if isinstance(total, HostSum):
            there = self.buffers.take(total.values.numel(), total.values.dtype)
            self._sums[weight] = unit, total.fetch(there)
        self.add(unit, weight, gradient)
        total = self._sums.pop(weight)[1]
        if isinstance(total, HostSum):  # the first gradient of all, after zeros
            total = total.fetch(self.buffers.take(total.values.numel(), total.values.dtype))
        if total is None or total.dtype == weight.reduce_dtype:
            return total
        packed = self.buffers.take(total.numel(), weight.reduce_dtype)
        packed.copy_(total)  # rounded once, as a gradient of one micro-batch is
        self.buffers.give(total)
        return packed

    def drop(self, weight: ShardedParameter) -> None:
        """Make ``weight``'s sum zeros: its place in the order stays (WP-2)."""
        if weight in self._sums:
            unit, total = self._sums[weight]
            if isinstance(total, Tensor):
                self.buffers.give(total)
            self._sums[weight] = (unit, None)

    def discard(self) -> None:
        """Forget every sum."""
        for _, total in self._sums.values():
            if isinstance(total, Tensor):
                self.buffers.give(total)
        self._sums.clear()
