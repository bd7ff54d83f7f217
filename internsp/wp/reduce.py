"""Where a gradient goes: summed on this rank, reduce-scattered, added to the shard's gradient.

:mod:`internsp.schedule.reductions` decides when a reduction is launched and when the oldest is
finished; this file does it. Gradients of several micro-batches accumulate in one of two forms:
sharded (each is reduced, and the sums have the size of a shard) or full (unsharded gradients are
summed and reduced once, as within ``no_sync`` of torch's DDP, which sends less and needs memory for
every unsharded gradient in fp32 or wider).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from internsp.base.accelerator import Stream, StreamTurns, current_stream
from internsp.base.host import HostSum
from internsp.base.trace import Trace
from internsp.mesh import WeightAxis
from internsp.schedule.layout import ShardLayout
from internsp.schedule.terms import runs_of
from internsp.wp.collectives import Collectives, Handle
from internsp.wp.parameter import ShardedParameter, unflatten
from internsp.wp.slots import Unit

if TYPE_CHECKING:  # loaded where weights are reduced so
    from internsp.wp.backend_sums import BackendSums
    from internsp.wp.two_level import Sum, TwoLevels


@dataclass(slots=True)
class PendingGradient:
    """A reduce-scatter in flight: its weights, its buffers and its work handle."""

    unit: Unit
    weights: Sequence[ShardedParameter]
    """One large weight, or small ones of one dtype; their shards lie one after another in the
    part of each rank."""
    output: Tensor
    """``[received * part]``, flat: this rank's part of the input of every rank, or their sum."""
    packed: Tensor | None
    """The pooled buffer that ``input`` is, if gradients were copied; released when finished."""
    input: Tensor
    """``[size * part]``, flat: the unsharded gradients, the parts for the ranks in their order."""
    handle: Handle


