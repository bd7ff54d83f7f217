"""How gradient sums become slices: the ZeRO part of finishing reductions.

Every bucket's shard-sized sums go through one exchange over the ZeRO group and a local sum (a
reduce-scatter, see ``wp.collectives``), and where there are more replicas than that, the slice is
summed over the ranks that hold the same one (ZeRO-1.5). Replicated parameters arrive by one flat
all-reduce over all ranks of the stage, with a flag for each parameter that some rank used.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.mesh import ParallelMesh
from internsp.optim.bucket import Bucket
from internsp.optim.finite import not_finite
from internsp.optim.guarded import drop_raw_gradient, raw_gradient
from internsp.wp.collectives import Handle, all_reduce, exchange_pieces
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import ShardedParameter
from internsp.wp.replicated import ReplicatedParameter
from internsp.wp.unfinished import Member, discard_sums

IN_FLIGHT = 2  # exchanges: several moderate ones use both directions of a link (DESIGN 8)


@dataclass
class _Exchange:
    bucket: Bucket
    received: Tensor
    packed: Tensor
    handle: Handle


class Reducer:
    """Reduces one communicator's sums into its buckets' slices.

    Args:
        reduce_dtype: what slices travel in; ``None``: what they were summed in.

    Attributes:
        broken: whether this rank's own sums of replicated parameters were not finite, as a tensor.
    """

    def __init__(
        self,
        communicator: ISPCommunicator,
        buckets: list[Bucket],
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self._communicator = communicator
        self._state = communicator.state
        self._mesh: ParallelMesh = communicator.mesh
        self._buckets = buckets
        self._dtype = reduce_dtype
        self.broken = torch.zeros((), dtype=torch.bool, device=self._mesh.device)

    def run(self) -> set[Member]:
        """Add every gradient that is ready on any rank to the slices. Collective, always all of it;
        blocks.

        The launch order is the same on every rank (WP-2): what is pending, in its own order, then
        the replicated parameters, then the buckets in forward order. Whole sums that no backward
        has reduced (``no_sync``) come before all.

        Returns:
            The parameters that some rank used.
        """
        replicated = self._communicator.replicated
        self._state.reduce_accumulated()
        self._state.finish_reductions()
        for bucket in self._buckets:
            for member in bucket.offsets:
                self._take_direct(member)
        # Before it is summed with the other ranks': here such values show where they arose.
        self.broken |= not_finite([replicated.gradient()[: replicated.numel]], self._mesh.device)
        replicated.flag(self._state.reducer.touched)
        work = replicated.reduce(self._mesh.stage_group, self._state.counters)
        flat = self._launched(work, "small")
        in_flight: deque[_Exchange] = deque()
        for bucket in self._buckets:
            if not bucket.small:
                in_flight.append(self._exchange(bucket))
                if len(in_flight) == IN_FLIGHT:
                    self._finish(in_flight.popleft())
        while in_flight:
            self._finish(in_flight.popleft())
        self._wait(flat, "small")
        for bucket in self._buckets:
            if bucket.small:
                self._add_small(bucket)
        # A parameter that no rank used is not stepped; of a frozen one nothing is asked.
        used_small, used_sharded = replicated.used(lambda m: None if m.requires_grad else False)
        used: set[Member] = {m for m, u in zip(replicated.members, used_small, strict=True) if u}
        used |= {w for w, u in zip(replicated.sharded, used_sharded, strict=True) if u}
        replicated.reset()
        self._state.reducer.touched.clear()
        return used

    def discard(self, member: Member, used: bool) -> None:
        """Forget the sums of one parameter on this rank, without a message."""
        discard_sums(self._state, self._communicator.replicated, member, used)

    def discard_all(self) -> None:
        """Let what is pending arrive and drop every sum, without a message."""
        self._state.reducer.whole.discard()
        self._state.finish_reductions()
        self._state.reducer.touched.clear()
        self._communicator.replicated.reset()
        for weight in self._communicator.replicated.sharded:
            weight.drop_reduced_grad()

    def _exchange(self, bucket: Bucket) -> _Exchange:
        zero, pool = bucket.axis.zero, self._state.pool
        partial = [w.reduced_grad for w in bucket.offsets if isinstance(w, ShardedParameter)]
        dtype = self._dtype or bucket.master.dtype
        packed = pool.take(bucket.flat.numel(), dtype)
        for (member, start), value in zip(bucket.offsets.items(), partial, strict=True):
            place = packed[start : start + member.storage.numel()]
            if value is None:  # unused on this rank, perhaps not on others: zeros
                place.zero_()
            else:
                place.copy_(value.flatten())
                member.drop_reduced_grad()  # type: ignore[union-attr]
        for start, stop in bucket.gaps:
            packed[start:stop].zero_()
        if zero == 1:
            return _Exchange(bucket, packed, packed, Handle(None))
        received = pool.take(packed.numel(), dtype)
        nbytes = (zero - 1) * bucket.owned.numel() * dtype.itemsize
        self._state.counters.reduced_bytes += nbytes
        self._state.counters.reductions += 1
        work = exchange_pieces(received, packed, bucket.axis.zero_group)
        return _Exchange(bucket, received, packed, self._launched(work, bucket.name, nbytes))

    def _finish(self, exchange: _Exchange) -> None:
        bucket, pool = exchange.bucket, self._state.pool
        self._wait(exchange.handle, bucket.name)
        pieces = exchange.received.view(bucket.axis.zero, -1)
        total = pieces.sum(0, dtype=bucket.master.dtype)
        pool.give(exchange.packed)
        if exchange.received is not exchange.packed:
            pool.give(exchange.received)
        work = all_reduce(total, bucket.axis.zero_replica_group, self._state.counters)
        self._wait(self._launched(work, bucket.name), bucket.name)
        bucket.gradient = total if bucket.gradient is None else bucket.gradient.add_(total)

    def _add_small(self, bucket: Bucket) -> None:
        replicated = self._communicator.replicated
        if bucket.gradient is None:
            bucket.gradient = torch.zeros_like(bucket.master)
        index = {member: i for i, member in enumerate(replicated.members)}
        for segment in bucket.segments:
            assert isinstance(segment.member, ReplicatedParameter), "a small bucket's members"
            whole = replicated.value(index[segment.member]).flatten()
            part = whole[segment.offset : segment.offset + segment.tensor.numel()]
            bucket.gradient[segment.start : segment.stop] += part

    def _take_direct(self, member: Member) -> None:
        """A gradient that autograd left in ``.grad``: the loss used the ``DTensor`` itself.

        Such a term is the same on all ranks, so it counts once and not once a rank.
        """
        raw = raw_gradient(member.parameter)
        if raw is None:
            return
        drop_raw_gradient(member.parameter)
        value = raw.redistribute(placements=member.parameter.placements)  # type: ignore[attr-defined]
        local = value._local_tensor
        if self._communicator.mean:  # everything is divided by the number of ranks later
            local = local * self._mesh.shape.stage_size
        if isinstance(member, ReplicatedParameter):
            first = dist.get_rank(self._mesh.stage_group) == 0
            index = self._communicator.replicated.members.index(member)
            self._communicator.replicated.add(index, local if first else torch.zeros_like(local))
            return
        self._state.reducer.touched[member] = True
        if member.axis.replica_rank == 0:
            wide = torch.promote_types(member.dtype, torch.float32)
            if member.reduced_grad is None:
                member.reduced_grad = torch.zeros_like(member.storage, dtype=wide)
            member.local(member.own_reduced_grad()).add_(local)

    def _launched(self, work: dist.Work | None, unit: str, nbytes: int = 0) -> Handle:
        if work is None:
            return Handle(None)
        trace = self._state.trace
        event = trace.record("FINISH", unit, "", "zero", nbytes, in_flight=True)
        handle = Handle(work, [event])
        if not self._state.collectives.overlap:
            self._wait(handle, unit)
        return handle

    def _wait(self, handle: Handle, unit: str) -> None:
        self._state.collectives.wait(handle, unit, "", "finish")
