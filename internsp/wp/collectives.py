"""All-gather, reduce-scatter and all-reduce of weights: the only file of ``wp`` that communicates.

A reduce-scatter is an all-to-all of the unsharded gradient's parts and a local sum, unless the
backend is asked for its own (:mod:`internsp.wp.backend_sums`). On gloo this
sends half of what gloo's ``reduce_scatter`` sends; on every backend the parts travel in the
gradient's own dtype and are summed in fp32 or wider on arrival (design.md 8). The overlapped and
the synchronous form send the same messages in the same order; only the wait differs (WP-12).

On gloo in host memory, in groups of up to :data:`MOST_DIRECT` ranks, an all-gather or a
reduce-scatter is a message between each pair of ranks, received where it is needed. Gloo's own
all-gather copies everything twice more, sends for two collectives of a group at a time, and passes
each part from rank to rank, where all are busy computing.

Several small weights in one launch travel as one flat tensor (:class:`FlatGather`), never in gloo's
coalesced form, with which torch 2.13 corrupts the heap. The two threads of a gloo group note
without a lock which collective ended last (``runLoop`` in ``ProcessGroupGloo.cpp``), and a name of
more than 15 characters is memory, which both free if they end one at once ("double free",
"unaligned tcache chunk"). No other collective here has such a name.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    ReduceScatterOptions,
)
from torch.utils._pytree import tree_leaves

from internsp.base.accelerator import Arrival, Stream, backends_of, current_stream, has_streams
from internsp.base.trace import Trace, Work
from internsp.failure.comm_context import CommContext, Counters, Launch

if TYPE_CHECKING:  # a handle names weights and knows nothing of them
    from internsp.base.completion import CompletionThread
    from internsp.wp.parameter import ShardedParameter

CPU = torch.device("cpu")
_TAG_BITS = 0x3FFFFFFF
_SPREAD = 0x9E3779B1  # odd and without pattern, so that successive counts give distant tags
MOST_DIRECT = 8
"""The largest group in which each rank sends to each; in larger ones gloo sends in a ring."""


class WorkHandles:
    """The work handles of several messages, as one.

    Handles that were not waited for live as long as their process group, not as this object, which
    is freed when a model is thrown away with gathers in flight: gloo stops reading a connection on
    which a message arrives for a freed handle, and the next model of the mesh would hang.

    Args:
        group: the process group of messages between pairs of ranks.
    """

    def __init__(self, works: Sequence[Work], group: dist.ProcessGroup | None = None) -> None:
        self._works, self._group = works, group

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        self._works = ()

    def __del__(self) -> None:
        if self._works and self._group is not None and not sys.is_finalizing():
            # Do not wait: the messages may never come if other ranks have failed.
            weakref.finalize(self._group, _drop, self._works).atexit = False


def _drop(works: Sequence[Work]) -> None:
    """Called when the process group is freed, and its connections with it."""


class FlatGather:
    """The work handle of an all-gather of several tensors as a single flat one.

    Args:
        gather: of the flat one, whose works keep its tensors until they have ended.
        flat: ``[size, n]``, which receives what each rank sends, one tensor after another.
        outputs: ``[size * rows, ...]`` each, filled by :meth:`wait`.
    """

    def __init__(self, gather: Work, flat: Tensor, outputs: Sequence[Tensor]) -> None:
        self.gather, self._flat, self._outputs = gather, flat, outputs

    def wait(self) -> None:
        """Wait, and fill the outputs. Called once."""
        self.gather.wait()
        size = len(self._flat)
        parts = self._flat.split([output.numel() // size for output in self._outputs], 1)
        for output, part in zip(self._outputs, parts, strict=True):
            output.view(size, -1).copy_(part)


@dataclass(slots=True)
class Handle:
    """A collective in flight. Waiting is idempotent; on a device it orders streams only."""

    work: Work | None
    """``None`` once it has been waited for."""
    events: list[int] = field(default_factory=list)
    keep: tuple[object, ...] = field(default=(), repr=False)
    """Tensors the collective reads or writes, and lists of them: kept until the wait (WP-6)."""
    carries: Sequence[ShardedParameter] = ()
    """The weights of this launch; the caller sets and reads them."""
    launch: Launch = ()
    """Which launch it is, where the :class:`CommContext` counts it."""
    stream: Stream | None = None
    """The stream it was launched from, on a device that has streams."""
    arrival: Arrival | None = None
    """There also: the streams that stand behind it (WP-4)."""


class Transport:
    """How one group's messages travel: by its backend's collectives, or between pairs of ranks.

    Nothing blocks. A transfer starts after what the current stream has queued, and a wait makes the
    current stream wait for the transfer.

    Attributes:
        direct: messages travel between pairs of ranks, over gloo in host memory.
        blocking_waits: gloo copies a device's tensors through the host, and its waits block it.
        tag: of the launch that is being made, the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._gloo = backends_of(group).get(device.type) == "gloo"
        self.blocking_waits = self._gloo and has_streams(device)
        self.direct = self._gloo and device.type == "cpu" and self.size <= MOST_DIRECT
        self.tag = 0
        # torch.distributed's functions check every tensor, which costs time at twenty collectives a
        # block, and our layouts are right: call the group's own methods.
        self._gather = getattr(group, "all_gather_single", group._allgather_base)
        self._exchange = getattr(group, "all_to_all_single", group.alltoall_base)
        self._gather_options, self._exchange_options = AllgatherOptions(), AllToAllOptions()
        self._gather_options.asyncOp = self._exchange_options.asyncOp = True
        self._sum = getattr(group, "reduce_scatter_single", group._reduce_scatter_base)
        self._sum_options = ReduceScatterOptions()
        self._sum_options.asyncOp = True

    def all_gather(self, output: Tensor, shard: Tensor) -> Work:
        """All-gather ``shard`` into ``output``, where this rank's part may lie already."""
        if self.direct:
            parts = output.view(self.size, *shard.shape).unbind()
            if parts[self.rank].data_ptr() != shard.data_ptr():
                parts[self.rank].copy_(shard)
            return send_pairs(self.group, parts, [shard] * self.size, self.tag)
        return self._gather(output, shard, self._gather_options)

    def all_gathers(self, outputs: list[Tensor], shards: list[Tensor]) -> Work:
        """All-gather several shards in one launch."""
        if self.blocking_waits:  # gloo brings each through the host
            pairs = zip(outputs, shards, strict=True)
            return WorkHandles([self.all_gather(output, shard) for output, shard in pairs])
        if self._gloo:
            mine = torch.cat([shard.view(-1) for shard in shards])
            flat = mine.new_empty(self.size * mine.numel())
            return FlatGather(self.all_gather(flat, mine), flat.view(self.size, -1), outputs)
        return self.group.allgather_into_tensor_coalesced(outputs, shards, self._gather_options)

    def all_to_all(self, output: Tensor, input: Tensor) -> Work:
        """Send part ``p`` of ``input`` to rank ``p``; see :meth:`sum_output`."""
        if self.direct:
            received = output.view(self.size, -1).unbind()
            sent = input.view(self.size, -1).unbind()
            return send_pairs(self.group, received, sent, self.tag)
        return self._exchange(output, input, [], [], self._exchange_options)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        """Let the backend add this rank's part of every rank's ``input`` into ``output``."""
        return self._sum(output, input, self._sum_options)

    def exchange_parts(
        self, output: Tensor, input: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        """Send ``sent[p]`` elements of ``input`` to rank ``p``, get ``received[p]``."""
        if not self.direct:
            return self._exchange(
                output, input, list(received), list(sent), self._exchange_options
            )
        outputs, inputs = output.split(list(received)), input.split(list(sent))
        outputs[self.rank].copy_(inputs[self.rank])
        others = [(self.rank + i) % self.size for i in range(1, self.size)]
        group, tag = self.group, self.tag
        works: list[Work] = [group.recv([outputs[p]], p, tag) for p in others[::-1] if received[p]]
        works += [group.send([inputs[p]], p, tag) for p in others if sent[p]]
        return WorkHandles(works, group)

    def sum_output(
        self,
        received: Tensor,
        input: Tensor,
        shape: Sequence[int] = (-1,),
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The sum of the parts that :meth:`all_to_all` has received; called after the wait.

        Messages between pairs are added part by part: torch would first make all parts wide.

        Args:
            received, input: ``output`` and ``input`` of the reduce-scatter.
            shape: of a part; the sum has it without a view of its own, which takes as long as this.
            dtype: dtype of the sum; ``None``: fp32 or wider (design.md 8).

        Returns:
            The sum, in memory of its own.
        """
        dtype = dtype or torch.promote_types(received.dtype, torch.float32)
        rows = received.view(self.size, *shape)
        if not self.direct:
            return rows.sum(0, dtype=dtype)
        parts = [*rows.unbind()]
        parts[self.rank] = input.view(self.size, *shape)[self.rank]  # was not sent to itself
        first, *others = parts
        if others and first.dtype == dtype:
            total = first + others.pop(0)
        else:
            total = first.to(dtype, copy=True)
        for part in others:
            total += part
        return total


class Collectives:
    """Launches one group's collectives and waits for them, counting launches, bytes and waits.

    Args:
        group: the ranks that communicate.
        overlap: if false, every launch is waited for at once: the synchronous oracle (WP-12).
        trace: records ``AG``, ``RS``, ``WAIT`` and the other events.
        counters: shared by all collectives of a model.
        comm_context: shared with the model's other groups; a new one by default.
        device: where the tensors are.

    Attributes:
        received: parts that the output of a reduce-scatter has.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        overlap: bool,
        trace: Trace,
        counters: Counters,
        comm_context: CommContext | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.group = group
        self.transport = Transport(group, device)
        self.size, self.rank = self.transport.size, self.transport.rank
        self.received = self.size
        self.overlap = overlap
        self.trace = trace
        self.counters = counters
        self.comm_context = comm_context or CommContext()
        self._index = self.comm_context.register(group.group_name)
        self._bases: dict[tuple[str, int], int] = {}  # hashes for tags, by weight and bytes
        self._names = (group.group_name,)
        self._device = device
        self._current = current_stream(device)
        self._observer: torch.Stream | None = None
        self._completion_thread: CompletionThread | None = None

    def all_gather(
        self,
        outputs: list[Tensor],
        shards: list[Tensor],
        unit: str,
        weights: Sequence[str],
        phase: str,
    ) -> Handle:
        """All-gather each of ``shards`` ``[rows, ...]`` into its output ``[size * rows, ...]``.

        One launch (design.md 8). Does not block unless ``overlap`` is off. Outputs must be
        ``.data`` aliases of their slot: collectives raise a version counter, which the slot's views
        must not share (design.md 4.1).
        """
        others, counters = self.size - 1, self.counters
        counters.gathers += len(shards)
        if not others:
            for output, shard in zip(outputs, shards, strict=True):
                output.copy_(shard)
        if len(shards) > 1:
            nbytes = {w: others * shard.nbytes for w, shard in zip(weights, shards, strict=True)}
            counters.gathered_bytes += sum(nbytes.values())
            both, send = (outputs, shards), self.transport.all_gathers
            return self.launch(send, both, "AG", unit, nbytes, phase)
        (output,), (shard,), (weight,) = outputs, shards, weights
        received = others * shard.nbytes
        counters.gathered_bytes += received
        one, send_one = (output, shard), self.transport.all_gather
        return self.launch(send_one, one, "AG", unit, {weight: received}, phase)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, unit: str, weights: Mapping[str, int], phase: str,
        send: Callable[[Tensor, Tensor], Work] | None = None,
    ) -> Handle:  # fmt: skip
        """Reduce-scatter ``input`` ``[size * part]``: send part ``p`` to rank ``p``.

        ``output`` ``[size * part]`` receives this rank's part from every rank; after the wait,
        :meth:`total` adds them up. A part may hold shards of several small
        ``weights``, one after another; the values of ``weights`` are the shards' numbers of
        elements. Does not block unless ``overlap`` is off.

        Args:
            send: another way to send and receive than parts of all ranks.
        """
        others = (self.size - 1) * input.itemsize
        self.counters.reduced_bytes += others * (input.numel() // self.size)
        self.counters.reductions += 1
        send = send or self.transport.all_to_all
        return self.launch(send, (output, input), "RS", unit, weights, phase, "", others)

    def total(self, output: Tensor, input: Tensor, shape: Sequence[int] = (-1,)) -> Tensor:
        """The sum of what :meth:`reduce_scatter` has received, in ``shape``, after its wait."""
        return self.transport.sum_output(output, input, shape)

    def exchange(self, output: Tensor, input: Tensor, unit: str) -> Handle:
        """:meth:`reduce_scatter` of reduced gradients between replicas."""
        if self.size == 1:
            return self._arrived()
        nbytes = (self.size - 1) * input.nbytes // self.size
        self.counters.reduced_bytes += nbytes
        self.counters.reductions += 1
        send, waits = self.transport.all_to_all, "finish"
        return self.launch(send, (output, input), "EX", unit, {"": nbytes}, "backward", waits)

    def all_gather_parameters(self, output: Tensor, input: Tensor, bucket: str) -> Handle:
        """All-gather the equal slices of an optimizer's ``bucket`` after a step.

        ``input`` may lie in ``output``. Does not block unless ``overlap`` is off.
        """
        nbytes = (self.size - 1) * input.nbytes
        self.counters.gathered_bytes += nbytes
        self.counters.gathers += self.size > 1
        if self.size == 1 and output.data_ptr() != input.data_ptr():
            output.copy_(input)
        send, weights = self.transport.all_gather, {"": nbytes}
        return self.launch(send, (output, input), "PUBLISH", bucket, weights, "step", "publish")

    def exchange_parts(
        self,
        output: Tensor,
        input: Tensor,
        received: Sequence[int],
        sent: Sequence[int],
        unit: str,
        weight: str,
        total: int,
    ) -> Handle:
        """All-to-all: send ``sent[p]`` elements of ``input`` to rank ``p``, get ``received[p]``.

        Both tensors hold the parts of the ranks one after another; a part may be empty. No effect
        in a group of one. Does not block unless ``overlap`` is off.

        Args:
            total: bytes that all ranks send together, own parts included: the same on all ranks.
        """
        nbytes = (sum(received) - received[self.rank]) * output.itemsize
        self.counters.gathered_bytes += nbytes if self.size > 1 else 0
        self.counters.gathers += self.size > 1
        send, tensors = self.transport.exchange_parts, (output, input, received, sent)
        return self.launch(send, tensors, "MATRIX", unit, {weight: total}, "step")

    def all_reduce(self, tensor: Tensor, unit: str, weight: str = "") -> Handle:
        """All-reduce ``tensor`` in place (sum). Does not block unless ``overlap`` is off."""
        if self.size == 1:
            return self._arrived()
        nbytes = 2 * (self.size - 1) * tensor.nbytes // self.size
        send = partial(all_reduce, group=self.group, counters=self.counters)
        return self.launch(send, (tensor,), "EX", unit, {weight: nbytes}, "backward", "finish")

    def launch(
        self,
        send: Callable[..., Work | None],
        tensors: tuple[object, ...],
        kind: str,
        unit: str,
        weights: Mapping[str, int],
        phase: str,
        waits: str = "",
        each: int = 1,
    ) -> Handle:
        """Count, record and launch ``send(*tensors)``; in a group of one nothing is sent.

        Args:
            tensors: kept until the wait, since the collective reads and writes them (WP-6).
            kind, unit, phase: those of its events in the trace, one event for each weight.
            weights: names, and what other ranks send of each, in units of ``each`` bytes.
            waits: the phase of its wait, if it is not ``phase``.
        """
        weight = next(iter(weights))
        first = weight or unit
        number = self._count(first, each * sum(weights.values()))
        trace, events = self.trace, []
        if trace.enabled:
            events = [
                trace.record(kind, unit, name, phase, each * count, in_flight=True)
                for name, count in weights.items()
            ]
        if self.size == 1:
            for event in events:
                trace.finish(event)
            return self._arrived()
        comm_context = self.comm_context
        if comm_context.on_launch is not None:
            comm_context.on_launch(kind, first, phase)
        try:
            work = send(*tensors)
        except RuntimeError as error:  # another rank has closed the connection
            raise comm_context.record_failure(f"{first} ({waits or phase})", error) from error
        assert work is not None, "several ranks"
        if trace.enabled:
            work = self._stamped(work, events)
        launched = self._names, self._index, number, self.transport.tag
        handle = Handle(work, events, tensors, (), launched)
        if self._current is not None:
            handle.stream, handle.arrival = self._current(), Arrival()
        if not self.overlap:
            self.wait(handle, unit, weight, waits or phase)
        return handle

    def _count(self, weight: str, nbytes: int) -> int:
        """Count a launch, and set the tag of its messages; a launch has the same tag on all ranks.

        The tag differs between models, weights, sizes and launches: a rank that is out of step
        waits until the timeout, and never takes a message of another launch for this one's.

        Returns:
            How many there were, with this one.
        """
        comm_context, index = self.comm_context, self._index
        count = comm_context.counts[index] = comm_context.counts[index] + 1
        base = self._bases.get((weight, nbytes))
        if base is None:
            text = f"{comm_context.model} {index} {weight} {nbytes}"
            base = self._bases[weight, nbytes] = crc32(text.encode())
        self.transport.tag = tag = (base ^ count * _SPREAD) & _TAG_BITS
        comm_context.recent_tags[index].append(tag)
        return count

    def wait(self, handle: Handle, unit: str, weight: str, phase: str) -> None:
        """Wait for ``handle`` on the current stream (CPU: block).

        Later waits of the same stream return at once; each other stream is ordered once, too.

        Raises:
            CollectiveError: the collective failed; names the weight and the rank.
        """
        if handle.work is None:
            if handle.arrival is not None and self._current is not None:
                handle.arrival.order(self._current())
            return
        work, handle.work = handle.work, None
        comm_context, trace = self.comm_context, self.trace
        start = trace.now()
        comm_context.waiting = handle.launch, unit, weight, phase
        try:
            work.wait()
        except RuntimeError as error:
            raise comm_context.record_failure(f"{weight or unit} ({phase})", error) from error
        finally:
            comm_context.waiting = None
        end = trace.now()
        if trace.clock is None:  # without a call, since this is done at every wait
            trace.exposed += end - start
        else:
            trace.waited(start, end)
        if handle.arrival is not None and self._current is not None:
            handle.arrival.reached(self._current())
            self._outlive(handle)
        if trace.enabled:
            trace.record("WAIT", unit, weight, phase, start=start, end=end)
            for event in handle.events:
                trace.finish(event, end)

    def _arrived(self) -> Handle:
        """The handle of what the current stream itself has queued: nothing is to be waited for."""
        return Handle(None, arrival=None if self._current is None else Arrival(self._current()))

    def _outlive(self, handle: Handle) -> None:
        """Keep a collective's memory for a stream that waited for it but did not launch it: the
        allocator would give freed memory to the launching stream, which has not waited.
        """
        if handle.stream is None or self._current is None:
            return
        here = self._current()
        if here != handle.stream:
            for tensor in tree_leaves(handle.keep):
                tensor.record_stream(here)

    def _stamped(self, work: Work, events: list[int]) -> Work:
        """``work``, which records its end in the trace by itself, without polling (design.md 8)."""

        from internsp.base import completion  # only while a trace records

        def stamp(end: Any) -> None:
            for event in events:
                self.trace.finish(event, end)

        if self._current is not None and not self.transport.blocking_waits:
            if self._observer is None:
                self._observer = torch.Stream(self._device)
            with self._observer:  # waits for the collective; no other stream waits for this one
                work.wait()
                stamp(self.trace.now())
        elif isinstance(work, FlatGather):
            work.gather = self._stamped(work.gather, events)
        elif self.transport.direct and isinstance(work, WorkHandles):
            self._completion_thread = self._completion_thread or completion.CompletionThread()
            return self._completion_thread.watch(work, stamp)
        elif isinstance(work, dist.Work):
            completion.call_when_done(work, stamp)
        return work


@dataclass(frozen=True)
class ReplicaCollectives:
    """Collectives between the replicas of one weight axis; each has launch counts (WP-10).

    Attributes:
        replica: between all replicas (a plain loop).
        zero: over the ZeRO group, over which a ``ZeroOptimizer`` shards the gradient of a shard.
        zero_replica: between the ranks that hold the same slice of that gradient.
        publication: also over the ZeRO group, for the all-gather of new parameters.
    """

    replica: Collectives
    zero: Collectives
    zero_replica: Collectives
    publication: Collectives


def send_pairs(
    group: dist.ProcessGroup, places: Sequence[Tensor], input: Sequence[Tensor], tag: int
) -> WorkHandles:
    """Send ``input[p]`` to rank ``p``, receive its part into ``places[p]`` (gloo, host memory).

    This rank's own part is not copied.

    Args:
        tag: the launch's (:meth:`Collectives.launch`), the same on all ranks: ranks that are out of
            step wait until the timeout instead of taking one weight for another (WP-2).
    """
    rank, size = group.rank(), group.size()
    works: list[Work] = []
    for peer in range(rank - 1, rank - size, -1):  # from the ranks before this one first
        works.append(group.recv([places[peer % size]], peer % size, tag))
    for peer in range(rank + 1, rank + size):
        works.append(group.send([input[peer % size]], peer % size, tag))
    return WorkHandles(works, group)


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, counters: Counters | None = None
) -> dist.Work | None:
    """Sum ``tensor`` over ``group`` in place, asynchronously; ``None`` for a group of one."""
    size = dist.get_world_size(group)
    if size == 1:
        return None
    if counters is not None:
        counters.reduced_bytes += 2 * (size - 1) * tensor.numel() * tensor.element_size() // size
        counters.reductions += 1
    return dist.all_reduce(tensor, group=group, async_op=True)


def gather_slices(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """All-gather equal 1-D slices asynchronously, uncounted; ``None`` for a group of one.

    For reads of an optimizer's slices between two passes, not for its step.
    """
    if dist.get_world_size(group) == 1:
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return None
    # torch 2.13 renames the call; 2.11 and 2.12 have only the old name.
    gather: Callable[..., dist.Work]
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return gather(output, input, group=group, async_op=True)
