"""Performs the actions that the gather queue returns: their only interpreter at run time (WP-2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from torch import Tensor

from internsp.base.host import CopyHandle, HostLink, HostPool
from internsp.base.trace import Trace
from internsp.mesh import WeightAxis
from internsp.schedule import terms
from internsp.schedule.queue import GatherQueue
from internsp.schedule.terms import (
    ACCUMULATE,
    ALL_GATHER,
    EXCHANGE,
    FINISH_EXCHANGE,
    FINISH_OLDEST,
    FREE,
    GO_ON,
    NEAR_GATHER,
    NEXT_PASS,
    REDUCE_SCATTER,
    USE,
    WAIT,
    Action,
    runs_of,
)
from internsp.wp.accumulation import Accumulation
from internsp.wp.collectives import Collectives, Handle, ReplicaCollectives
from internsp.wp.consumer import GradientConsumer
from internsp.wp.parameter import ShardedParameter
from internsp.wp.reduce import GradientReducer
from internsp.wp.slots import MemoryPool, Slot, Units

if TYPE_CHECKING:  # loaded where a model uses them
    from internsp.wp.encode import Encoder
    from internsp.wp.near import NearSlices

Weights = Sequence[ShardedParameter]


@dataclass
class Chunk:
    """The parts that the communicators of one model chunk share (WP-8: an object passed in).

    Attributes:
        units: the units of the chunk.
        collectives: of the dense axis; they also wait for collectives of the other axes, which have
            the same ``CommContext`` and trace.
        gathers: the collectives of each axis, ``collectives`` among them.
        between: the collectives between replicas, of each axis.
        pool: the slots.
        reducer: carries out reductions.
        queue: decides which actions follow from an event.
        consumer: takes reduced gradients: a plain loop, or an optimizer.
        link: copies offloaded tensors to and from the host; ``None`` if none are offloaded.
        activations: host memory of offloaded activations; ``None`` if none are offloaded.
        handles: for each weight whose gather is in flight, its work handle.
        near: slices of blocks' weights within near groups, if configured.
        encoder: quantizes or packs weights for their all-gathers, if configured.
        streams: whether the device has streams, so that each ``USE`` is reported to
            :class:`internsp.wp.slots.SlotStreams`.
        accumulation: where the pass that runs stands among the micro-batches of a step.
    """

    units: Units
    collectives: Collectives
    gathers: Mapping[WeightAxis, Collectives]
    between: Mapping[WeightAxis, ReplicaCollectives]
    pool: MemoryPool
    reducer: GradientReducer
    queue: GatherQueue[ShardedParameter]
    trace: Trace
    consumer: GradientConsumer = field(init=False)
    encoder: Encoder | None = None
    link: HostLink | None = None
    activations: HostPool | None = None
    near: NearSlices | None = None
    streams: bool = field(init=False)
    accumulation: Accumulation = field(init=False)
    handles: dict[ShardedParameter, Handle] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.streams = any(slot.streams.active for slot in self.pool.slots)
        self.accumulation = Accumulation(self.queue.reductions)

    def attach(self, consumer: GradientConsumer) -> None:
        """Let ``consumer`` take what is reduced from now on."""
        self.consumer = consumer
        self.declare_exchanges()

    def declare_exchanges(self) -> None:
        """Declare the exchanges of the consumer's parcels, in the place of those before."""
        self.finish_reductions()  # those in flight precede the parcels declared below
        self.queue.reductions.exchanges.declare(self.consumer.parcels, self.consumer.limit)

    def perform(self, actions: Iterable[Action[ShardedParameter]]) -> None:
        """Perform ``actions`` in order."""
        for action in actions:
            kind = action.kind
            if self.streams and kind in _IN_TURN:
                self.reducer.take_turn()
            if kind in _REDUCED_BY:
                _REDUCED_BY[kind](self.reducer)(action.weights)
            elif kind != FREE or self.trace.enabled:  # nothing is done, only a trace shows it
                _PERFORMED_BY[kind](self, action)

    def invalidate_older(self, unit: terms.Unit[ShardedParameter]) -> None:
        """Drop the contents of weights of ``unit`` that were written since they were gathered.

        For a part of the model that the program calls itself. This rank's versions decide.
        """
        self.queue.slots.invalidate(
            weight for weight in unit.weights if weight.used_version != weight.current_version()
        )

    def wait_for_gathers(self) -> None:
        """Wait for all gathers in flight: the shards that they read are about to be written."""
        self.perform(self.queue.slots.wait_for_gathers())

    def invalidate_slots(self) -> None:
        """Wait for gathers in flight, and drop the contents of all slots."""
        self.wait_for_gathers()
        self.queue.slots.invalidate_contents()
        self.queue.backward.end_pass()

    def finish_reductions(self, last: bool = False) -> None:
        """Wait for every reduction in flight; ``last``: see :meth:`Reductions.finish`."""
        self.perform(self.queue.reductions.finish(last))

    def complete_gradients(self) -> None:
        """Wait for every reduction in flight, and for all exchanges between replicas."""
        self.perform(self.queue.reductions.complete())

    def reduce_accumulated(self) -> None:
        """Reduce accumulated sums that no backward has reduced, in the order of accumulation."""
        for unit, weight in self.reducer.unsharded_sums:
            self.perform(self.queue.reduce(unit, weight))

    def _record(self, action: Action[ShardedParameter]) -> None:
        if self.trace.enabled:
            for weight in action.weights:
                self.trace.record(action.kind, weight.unit.name, weight.name, action.phase)

    def _use(self, action: Action[ShardedParameter]) -> None:
        weights = action.weights
        if weights[0].needs_gather:
            streams = self.pool.slots[weights[0].unit.slot].streams
            if streams.active:
                streams.read(*weights)
        self._record(action)

    def _next_pass(self, action: Action[ShardedParameter]) -> None:
        self.accumulation.at_next_pass()

    def _exchange(self, action: Action[ShardedParameter]) -> None:
        if action.parcel is not None:
            self.consumer.start(action.parcel)
        else:
            self.consumer.finish_oldest()

    def _gather(self, action: Action[ShardedParameter]) -> None:
        if self.link is not None and action.kind == ALL_GATHER and action.weights[0].hosted:
            with self.link.on_copy_stream():
                self._all_gather(action)
        else:
            self._all_gather(action)

    def _all_gather(self, action: Action[ShardedParameter]) -> None:
        kind, phase, _, weights, evicted, _ = action
        unit = weights[0].unit
        slot = self.pool.slots[unit.slot]
        self._acquire(slot, weights, evicted)
        runs = runs_of(weights, attrgetter("compute_dtype")) if len(weights) > 1 else [weights]
        for run in runs:
            collectives, copied = self.gathers[run[0].axis], None
            near = self.near if kind == NEAR_GATHER else None
            if near is not None:
                collectives = near.collectives(run[0])
            outputs: list[Tensor] = []
            shards: list[Tensor] = []
            names: list[str] = []
            for weight in run:
                output = weight.in_slot.flat
                if near is not None:
                    shard = near.slice_of(weight)
                elif self.encoder is not None and weight.encoding is not None:
                    weight.used_version = weight.current_version()
                    shard = weight.fresh()
                    if self.link is not None and weight.hosted:
                        shard = self.link.copy_to_staging(shard)
                    output, shard = self.encoder.encode(weight, shard)
                elif self.link is not None and weight.hosted:
                    weight.used_version = weight.current_version()
                    shard, copied = self._from_host(self.link, weight, output)
                else:
                    shard = weight.to_send()
                outputs.append(output)
                shards.append(shard)
                names.append(weight.name)
            if self.near is not None and near is None:
                self.near.add_in_flight(run)
            handle = collectives.all_gather(outputs, shards, unit.name, names, phase)
            if copied is not None and collectives.size == 1:
                handle.work = copied  # only the copy is to be waited for
            if handle.arrival is not None:
                slot.streams.filled_by(handle.arrival, run)
            if handle.work is None:
                self._arrived(run)
            else:
                handle.carries = run
                for weight in run:
                    self.handles[weight] = handle

    def _acquire(self, slot: Slot, weights: Weights, evicted: Weights) -> None:
        """Prepare the bytes of ``weights``, if more is to be done than to find their views."""
        for weight in evicted:
            weight.used_version = None
        for weight in weights:
            views = slot.views.get((weight, weight.compute_dtype))
            if views is None or not slot.plain or self.pool.poison:
                slot.acquire(weight.unit, weights, evicted, self.pool.poison)
                return
            weight.in_slot = views

    def _from_host(
        self, link: HostLink, weight: ShardedParameter, output: Tensor
    ) -> tuple[Tensor, CopyHandle]:
        """Copy an offloaded shard to this rank's part of ``output``, from where a gather sends it.

        Returns:
            That part, and the handle of the copy.
        """
        size, shard = weight.layout.size, weight.fresh()
        part = output.view(size, -1)[weight.rank] if size > 1 else output
        if shard.dtype == part.dtype:
            copied = link.copy_to_device([(part, shard)])
        else:
            part.copy_(link.copy_to_staging(shard))
            copied = link.record_event()
        if size > 1:
            copied.wait()
        return part, copied

    def _wait(self, action: Action[ShardedParameter]) -> None:
        name = action.unit.name if action.unit is not None else ""
        for weight in action.others:
            handle = self.handles.pop(weight, None)
            if handle is not None:
                for other in handle.carries:
                    self.handles.pop(other, None)
                self.collectives.wait(handle, name, action.weights[0].name, action.phase)
                if self.encoder is not None or self.near is not None:
                    self._arrived(handle.carries)

    def _arrived(self, weights: Sequence[ShardedParameter]) -> None:
        """After the wait for a gather: decode into the slot; keep slices for near groups."""
        weight = weights[0]
        # A gather within the near group moves slices of what was decoded before.
        far = self.near is None or self.near.from_whole_group(weight)
        if far and self.encoder is not None and weight.encoding is not None:
            self.encoder.decode(weight, self.pool.slots[weight.unit.slot].streams)
        if self.near is not None:
            self.near.save_slices(weights)


_PERFORMED_BY: Mapping[str, Callable[[Chunk, Action[ShardedParameter]], None]] = {
    ALL_GATHER: Chunk._gather,
    NEAR_GATHER: Chunk._gather,
    WAIT: Chunk._wait,
    USE: Chunk._use,
    FREE: Chunk._record,
    NEXT_PASS: Chunk._next_pass,
    EXCHANGE: Chunk._exchange,
    FINISH_EXCHANGE: Chunk._exchange,
}
"""What performs each kind of action."""

_REDUCED_BY: Mapping[str, Callable[[GradientReducer], Callable[[Weights], None]]] = {
    REDUCE_SCATTER: attrgetter("reduce_scatter"),
    ACCUMULATE: attrgetter("accumulate"),
    FINISH_OLDEST: attrgetter("finish_oldest"),
    GO_ON: attrgetter("go_on"),
}
"""What the reducer does for each kind of action, with its weights."""
_IN_TURN = {*_REDUCED_BY, EXCHANGE, FINISH_EXCHANGE}  # on streams, each after the one before
