"""``WPCommunicator``: what a parallel layer asks of weight communication (InternEvo's interface).

:class:`UnitCommunicator` implements it over one chunk's :class:`ChunkState`; head, embedding and
transformer blocks differ in which units they own and when they gather them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.mesh import WeightAxis
from internsp.trace import Trace
from internsp.wp.codec import Codec
from internsp.wp.collectives import Collectives, Counters, Handle
from internsp.wp.pending import Born, PendingGradients, Split
from internsp.wp.pool import MemoryPool, Slot, Unit
from internsp.wp.schedule import BACKWARD, FORWARD, RECOMPUTE, Policy
from internsp.wp.shard import ShardedWeight, Tag, stale


def in_backward() -> bool:
    """Whether an autograd graph task runs on this thread: the phase, from where we are (WP-9)."""
    return torch._C._current_graph_task_id() != -1


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's output, through tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, (dict, Mapping)):  # the first answers at once
        for item in value.values():
            yield from tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors(getattr(value, name))


def _alike(one: ShardedWeight, other: ShardedWeight) -> bool:
    """Whether small weights may share a gather: gloo's coalesced one takes the first's dtype."""
    return one.axis is other.axis and one.compute_dtype == other.compute_dtype


class WPCommunicator(ABC):
    """Gathers weights and reduces their gradients on behalf of layers.

    ``mode`` says what travels: ``"weight"`` for all implementations of this project.
    """

    mode: str = "weight"

    @abstractmethod
    def weight_hook(self, unit: Unit, weight: ShardedWeight) -> Tensor:
        """The whole weight, for use now. Waits for this weight's gather only."""

    @abstractmethod
    def release_hook(self, unit: Unit, weight: ShardedWeight) -> None:
        """The layer's forward is over."""

    @abstractmethod
    def backward_hook(self, unit: Unit, weight: ShardedWeight, tag: Tag) -> None:
        """The layer's backward is about to run with the view that carried ``tag``."""

    @abstractmethod
    def gradient_hook(self, unit: Unit, weight: ShardedWeight, gradient: Tensor) -> None:
        """The whole gradient is born: start its reduction. Never blocks on that reduction."""


@dataclass
class ChunkState:
    """What the communicators of one model chunk share (WP-8: an object that is passed in).

    Attributes:
        collectives: of the dense axis; waits, ledger and trace are the same for every axis.
        gathers: of each axis, ``collectives`` among them.
    """

    collectives: Collectives
    gathers: Mapping[WeightAxis, Collectives]
    pool: MemoryPool
    pending: PendingGradients
    policy: Policy
    counters: Counters
    trace: Trace
    codec: Codec | None = None
    """Codes the weights of blocks for their gathers, where asked for."""
    handles: dict[ShardedWeight, Handle] = field(default_factory=dict)
    touched: dict[ShardedWeight, bool] = field(default_factory=dict)
    """Weights with a reduction in this backward, in launch order; whether this rank had a birth."""
    split: Split | None = None
    """The part of a backward that runs, where a pipeline schedule computes it in two."""
    began: Callable[[], None] = lambda: None
    """Called at each birth: no output of the model may have shown that a backward runs."""

    def arrived(self, weight: ShardedWeight) -> None:
        """A gather of ``weight`` was waited for: what came coded is decoded into its slot."""
        if self.codec is not None and weight in self.codec.coded:
            self.codec.arrived(weight)


class WeightSite:
    """One module's use of one sharded weight (:class:`internsp.layers.access.Site`)."""

    guarded = True

    def __init__(self, communicator: UnitCommunicator, unit: Unit, weight: ShardedWeight) -> None:
        self.communicator = communicator
        self.unit = unit
        self.weight = weight
        self.parameter = weight.parameter
        self.tag: Tag = (-1, weight.compute_dtype)

    @property
    def name(self) -> str:
        """The weight's."""
        return self.weight.name

    def acquire(self) -> Tensor:
        """See :meth:`WPCommunicator.weight_hook`."""
        tensor = self.communicator.weight_hook(self.unit, self.weight)
        self.tag = self.communicator.shown(self.unit, self.weight)
        return tensor

    def release(self) -> None:
        """See :meth:`WPCommunicator.release_hook`."""
        self.communicator.release_hook(self.unit, self.weight)

    @property
    def apart(self) -> bool:
        """Whether the weight part of a split backward runs."""
        split = self.communicator.state.split
        return split is not None and split.weights

    def before_backward(self, tag: Tag) -> None:
        """See :meth:`WPCommunicator.backward_hook`; a weight part needs no weight."""
        split = self.communicator.state.split
        if split is None or not split.weights:
            self.communicator.backward_hook(self.unit, self.weight, tag)

    def before_nodes(self, tag: Tag) -> None:
        """See :meth:`UnitCommunicator.nodes_hook`; a weight part needs no weight."""
        split = self.communicator.state.split
        if split is None or not split.weights:
            self.communicator.nodes_hook(self.unit, self.weight, tag)

    def at_hand(self) -> bool:
        """In backward: whether the weight may be used without a message of this rank alone."""
        return self.weight.resident or self.communicator.at_hand(self.unit, self.weight)

    def spoiled(self) -> None:
        """A forward wrote into the whole weight: gather it anew."""
        self.weight.invalidate()

    def born(self, gradient: Tensor, tag: Tag) -> None:
        """See :meth:`WPCommunicator.gradient_hook`."""
        split = self.communicator.state.split
        if split is None:
            self.communicator.gradient_hook(self.unit, self.weight, gradient)
            return
        self.communicator.restore(self.weight, tag)
        split.born(self.unit, self.weight, gradient)


