"""How gradient sums become slices: the ZeRO part of finishing reductions.

Every bucket's shard-sized sums go through one exchange over the ZeRO group and a local sum (a
reduce-scatter, see ``wp.collectives``), and where there are more replicas than that, the slice is
summed over the ranks that hold the same one (ZeRO-1.5). When, the queue decides: in the last
backward before the step, which is known or expected, while it runs
(:mod:`internsp.wp.reductions`). Replicated parameters arrive by one flat
all-reduce over all ranks of the stage, with a flag for each parameter that some rank used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.mesh import ParallelMesh
from internsp.optim.bucket import Bucket
from internsp.optim.finite import not_finite
from internsp.optim.guarded import drop_raw_gradient, raw_gradient
from internsp.optim.plain_loop import discard_sums
from internsp.wp.collectives import Handle
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member, ReplicatedParameter, ShardedParameter
from internsp.wp.reductions import Parcel

IN_FLIGHT = 2  # exchanges: several moderate ones use both directions of a link (DESIGN 8)


@dataclass
class _Exchange:
    bucket: Bucket
    received: Tensor
    packed: Tensor
    handle: Handle
    total: Tensor | None = None  # this rank's slice, where it is summed over further ranks
    dropped: list[Member] = field(default_factory=list)


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
        self._state.finish_reductions()  # what is in flight was declared otherwise
        self._mesh: ParallelMesh = communicator.mesh
        self._buckets = buckets
        self._dtype = reduce_dtype
        self.broken = torch.zeros((), dtype=torch.bool, device=self._mesh.device)
        self._flying: deque[_Exchange] = deque()
        self._slices: list[_Exchange] = []  # whose slices are on their way over further ranks
        self._backwards = self._expected = 0  # that exchange, since the last run and before it
        self._put_off = False  # one since the last run has said that more come
        # In the order in which a backward completes them.
        self._bucket_of: dict[Parcel[ShardedParameter], Bucket] = {}
        for bucket in reversed(buckets):
            weights = [m for m in bucket.offsets if isinstance(m, ShardedParameter)]
            if weights:
                self._bucket_of[Parcel(bucket.name, weights, bucket.nbytes)] = bucket
        sizes = sorted(parcel.nbytes for parcel in self._bucket_of)
        self._state.queue.reductions.exchanges.declare([*self._bucket_of], sum(sizes[-IN_FLIGHT:]))
        self._state.replicas = self
        communicator.expects_exchange = self.expects

    def run(self) -> set[Member]:
        """Add every gradient that is ready on any rank to the slices. Collective, always all of it;
        blocks.

        The launch order is the same on every rank (WP-2): whole sums that no backward has reduced
        (``no_sync``), the replicated parameters, then the buckets that are not exchanged yet, in
        the order in which a backward completes them.

        Returns:
            The parameters that some rank used.
        """
        replicated = self._communicator.replicated
        self._state.reduce_accumulated()
        direct = {}
        for bucket in self._buckets:
            for member in bucket.offsets:
                local = self._take_direct(member)
                if local is not None:
                    direct[member] = local
        # Before it is summed with the other ranks': here such values show where they arose.
        self.broken |= not_finite([replicated.gradient()[: replicated.numel]], self._mesh.device)
        collectives = self._state.collectives
        flat = self._launched(replicated.reduce(self._state.reducer.touched, collectives))
        self._state.complete_gradients()
        self._arrive()
        collectives.wait(flat, "small", "", "finish")
        for bucket in self._buckets:
            if bucket.small:
                self._add_small(bucket)
            else:
                self._add_direct(bucket, direct)
        # A parameter that no rank used is not stepped; of a frozen one nothing is asked.
        used_small, used_sharded = replicated.used(lambda m: None if m.requires_grad else False)
        used: set[Member] = {m for m, u in zip(replicated.members, used_small, strict=True) if u}
        used |= {w for w, u in zip(replicated.sharded, used_sharded, strict=True) if u}
        replicated.reset()
        self._state.reducer.touched.clear()
        if self._backwards:
            self._expected = self._backwards
        self._backwards, self._put_off = 0, False
        return used

    def backward_ended(self) -> None:
        """Count it, unless it said that more come: the next step is expected to take as many."""
        communicator = self._communicator
        if communicator.queue.reductions.accumulating or communicator.more_to_come:
            self._put_off = True
        else:
            self._backwards += 1

    def expects(self) -> bool:
        """Whether the backward that begins is expected to be the last before :meth:`run`.

        As many as the last time; before the first time one, if others have said that more come.
        """
        return self._backwards + 1 == (self._expected or int(self._put_off))

    def drop(self, member: Member, used: bool) -> None:
        """Forget the sums of one parameter on this rank, without a message."""
        discard_sums(self._state, self._communicator.replicated, member, used)
        for exchange in (*self._flying, *self._slices):
            if member in exchange.bucket.offsets:
                exchange.dropped.append(member)

    def discard_all(self) -> None:
        """Let what is pending arrive and drop every sum, without a message."""
        self._state.reducer.whole.discard()
        self._state.finish_reductions()
        expected = self._expected
        self.discard()
        self._expected = expected
        self._state.queue.reductions.exchanges.reset()
        self._state.reducer.touched.clear()
        self._communicator.replicated.reset()
        for weight in self._communicator.replicated.sharded:
            weight.drop_reduced_grad()

    # between replicas (internsp.wp.reductions.ReplicaExchange)

    def start(self, parcel: Parcel[ShardedParameter]) -> None:
        """Launch the exchange of a bucket's sums over its ZeRO group."""
        bucket = self._bucket_of[parcel]
        zero, buffers = bucket.axis.zero, self._state.reducer.buffers
        dtype = self._dtype or bucket.master.dtype
        packed = buffers.take(bucket.flat.numel(), dtype)
        for member, start in bucket.offsets.items():
            assert isinstance(member, ShardedParameter), "a small bucket is no parcel"
            place = packed[start : start + member.storage.numel()]
            total = member.reduced()
            if total is None:  # unused on this rank, perhaps not on others: zeros
                place.zero_()
            else:
                place.copy_(total.flatten())
                member.drop_reduced_grad()
        for start, stop in bucket.gaps:
            packed[start:stop].zero_()
        received = packed if zero == 1 else buffers.take(packed.numel(), dtype)
        collectives = self._state.between[bucket.axis].zero
        handle = collectives.exchange(received, packed, bucket.name)
        exchange = _Exchange(bucket, received, packed, handle)
        if zero == 1:
            self._sum(exchange)
        self._flying.append(exchange)

    def finish_oldest(self) -> None:
        """Wait for it and, where more ranks hold the same slice, launch their sum."""
        exchange = self._flying.popleft()
        if exchange.total is None:
            self._sum(exchange)
        if exchange.bucket.sum is not None:  # to the host at once
            self._add(exchange)
        else:
            self._slices.append(exchange)

    def discard(self) -> None:
        """Let what is in flight arrive and keep nothing: no step is expected to be like the last.

        No message.
        """
        for exchange in (*self._flying, *self._slices):
            self._state.collectives.wait(exchange.handle, exchange.bucket.name, "", "finish")
            if exchange.total is None:
                self._give_back(exchange)
        self._flying.clear()
        self._slices.clear()
        self._backwards, self._expected, self._put_off = 0, 0, False

    def _give_back(self, exchange: _Exchange) -> None:
        self._state.reducer.buffers.give(exchange.packed)
        if exchange.received is not exchange.packed:
            self._state.reducer.buffers.give(exchange.received)

    def _sum(self, exchange: _Exchange) -> None:
        bucket = exchange.bucket
        between = self._state.between[bucket.axis]
        self._state.collectives.wait(exchange.handle, bucket.name, "", "finish")
        exchange.handle.keep = ()
        dtype = bucket.master.dtype
        exchange.total = between.zero.sum_received(exchange.received, exchange.packed, dtype)
        self._give_back(exchange)
        exchange.handle = between.zero_replica.all_reduce(exchange.total, bucket.name)

    def _arrive(self) -> None:
        """All exchanges are finished: their slices are in their buckets when they are summed."""
        for exchange in self._slices:
            self._add(exchange)
        self._slices.clear()
        if self._state.link is not None:
            self._state.link.rest()

    def _add(self, exchange: _Exchange) -> None:
        bucket, total = exchange.bucket, exchange.total
        assert total is not None, "finish_oldest has summed it"
        self._state.collectives.wait(exchange.handle, bucket.name, "", "finish")
        for member in exchange.dropped:
            bucket.zero(total, member)
        bucket.add(total)

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

    def _take_direct(self, member: Member) -> Tensor | None:
        """A gradient that autograd left in ``.grad``: the loss used the ``DTensor`` itself.

        Such a term is the same on all ranks, so it counts once and not once a rank.

        Returns:
            What a shard gets of it, like the parameter's storage.
        """
        raw = raw_gradient(member.parameter)
        if raw is None:
            return None
        drop_raw_gradient(member.parameter)
        value = raw.redistribute(placements=member.parameter.placements)  # type: ignore[attr-defined]
        local = value._local_tensor
        if self._communicator.mean:  # everything is divided by the number of ranks later
            local = local * self._mesh.shape.stage_size
        if isinstance(member, ReplicatedParameter):
            first = dist.get_rank(self._mesh.stage_group) == 0
            index = self._communicator.replicated.members.index(member)
            self._communicator.replicated.add(index, local if first else torch.zeros_like(local))
            return None
        self._state.reducer.touched[member] = True
        padded = member.zeros(local.dtype)
        member.local(padded).copy_(local)
        return padded

    def _add_direct(self, bucket: Bucket, direct: Mapping[Member, Tensor]) -> None:
        """Every rank has them: into the slices, past all exchanges."""
        assert bucket.gradient is not None, "it has been exchanged"
        for segment in bucket.segments:
            if segment.member in direct:
                begin, end = segment.offset, segment.offset + segment.tensor.numel()
                part = direct[segment.member].flatten()[begin:end]
                place = bucket.gradient[segment.start : segment.stop]
                place += part.to(place.device)

    def _launched(self, work: dist.Work | None) -> Handle:
        """Of the replicated parameters."""
        if work is None:
            return Handle(None)
        event = self._state.trace.record("FINISH", "small", "", "zero", in_flight=True)
        handle, collectives = Handle(work, [event]), self._state.collectives
        if not collectives.overlap:
            collectives.wait(handle, "small", "", "finish")
        return handle