class Buffers:
    """Pool of flat buffers for reductions (WP-6).

    Args:
        reuse: keep released buffers for later (``weight_parallel.memory_pool``); else free them.

    Attributes:
        device: where they are.
        nbytes: bytes of all buffers that exist.
        allocations: number of buffers that were ever made.
    """

    def __init__(self, device: torch.device, reuse: bool = True) -> None:
        self.device, self._reuse = device, reuse
        self._free: dict[tuple[int, torch.dtype], list[tuple[Tensor, Stream | None]]]
        self._free = defaultdict(list)
        self._current = current_stream(device)
        self.nbytes = self.allocations = 0

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat buffer with undefined contents; return it with :meth:`release`."""
        free = self._free[(numel, dtype)]
        if free:
            buffer, stream = free.pop()
            if stream is not None and self._current is not None:
                here = self._current()
                if here != stream:  # kernels queued there may still read it
                    here.wait_stream(stream)
            return buffer
        self.allocations += 1
        self.nbytes += numel * dtype.itemsize
        return torch.empty(numel, dtype=dtype, device=self.device)

    def release(self, buffer: Tensor) -> None:
        """Return a buffer of :meth:`acquire` to the pool, once no collective uses it."""
        if self._reuse:
            stream = None if self._current is None else self._current()
            self._free[(buffer.numel(), buffer.dtype)].append((buffer, stream))
        else:
            self.nbytes -= buffer.nbytes


class GradientReducer:
    """The gradients of a chunk's sharded parameters, from ready to reduced (WP-6).

    Args:
        collectives: for each axis, those of its gradient group, or another form of its sums.
        buffers: pool for inputs and outputs of reduce-scatters.

    Attributes:
        ready: unsharded gradients that are not reduced yet; those of several uses are summed.
        had_gradient: for each weight with a reduction in this backward, in launch order, whether
            this rank had a gradient of it.
        sums: of near ranks, in flight (:mod:`internsp.wp.two_level`).
        unsharded_sums: accumulated sums of unsharded gradients that are not reduced yet.
    """

    def __init__(
        self,
        collectives: Mapping[WeightAxis, Collectives | TwoLevels | BackendSums],
        trace: Trace,
        buffers: Buffers,
        sums: Iterable[Sum] = (),
    ) -> None:
        self._collectives, self.sums = collectives, sums
        self._trace = trace
        self.buffers = buffers
        self._queue: deque[list[PendingGradient]] = deque()
        self.ready: dict[ShardedParameter, Tensor] = {}
        self.had_gradient: dict[ShardedParameter, bool] = {}
        self.unsharded_sums = UnshardedSums(buffers)
        self._current = current_stream(buffers.device)
        self._turns = StreamTurns()

    def take_turn(self) -> None:
        """Make the current stream, which works on gradients next, stand behind those before it.

        A gradient that is ready on one stream may be added to, sent or finished on another one: a
        reduction waits for its turn. Without streams this does nothing.
        """
        if self._current is not None:
            self._turns.take(self._current())

    def __len__(self) -> int:
        return len(self._queue)

    def accumulate(self, weights: Sequence[ShardedParameter]) -> None:
        """Add the ready gradients of ``weights`` to their unsharded sums. No message."""
        for weight in weights:
            gradient = self._pop_ready(weight)
            self.unsharded_sums.add(weight.unit, weight, gradient)

    def reduce_scatter(self, weights: Sequence[ShardedParameter]) -> None:
        """Start the reduction of the ready gradients of ``weights``, of zeros for others (WP-2)."""
        unit, launched = weights[0].unit, list[PendingGradient]()
        self._queue.append(launched)
        runs = runs_of(weights, attrgetter("reduce_dtype")) if len(weights) > 1 else (weights,)
        for run in runs:
            first = run[0]
            shares = {first.name: first.layout.shard_numel}
            if len(run) == 1:
                input, packed = self._input(first, self._pop_ready(first))
            else:
                shares |= {weight.name: weight.layout.shard_numel for weight in run}
                gradients = [self._pop_ready(weight) for weight in run]
                input = packed = self._coalesced_input(run, gradients)
            collectives, size = self._collectives[first.axis], first.layout.size
            numel = input.numel() // size * collectives.received
            output = input if size == 1 else self.buffers.acquire(numel, input.dtype)
            handle = collectives.reduce_scatter(output, input, unit.name, shares, "backward")
            launched.append(PendingGradient(unit, run, output, packed, input, handle))

    def finish_oldest(self, _: Sequence[ShardedParameter] = ()) -> None:
        """Wait for the oldest reduction and add it to its shards' reduced gradients."""
        for pending in self._queue.popleft():
            unit, weights, output = pending.unit, pending.weights, pending.output
            collectives = self._collectives[weights[0].axis]
            collectives.wait(pending.handle, unit.name, weights[0].name, "finish")
            pending.handle.keep = ()
            if weights[0].layout.size == 1 and pending.packed is None:
                weights[0].reduced.borrow(output)  # a weight group of one: the gradient is the sum
            else:
                if len(weights) == 1:
                    shape = weights[0].layout.shard_shape
                    weights[0].reduced.add(collectives.total(output, pending.input, shape))
                else:
                    total = collectives.total(output, pending.input)
                    parts = unflatten(total, [weight.storage for weight in weights])
                    for weight, part in zip(weights, parts, strict=True):
                        weight.reduced.add(part)
                if weights[0].layout.size > 1:
                    self.buffers.release(output)
                if pending.packed is not None:
                    self.buffers.release(pending.packed)
            if self._trace.enabled:
                for weight in weights:
                    self._trace.record("FINISH", unit.name, weight.name, "finish")

    def go_on(self, _: Sequence[ShardedParameter]) -> None:
        """Let sums of near ranks go on to others."""
        for one in self.sums:
            one.go_on()

    def discard(self) -> None:
        """After a failure that all ranks met: wait for everything in flight, drop the rest (WP-10).

        What arrives is added to the shards' reduced gradients, which the caller drops.
        """
        while self._queue:
            self.finish_oldest()
        self.ready.clear()
        self.had_gradient.clear()
        self.unsharded_sums.discard()

    def _pop_ready(self, weight: ShardedParameter) -> Tensor | None:
        gradient = self.ready.pop(weight, None)
        if gradient is not None and self._current is not None:
            gradient.record_stream(cast(Any, self._current()))  # it may be another one's memory
        self.had_gradient[weight] = gradient is not None or self.had_gradient.get(weight, False)
        return gradient

    def _coalesced_input(
        self, weights: Sequence[ShardedParameter], gradients: Sequence[Tensor | None]
    ) -> Tensor:
        """The input of one reduce-scatter of several gradients, flat: the part for each rank holds
        its rows of one weight after another."""
        size, dtype = weights[0].layout.size, weights[0].reduce_dtype
        shard = sum([weight.layout.shard_numel for weight in weights])
        packed = self.buffers.acquire(size * shard, dtype)
        out = packed.view(size, shard)
        pairs = list(zip(weights, gradients, strict=True))
        ready = [g for w, g in pairs if g is not None and w.layout.in_rows(g) and g.dtype == dtype]
        if len(ready) == len(pairs) and not self.unsharded_sums.held:
            torch._chunk_cat(ready, 0, size, out=out)  # one call for all, as in FSDP2
            return packed
        parts = [self._input(weight, gradient) for weight, gradient in pairs]
        torch.cat([input.view(size, -1) for input, _ in parts], 1, out=out)
        for _, temporary in parts:
            if temporary is not None:
                self.buffers.release(temporary)
        return packed

    def _input(
        self, weight: ShardedParameter, gradient: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The input of one gradient's reduce-scatter, flat; and the pooled buffer that this is, if
        the gradient needed a copy."""
        if weight in self.unsharded_sums.held:
            total = self.unsharded_sums.pop(weight, gradient)
            if total is not None:
                return total, total
        if gradient is not None and gradient.dtype == weight.reduce_dtype:
            input = input_without_copy(weight.layout, gradient)
            if input is not None:
                return input, None
        packed = self.buffers.acquire(weight.layout.padded_numel, weight.reduce_dtype)
        if gradient is None:
            packed.zero_()
        else:
            weight.layout.pack(gradient, packed)
        return packed, packed


def input_without_copy(layout: ShardLayout, gradient: Tensor) -> Tensor | None:
    """``gradient`` as a flat reduce-scatter input, without a copy; ``None`` if it needs one."""
    if layout.padded:
        return None
    front = gradient.movedim(layout.dim, 0) if layout.dim else gradient
    return front.view(-1) if front.is_contiguous() else None


class UnshardedSums:
    """Accumulated unsharded gradients that are not reduced yet, in the order of first accumulation.

    That is the declared order on every rank (WP-2), since weights without a gradient are added,
    too.

    Args:
        buffers: the pool in which the sums lie.

    Attributes:
        held: the unit and the sum of each weight; ``None`` stands for zeros.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.held: dict[ShardedParameter, tuple[Unit, Tensor | HostSum | None]] = {}
        self._hosted: dict[ShardedParameter, HostSum] = {}

    def __iter__(self) -> Iterator[tuple[Unit, ShardedParameter]]:
        return iter([(unit, weight) for weight, (unit, _) in self.held.items()])

    @property
    def nbytes(self) -> int:
        """Bytes of the sums that exist now."""
        sums = [total for _, total in self.held.values() if total is not None]
        return sum((t.values if isinstance(t, HostSum) else t).nbytes for t in sums)

    def add(self, unit: Unit, weight: ShardedParameter, gradient: Tensor | None) -> None:
        """Add an unsharded gradient; ``None`` stands for zeros. No message."""
        _, total = self.held.get(weight, (unit, None))
        if gradient is not None:
            if isinstance(total, Tensor):
                weight.layout.add(gradient, total)
            else:
                wide = torch.promote_types(weight.compute_dtype, torch.float32)
                part = self.buffers.acquire(weight.layout.padded_numel, wide)
                weight.layout.pack(gradient, part)
                total = self._offloaded(weight, total, part) or part
        self.held[weight] = (unit, total)

    def _offloaded(
        self, weight: ShardedParameter, total: HostSum | None, part: Tensor
    ) -> HostSum | None:
        """Add ``part`` to ``weight``'s sum in host memory, and return that; ``None`` if its
        gradients are not offloaded."""
        link = weight.reduced.link
        if link is None:
            return None
        if total is None:
            if weight not in self._hosted:
                self._hosted[weight] = HostSum(link, part.numel(), part.dtype)
            total = self._hosted[weight]
            total.clear()
        total.add(part, self.buffers.release)
        return total

    def pop(self, weight: ShardedParameter, gradient: Tensor | None) -> Tensor | None:
        """Remove and return the sum with ``gradient`` added: flat, padded, in the reduce dtype.

        A pooled buffer, which the caller releases; ``None`` if there was no gradient.
        """
        unit, total = self.held[weight]
        if isinstance(total, HostSum):
            there = self.buffers.acquire(total.values.numel(), total.values.dtype)
            self.held[weight] = unit, total.to_device(there)
        self.add(unit, weight, gradient)
        total = self.held.pop(weight)[1]
        if isinstance(total, HostSum):  # `gradient` was the only one, and is in host memory
            total = total.to_device(self.buffers.acquire(total.values.numel(), total.values.dtype))
        if total is None or total.dtype == weight.reduce_dtype:
            return total
        packed = self.buffers.acquire(total.numel(), weight.reduce_dtype)
        packed.copy_(total)  # rounded once, as a gradient of one micro-batch is
        self.buffers.release(total)
        return packed

    def drop(self, weight: ShardedParameter) -> None:
        """Set ``weight``'s sum to zero; it keeps its position in the order (WP-2)."""
        if weight in self.held:
            unit, total = self.held[weight]
            if isinstance(total, Tensor):
                self.buffers.release(total)
            self.held[weight] = (unit, None)

    def discard(self) -> None:
        """Drop every sum."""
        for _, total in self.held.values():
            if isinstance(total, Tensor):
                self.buffers.release(total)
        self.held.clear()
