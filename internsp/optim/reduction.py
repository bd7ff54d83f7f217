"""``ZeroReducer``: reduce-scatters reduced gradients over replicas (ZeRO).

The reduced gradients of a bucket's shards go through one exchange over the ZeRO group and a local
sum (a reduce-scatter, see ``wp.collectives``), which leaves each rank a slice of them. Where there
are more replicas than ZeRO ranks, the slice is then all-reduced over the ranks that hold the same
one (ZeRO-1.5). :mod:`internsp.schedule.reductions` decides when a bucket is exchanged: while the
last backward before the step runs, where that is known or expected to be the last. Gradients of
replicated parameters come by one flat all-reduce over all ranks of the stage, with a flag for each
parameter that some rank used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.dtensor.mixed import raw_grad, read_each
from internsp.dtensor.unfinished import gradients_lost
from internsp.mesh import ParallelMesh
from internsp.optim.bucket import Bucket
from internsp.optim.tied import ZeroGradients
from internsp.schedule.terms import Parcel
from internsp.wp.collectives import Handle
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member, ReplicatedParameter, ShardedParameter
from internsp.wp.plain_loop import discard_sums

IN_FLIGHT = 2  # exchanges in flight: several use both directions of a link (design.md 8)


@dataclass
class _Exchange:
    """The exchange of one bucket, and the sums that follow."""

    bucket: Bucket
    buffers: Sequence[Tensor]  # its input and its output; where nothing is sent they are one
    handle: Handle
    total: Tensor | None = None  # this rank's slice, once the exchange is summed
    dropped: list[Member] = field(default_factory=list)  # their sums count as zeros


class ZeroReducer:
    """Reduces one communicator's gradients into its buckets' slices: a
    :class:`internsp.wp.consumer.GradientConsumer`.

    Args:
        before_pass: called before a forward, which may train parameters that have no bucket yet.
        reduce_dtype: the dtype in which gradients are exchanged; ``None``: the dtype of the sums.

    Attributes:
        divides_by: by what all sums are divided: one number, as that of the loop before.
        bucket_of: the bucket of each parameter.
        used: the parameters of whose gradients slices hold something since the last step.
        unfinished: whether there are gradients that no step has used.
        local_not_finite: whether this rank's own gradients of replicated parameters, before their
            all-reduce, were not finite; a tensor.
    """

    is_optimizer = True

    def __init__(
        self,
        communicator: ISPCommunicator,
        before_pass: Callable[[], None],
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self._communicator = communicator
        self._state = communicator.state
        self._mesh: ParallelMesh = communicator.mesh
        self._before_pass, self._dtype = before_pass, reduce_dtype
        members = communicator.replicated.all_parameters()
        (self.divides_by,) = {*map(communicator.state.consumer.divisor, members)} or {1.0}
        self.local_not_finite = torch.zeros((), dtype=torch.bool, device=self._mesh.device)
        self._in_flight: deque[_Exchange] = deque()
        self._replica_sums: list[_Exchange] = []  # their slices are being all-reduced
        # Backwards since the last step, without those that are not the last (`no_sync` and kin).
        self._backwards = 0
        self._expected_backwards = 0  # as many as the last step had
        self._saw_accumulation = False  # there was one since the last step that was not counted
        self._buckets: Sequence[Bucket] = ()
        self.bucket_of: dict[Member, Bucket] = {}
        self.parcels: Sequence[Parcel[ShardedParameter]] = ()
        self.limit = 0
        self.unfinished = False
        self.used: set[Member] = set()
        self._lost: set[Member] = set()  # parameters whose gradients were lost in a failed pass
        self.tied = ZeroGradients(self.bucket_of, self.finalize_gradients, self.used)

    def declare(self, buckets: Sequence[Bucket]) -> None:
        """Set the buckets, in the order in which forward needs them. No exchange may be in
        flight."""
        self._buckets = buckets
        self.bucket_of.update((m, bucket) for bucket in buckets for m in bucket.offsets)
        sharded = [
            (bucket, [m for m in bucket.offsets if isinstance(m, ShardedParameter)])
            for bucket in reversed(buckets)
        ]
        self.parcels = [Parcel(b.name, weights, b.nbytes) for b, weights in sharded if weights]
        self.limit = sum(sorted(parcel.nbytes for parcel in self.parcels)[-IN_FLIGHT:])
        self._state.declare_exchanges()

    def finalize_gradients(self) -> set[Member]:
        """Add every gradient that is ready on any rank to the slices, for all parameters.

        Collective; blocks.

        The launch order is the same on every rank (WP-2): unsharded sums that no backward has
        reduced (``no_sync``), the replicated parameters, then the buckets that are not exchanged
        yet, in the order in which a backward completes them.

        Returns:
            The parameters that some rank used.

        Raises:
            GradientError: gradients were lost in a failed pass, and the user has not dropped them.
        """
        self._communicator.events.recover()
        if self._lost:
            raise gradients_lost(len(self._lost), self._mesh.rank)
        replicated = self._communicator.replicated
        self._state.reduce_accumulated()
        autograd_gradients = self._take_autograd_gradients()
        # Before the all-reduce: only here is known on which rank values that are not finite arose.
        finite = replicated.gradient()[: replicated.numel].isfinite().all()
        self.local_not_finite |= ~finite  # as a tensor: the host does not wait
        collectives = self._state.collectives
        flat = self._replicated_handle(
            replicated.reduce(self._state.reducer.had_gradient, collectives)
        )
        self._state.complete_gradients()
        self._finish_sums(self._replica_sums)
        self._replica_sums.clear()
        if self._state.link is not None:
            self._state.link.finish_copies_to_host()  # they are read on the device next
        collectives.wait(flat, "small", "", "finish")
        for bucket in self._buckets:
            if bucket.replicated:
                self._add_replicated(bucket)
            else:
                for member in autograd_gradients.keys() & bucket.offsets.keys():
                    self._add_autograd_gradient(bucket, member, autograd_gradients[member])
        # A parameter that no rank used is not stepped.
        used_replicated, used_sharded = replicated.used(lambda _: None)
        members: zip[tuple[Member, bool]] = zip(replicated.members, used_replicated, strict=True)
        used: set[Member] = {m for m, u in members if u}
        used |= {w for w, u in zip(replicated.sharded, used_sharded, strict=True) if u}
        replicated.reset()
        self._state.reducer.had_gradient.clear()
        if self._backwards:
            self._expected_backwards = self._backwards
        self._backwards, self._saw_accumulation = 0, False
        self.used |= used
        return used

    def pass_begins(self) -> None:
        """See :class:`GradientConsumer`."""
        self._before_pass()

    def backward_begins(self) -> None:
        """Does nothing."""

    def step_begins(self) -> bool:
        """See :class:`GradientConsumer`."""
        return self.unfinished

    def take_hooks(self, member: Member) -> bool:
        """See :class:`GradientConsumer`."""
        return False

    def call_hooks(self) -> None:
        """Does nothing: none were taken."""

    def backward_ended(self, more: bool) -> None:
        """Count this backward, unless others are known to follow before the step (``no_sync`` and
        kin). The next step is expected to have as many."""
        self.unfinished = True
        if more:
            self._saw_accumulation = True
        else:
            self._backwards += 1

    def divisor(self, member: Member) -> float:
        """See :class:`internsp.wp.consumer.GradientConsumer`."""
        return self.divides_by

    def expects_exchange(self) -> bool:
        """Whether the backward that begins is expected to be the last before
        :meth:`finalize_gradients`.

        It is if the last step ended after as many counted backwards. In the first step the first
        one that is counted is taken for the last, if uncounted ones came before it.
        """
        return self._backwards + 1 == (self._expected_backwards or int(self._saw_accumulation))

    def reset(self, earlier: bool, step: bool) -> None:
        """See :class:`GradientConsumer`."""
        lost = self.unfinished and earlier
        self.clear()
        if lost:  # until the user has dropped all (zero_grad), a step would lack these gradients
            self._lost = {member for member in self.bucket_of if member.requires_grad}
            self.unfinished = True

    def clear(self) -> None:
        """Drop the slices' gradients, and what is recorded of them since the last step."""
        self._lost.clear()
        self.used.clear()
        for bucket in self._buckets:
            bucket.gradient = None
        self.local_not_finite.zero_()
        self.unfinished = False

    def drop_gradient(self, member: Member, used: bool) -> None:
        """Drop this rank's part of one gradient. No communication; waits for what is in flight.

        After a failed step all ranks must call this, as they must ``zero_grad()``.

        Args:
            used: whether it was set to zero, not to ``None``: the next step then uses zeros.
        """
        self._communicator.events.recover()
        self._lost.discard(member)
        if not used:
            self.used.discard(member)
        bucket = self.bucket_of[member]
        if bucket.gradient is not None:
            if bucket.link is not None:
                bucket.link.synchronize()
            bucket.zero_range(bucket.reduced, member)
        discard_sums(self._state, self._communicator.replicated, member, used)
        for exchange in (*self._in_flight, *self._replica_sums):
            if member in exchange.bucket.offsets:
                exchange.dropped.append(member)

    def drop_all_sums(self) -> None:
        """Wait for what is in flight, and drop every sum. Launches nothing."""
        self._state.reducer.unsharded_sums.discard()
        self._state.finish_reductions()
        expected = self._expected_backwards
        self.discard()
        self._expected_backwards = expected
        self._state.queue.reductions.exchanges.reset()
        self._state.reducer.had_gradient.clear()
        self._communicator.replicated.reset()
        for weight in self._communicator.replicated.sharded:
            weight.reduced.drop()

    # between replicas

    def start(self, parcel: Parcel[ShardedParameter]) -> None:
        """Launch the exchange of a bucket's reduced gradients over its ZeRO group."""
        bucket = self.bucket_of[parcel.weights[0]]
        collectives, buffers = self._state.between[bucket.axis].zero, self._state.reducer.buffers
        dtype, numel = self._dtype or bucket.master.dtype, bucket.flat.numel()
        alone = collectives.size == 1  # then this is the gradient itself
        if alone:
            packed = torch.empty(numel, dtype=dtype, device=self._mesh.device)
        else:
            packed = buffers.acquire(numel, dtype)
        parts: list[Tensor] = []
        totals: list[Tensor] = []
        for member, start in bucket.offsets.items():
            assert isinstance(member, ShardedParameter), "replicated parameters have no parcel"
            part = packed[start : start + member.storage.numel()]
            total = member.reduced.pop()
            if total is None:  # unused on this rank, but perhaps used on others: zeros
                part.zero_()
            elif member.reduced.link is not None:  # one at a time is on the device
                part.copy_(total.flatten())
            else:
                parts.append(part)
                totals.append(total.flatten())
        if parts:
            torch._foreach_copy_(parts, totals)
        for start, stop in bucket.gaps:
            packed[start:stop].zero_()
        received = packed if alone else buffers.acquire(numel, dtype)
        handle = collectives.exchange(received, packed, bucket.name)
        exchange = _Exchange(bucket, list(dict.fromkeys((packed, received))), handle)
        if alone:
            self._sum_slice(exchange)
        self._in_flight.append(exchange)

    def finish_oldest(self) -> None:
        """Wait for the exchange that was launched first. Where further ranks hold the same slice,
        launch the all-reduce over them."""
        exchange = self._in_flight.popleft()
        if exchange.total is None:
            self._sum_slice(exchange)
        if exchange.bucket.host_sum is not None:  # to host memory at once
            self._finish_sums([exchange])
        else:
            self._replica_sums.append(exchange)

    def discard(self) -> None:
        """Wait for exchanges in flight, keep nothing of them, and reset the counts of backwards.

        Launches nothing.
        """
        for exchange in (*self._in_flight, *self._replica_sums):
            self._state.collectives.wait(exchange.handle, exchange.bucket.name, "", "finish")
            if exchange.total is None:
                for buffer in exchange.buffers:
                    self._state.reducer.buffers.release(buffer)
        self._in_flight.clear()
        self._replica_sums.clear()
        self._backwards, self._expected_backwards, self._saw_accumulation = 0, 0, False

    def _sum_slice(self, exchange: _Exchange) -> None:
        bucket = exchange.bucket
        between = self._state.between[bucket.axis]
        self._state.collectives.wait(exchange.handle, bucket.name, "", "finish")
        exchange.handle.keep = ()
        dtype = bucket.master.dtype
        packed, received = exchange.buffers[0], exchange.buffers[-1]
        if received is packed:
            exchange.total = packed.to(dtype)
        else:
            exchange.total = between.zero.transport.sum_output(received, packed, dtype=dtype)
            for buffer in exchange.buffers:
                self._state.reducer.buffers.release(buffer)
        exchange.handle = between.zero_replica.all_reduce(exchange.total, bucket.name)

    def _finish_sums(self, exchanges: Sequence[_Exchange]) -> None:
        """Wait for the all-reduces of slices, and add these to their buckets' gradients."""
        for exchange in exchanges:
            self._state.collectives.wait(exchange.handle, exchange.bucket.name, "", "finish")
        for exchange in exchanges:
            assert exchange.total is not None, "finish_oldest has summed it"
            exchange.bucket.add_gradient(exchange.total, exchange.dropped)

    def _add_replicated(self, bucket: Bucket) -> None:
        if bucket.gradient is None:
            bucket.gradient = torch.zeros_like(bucket.master)
        values = self._communicator.replicated.views()
        for segment in bucket.segments:
            assert isinstance(segment.member, ReplicatedParameter), "bucket.replicated"
            part = values[segment.member.index].flatten()[segment.offset :]
            bucket.gradient[segment.start : segment.stop] += part[: segment.tensor.numel()]

    def _take_autograd_gradients(self) -> dict[Member, Tensor]:
        """Take the gradients that autograd left in ``.grad``: the loss used the ``DTensor`` itself.

        Such a term is the same on all ranks, so it counts once and not once for each rank.

        Returns:
            This rank's part of those of sharded parameters, like their storage. Those of replicated
            ones are added to the flat gradient.
        """
        members = [member for bucket in self._buckets for member in bucket.offsets]
        gradients = read_each(raw_grad.__get__, [member.parameter for member in members])
        taken: dict[Member, Tensor] = {}
        for member, raw in zip(members, gradients, strict=True):
            if raw is None:
                continue
            raw_grad.__set__(member.parameter, None)
            placements = member.parameter.placements  # type: ignore[attr-defined]
            local = raw.redistribute(placements=placements)._local_tensor
            local = local * self.divides_by  # as all gradients are divided later
            if isinstance(member, ReplicatedParameter):
                first = dist.get_rank(self._mesh.stage_group) == 0
                member.add_gradient(local if first else torch.zeros_like(local))
            else:
                self._state.reducer.had_gradient[member] = True
                taken[member] = member.zeros(local.dtype)
                member.local(taken[member]).copy_(local)
        return taken

    @staticmethod
    def _add_autograd_gradient(bucket: Bucket, member: Member, gradient: Tensor) -> None:
        """Add it to the bucket's slice, without an exchange: every rank has it already."""
        if bucket.host_sum is not None and bucket.link is not None:
            bucket.link.synchronize()  # the host adds
        for segment in bucket.segments:
            if segment.member is member:
                part = gradient.flatten()[segment.offset :][: segment.tensor.numel()]
                target = bucket.reduced[segment.start : segment.stop]
                target += part.to(target.device)

    def _replicated_handle(self, work: dist.Work | None) -> Handle:
        """The handle of the replicated parameters' all-reduce."""
        if work is None:
            return Handle(None)
        event = self._state.trace.record("FINISH", "small", "", "zero", in_flight=True)
        handle, collectives = Handle(work, [event]), self._state.collectives
        if not collectives.overlap:
            collectives.wait(handle, "small", "", "finish")
        return handle