class UnitCommunicator(WPCommunicator):
    """Gathers, uses and frees the weights of units; starts their reductions."""

    def __init__(self, state: ChunkState) -> None:
        self.state = state

    def fetch(self, unit: Unit, weights: Sequence[ShardedWeight], phase: str) -> None:
        """Launch the gathers of those of ``weights`` whose right values are not in the slot.

        Does not block. Leases the slot (WP-4); what is there with the right tag is not gathered
        again (WP-11).
        """
        state = self.state
        moving = [w for w in weights if not w.resident]
        if not moving:
            return
        slot = self._lease(unit, moving, phase)
        together: list[ShardedWeight] = []  # small weights next to each other: one launch
        last = False
        for weight in moving:
            tag = weight.tag()
            if slot.tags.get(weight) == tag:
                continue
            if weight in state.handles:  # an older version is still arriving at the same place
                self.await_gather(unit, weight, phase)
            slot.tags[weight] = tag
            small = state.policy.small(weight.slot_nbytes) and weight.layout.size > 1
            if together and not (small and last and _alike(together[0], weight)):
                self._gather(unit, slot, together, phase)
                together = []
            together.append(weight)
            last = small
        if together:
            self._gather(unit, slot, together, phase)

    def _lease(self, unit: Unit, weights: Sequence[ShardedWeight], purpose: str) -> Slot:
        """Take the right to fill the places of ``weights``: here the unit's whole slot (WP-4)."""
        slot = self.state.pool.slots[unit.slot]
        if slot.owner is not None and slot.owner is not unit:
            self.settle(slot.owner)
        return self.state.pool.lease(unit, purpose)

    def _gather(self, unit: Unit, slot: Slot, weights: list[ShardedWeight], phase: str) -> None:
        slot.streams.before_overwrite(*weights)
        outputs = [slot.flat(unit, w) for w in weights]
        state, codec = self.state, self.state.codec
        collectives = state.gathers[weights[0].axis]
        if codec is not None and weights[0] in codec.coded:  # a large one: it travels by itself
            received, sent = codec.encode(weights[0], outputs[0], slot.streams)
            handle = collectives.gather(received, sent, unit.name, weights[0].name, phase)
            if handle.done:
                state.arrived(weights[0])
        elif len(weights) == 1:
            shard, name = weights[0].to_send(), weights[0].name
            handle = collectives.gather(outputs[0], shard, unit.name, name, phase)
        else:
            shards = [w.to_send() for w in weights]
            names = [w.name for w in weights]
            handle = collectives.gather_together(outputs, shards, unit.name, names, phase)
        if not handle.done:
            handle.carries = weights
            state.handles.update(dict.fromkeys(weights, handle))

    def settle(self, unit: Unit) -> None:
        """Wait for gathers of ``unit`` that nobody used: its slot is about to be overwritten."""
        for weight in unit.weights:
            self.await_gather(unit, weight, "settle")

    def weight_hook(self, unit: Unit, weight: ShardedWeight) -> Tensor:
        """See :meth:`WPCommunicator.weight_hook`."""
        if weight.autocasts:
            weight.follow_autocast()
        self._present(unit, weight, RECOMPUTE if in_backward() else FORWARD)
        return self.view(unit, weight)

    def release_hook(self, unit: Unit, weight: ShardedWeight) -> None:
        """See :meth:`WPCommunicator.release_hook`."""
        trace = self.state.trace
        if trace.enabled and not in_backward():
            trace.record("FREE", unit.name, weight.name, FORWARD)
        self.used(unit)

    def backward_hook(self, unit: Unit, weight: ShardedWeight, tag: Tag) -> None:
        """See :meth:`WPCommunicator.backward_hook`."""
        self.restore(weight, tag)
        self._present(unit, weight, BACKWARD)

    def nodes_hook(self, unit: Unit, weight: ShardedWeight, tag: Tag) -> None:
        """:meth:`backward_hook` for nodes of any kind, which may read the weight by themselves."""
        self.backward_hook(unit, weight, tag)

    def at_hand(self, unit: Unit, weight: ShardedWeight) -> bool:
        """In backward: whether a use of ``weight`` is in step with the other ranks."""
        return self.state.pool.slots[unit.slot].tags.get(weight) == weight.tag()

    def restore(self, weight: ShardedWeight, tag: Tag) -> None:
        """What the view with ``tag`` showed is to be shown again: check that it can (WP-14)."""
        version, weight.compute_dtype = tag
        if version != weight.version():
            raise stale(weight.name, dist.get_rank())

    def gradient_hook(self, unit: Unit, weight: ShardedWeight, gradient: Tensor) -> None:
        """See :meth:`WPCommunicator.gradient_hook`."""
        self.state.began()
        self.reduce(unit, weight, gradient)
        self.used(unit)

    def reduce(self, unit: Unit, weight: ShardedWeight, gradient: Tensor | None) -> None:
        """Launch one reduction; ``None`` stands for zeros, so that ranks stay in step (WP-2)."""
        self.reduce_all(unit, ((weight, gradient),))

    def reduce_all(self, unit: Unit, born: Sequence[Born]) -> None:
        """:meth:`reduce` for several weights of a unit, in that order."""
        state = self.state
        for weight, gradient in born:
            state.pending.launch(unit, weight, gradient)
            state.touched[weight] = gradient is not None or state.touched.get(weight, False)
            if state.trace.enabled:
                state.trace.record("FREE", unit.name, weight.name, BACKWARD)

    def used(self, unit: Unit) -> None:
        """A use of a unit outside the blocks has ended: nobody holds its slot."""
        self.state.pool.slots[unit.slot].release(unit)

    def view(self, unit: Unit, weight: ShardedWeight) -> Tensor:
        """The whole weight, aliasing its slot (or its storage where no gather is needed)."""
        if weight.resident:
            # Under a version counter of its own, and for autograd no view of anything.
            return weight.layout.whole_view(weight.to_send()).data
        return self.state.pool.slots[unit.slot].whole(unit, weight)

    def shown(self, unit: Unit, weight: ShardedWeight) -> Tag:
        """The tag of what :meth:`view` shows."""
        if weight.resident:
            return weight.tag()
        return self.state.pool.slots[unit.slot].tags[weight]

    def verified(self, unit: Unit, weight: ShardedWeight) -> bool:
        """Whether the slot is known to hold, or to be getting, the right values."""
        slot = self.state.pool.slots[unit.slot]
        return slot.holder is unit and slot.tags.get(weight) == weight.tag()

    def follow(self, unit: Unit, weight: ShardedWeight, phase: str) -> None:
        """With prefetch per module: launch what comes after ``weight``. Blocks override it."""

    def _present(self, unit: Unit, weight: ShardedWeight, phase: str) -> None:
        state = self.state
        if not self.verified(unit, weight):
            self.fetch(unit, (weight,), phase)
        if weight in state.handles:
            self.await_gather(unit, weight, phase)
        if not weight.resident:
            state.pool.slots[unit.slot].streams.read(weight)
        if state.trace.enabled:
            state.trace.record("USE", unit.name, weight.name, phase)
        self.follow(unit, weight, phase)

    def await_gather(self, unit: Unit, weight: ShardedWeight, phase: str) -> None:
        """Wait for what ``weight``'s last gather brings, once; others may come with it."""
        handle = self.state.handles.get(weight)
        if handle is not None:
            for other in handle.carries:
                self.state.handles.pop(other, None)
            self.state.collectives.wait(handle, unit.name, weight.name, phase)
            self.state.arrived(weight)


class OuterCommunicator(UnitCommunicator):
    """A unit beside the blocks, which a rank's data may leave idle.

    So that all ranks send the same messages all the same (WP-2), it is gathered at the model's
    entry, used or not, and reduced at the end of backward, with zeros where nothing was born.
    """

    def __init__(self, state: ChunkState, unit: Unit) -> None:
        super().__init__(state)
        self.unit = unit
        self._born: dict[ShardedWeight, Tensor] = {}

    def prefetch(self) -> None:
        """Launch the gather, if the slot does not hold the right values already (WP-11)."""
        self.fetch(self.unit, self.unit.weights, FORWARD)

    def gradient_hook(self, unit: Unit, weight: ShardedWeight, gradient: Tensor) -> None:
        """Keep the gradient until :meth:`flush`."""
        self.state.began()
        born = self._born.get(weight)
        self._born[weight] = gradient if born is None else born + gradient
        self.used(unit)

    def flush(self) -> None:
        """Launch the reductions: backward is over."""
        for weight in self.unit.weights:
            if weight.requires_grad:
                self.reduce(self.unit, weight, self._born.pop(weight, None))

    def forget(self) -> None:
        """After a failure."""
        self._born.clear()
