"""How a block's weights travel: the communicator of a chunk's transformer blocks.

It owns the chunk's state from forward's entry to the end of backward. *When* its methods are
called is :mod:`internsp.wp.prefetch`'s business; *what* is gathered then is decided by
:class:`internsp.wp.schedule.Policy`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.errors import CollectiveError, OrderError
from internsp.mesh import ParallelMesh
from internsp.wp.collectives import all_meet, all_reduce, default_store
from internsp.wp.communicator import ChunkState, UnitCommunicator
from internsp.wp.embedding import EmbeddingWeightParallelCommunicator
from internsp.wp.head import HeadWeightParallelCommunicator
from internsp.wp.pool import Unit
from internsp.wp.replicated import ReplicatedParameter, SmallParameters
from internsp.wp.schedule import BACKWARD, FORWARD, RECOMPUTE, ChunkPlan
from internsp.wp.shard import ShardedWeight

MEET_SECONDS = 5.0  # how long a rank waits for the others to report the same failure


class ISPCommunicator(UnitCommunicator):
    """Weights of a chunk's transformer blocks, and the end of its backward.

    Attributes:
        blocks: units in the declared order.
        small: replicated parameters.
        head, embedding: communicators beside this one, or ``None``.
        others: units of large weights that belong to none of these.
    """

    def __init__(
        self,
        state: ChunkState,
        mesh: ParallelMesh,
        blocks: list[Unit],
        small: SmallParameters,
        strict_order: bool = True,
        mean: bool = False,
    ) -> None:
        super().__init__(state)
        self.mesh = mesh
        self.blocks = blocks
        self.small = small
        self.strict_order = strict_order
        self.mean = mean
        self.head: HeadWeightParallelCommunicator | None = None
        self.embedding: EmbeddingWeightParallelCommunicator | None = None
        self.others: list[UnitCommunicator] = []
        self.prefetcher: object | None = None
        self.plan: ChunkPlan | None = None
        self.collects_itself = True  # false once a ZeroOptimizer drains instead (WP-9)
        self.after_backward: list[Callable[[], None]] = []
        self.after_rest: list[Callable[[], None]] = []  # who holds sums of its own forgets them
        self._next = 0
        self._forward_open = False
        self._backward_task = -1
        self._recomputed: set[Unit] = set()  # in this backward
        self._open: list[Unit] = []  # units whose backward has begun, in that order
        self._held: dict[Unit, dict[ShardedWeight, Tensor]] = {}
        self._waiting: dict[Unit, list[ShardedWeight]] = {}
        self._broken: str | None = None
        self._failures = 0
        self.cause = ""
        name = [uuid.uuid4().hex if dist.get_rank(mesh.stage_group) == 0 else ""]
        dist.broadcast_object_list(name, group=mesh.stage_group, group_src=0)
        self._name = name[0]

    # forward

    def begin_forward(self) -> None:
        """The model is entered: recover from a failed pass, launch the first gathers."""
        self.recover()
        self._forward_open = True
        self._next = 0
        self._autocast()
        if self.embedding is not None:
            self.embedding.prefetch()
        if self.blocks:
            self._fetch_first(self.blocks[0], FORWARD)

    def recover(self) -> None:
        """No effect unless a pass has failed: then rest, or raise the first cause (WP-10)."""
        if self._broken:
            raise CollectiveError(self._broken)
        if self._forward_open or self._backward_task >= 0:
            self._recover()

    def end_forward(self) -> None:
        """The model's forward is over."""
        self._forward_open = False
        if self.strict_order and self.blocks and self._next != len(self.blocks):
            raise OrderError(
                f"only {self._next} of {len(self.blocks)} blocks ran in this forward on rank "
                f"{self.mesh.rank}: the next in order was {self.blocks[self._next].name}. "
                "Set weight_parallel.unexpected_order = 'gather' for models that skip blocks"
            )

    def enter_block(self, unit: Unit) -> None:
        """A block's forward or recompute begins."""
        if in_recompute := self._recomputing():
            self.enter_backward(unit)
        else:
            self._check_order(unit)
        self._fetch_first(unit, RECOMPUTE if in_recompute else FORWARD)

    def leave_block(self, unit: Unit) -> None:
        """A block's forward is over: its slot may be overwritten. Not called in recompute."""
        self.state.pool.slots[unit.slot].release(unit)

    def reach_anchor(self, unit: Unit) -> None:
        """The trigger inside a block fires: gather what comes next."""
        if self._recomputing():
            self._ahead(unit.block, RECOMPUTE)
        else:
            self._ahead(unit.block, FORWARD)

    # backward

    def begin_backward(self) -> None:
        """A gradient entered the model from outside; idempotent within one backward.

        Queues the end-of-backward callback, from the outermost graph task (WP-9).
        """
        task = torch._C._current_graph_task_id()
        if task == self._backward_task:
            return
        if self._broken:
            raise CollectiveError(self._broken)
        if self._backward_task >= 0 and not self._nested:
            self._recover()  # the backward before this one never ended
        self._backward_task = task
        self._nested = False
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    _nested = False

    def expect_last_block(self) -> None:
        """Backward enters at the model's output: the last block comes first (usually there)."""
        if self.blocks and not self.state.policy.per_module and not self._open:
            self._fetch_first(self.blocks[-1], BACKWARD)

    def enter_backward(self, unit: Unit) -> None:
        """The gradient of a block's output has arrived (or its recompute begins)."""
        if self._open and self._open[-1] is unit:
            return
        for other in self._open:
            self._finish(other)
        self._open = [unit]
        self._waiting[unit] = [w for w in reversed(unit.weights) if w.requires_grad]
        self._held[unit] = {}
        self._fetch_first(unit, BACKWARD)
        if not unit.recomputed:
            self._ahead(unit.block, BACKWARD)

    def backward_hook(self, unit: Unit, weight: ShardedWeight, tag: int) -> None:
        """A recomputed block waits in its recompute, and only there: one gather serves both.

        torch's non-reentrant form fires the hook of the block's last layer before it recomputes;
        waiting here would hold the recompute's first layer up for the whole block.
        """
        if not unit.recomputed or weight.tag() != tag:
            super().backward_hook(unit, weight, tag)
        elif unit in self._recomputed and not weight.resident:
            if self.state.pool.slots[unit.slot].tags.get(weight) != weight.tag():
                super().backward_hook(unit, weight, weight.tag())

    def weight_hook(self, unit: Unit, weight: ShardedWeight) -> Tensor:
        """See :meth:`WPCommunicator.weight_hook`."""
        if unit.recomputed and self._recomputing():
            self._recomputed.add(unit)
        return super().weight_hook(unit, weight)

    def gradient_hook(self, unit: Unit, weight: ShardedWeight, gradient: Tensor) -> None:
        """Launch reductions in the declared order: a birth waits for those before it (WP-2)."""
        self._ensure_callback()
        waiting = self._waiting.get(unit)
        if waiting is None or weight not in waiting:
            self.reduce(unit, weight, gradient)
            return
        held = self._held[unit]
        held[weight] = gradient if weight not in held else held[weight] + gradient
        while waiting and waiting[0] in held:
            first = waiting.pop(0)
            self.reduce(unit, first, held.pop(first))

    def used(self, unit: Unit) -> None:
        """Blocks give their slot back as a whole, in ``leave_block`` or ``_finish``."""

    def end_backward(self) -> None:
        """The outermost backward returns: everything born is launched; drain it (WP-9)."""
        for unit in self._open:
            self._finish(unit)
        self._open.clear()
        self.state.pool.release_all()
        self._backward_task = -1
        if self.collects_itself:
            self.collect()
        for callback in self.after_backward:
            callback()

    def collect(self) -> None:
        """Drain all reductions and complete ``.grad`` of every parameter. Blocks."""
        state = self.state
        state.pending.drain()
        weights = list(state.touched)
        self.small.flag(state.touched)
        works = [self.small.reduce(self.mesh.stage_group, state.counters)]
        works += [
            all_reduce(w.partial, self.mesh.replica_group, state.counters)
            for w in weights
            if w.partial is not None and self.mesh.replicas > 1
        ]
        for work in works:
            if work is not None:
                work.wait()
        used_small, used_sharded = self.small.used()
        ranks = self.mesh.shape.stage_size
        values = self.small.values()
        for member, used, value in zip(self.small.members, used_small, values, strict=True):
            if used and member.requires_grad:
                _accumulate(member, value.div_(ranks) if self.mean else value)
        for weight, used in zip(self.small.sharded, used_sharded, strict=True):
            if used and weight.partial is not None:
                _accumulate(weight, weight.partial.div_(ranks) if self.mean else weight.partial)
            weight.partial = None
        self.small.reset()
        state.touched.clear()

    def invalidate(self) -> None:
        """Weights were written behind autograd's back (`.data`): gather them anew (WP-11)."""
        for weight in self.small.sharded:
            weight.invalidate()

    def publish(self) -> None:
        """Wait until every shard is what the optimizer made of it (WP-3)."""
        for member in (*self.small.members, *self.small.sharded):
            if member.ready is not None:
                ready, member.ready = member.ready, None
                ready.wait()

    # inside

    def follow(self, unit: Unit, weight: ShardedWeight, phase: str) -> None:
        policy = self.state.policy
        if not policy.per_module:
            return
        order = policy.order(unit.weights, phase, unit.recomputed)
        step = policy.follow(
            order.index(weight), len(order), unit.block, phase, unit.recomputed
        )
        if step is None:
            return
        kind, index = step
        if kind == "weight":
            self.fetch(unit, (order[index],), phase)
        elif index == len(self.blocks):
            if self.head is not None:
                self.head.prefetch()
        elif self._may_lease(self.blocks[index]):
            self._fetch_first(self.blocks[index], FORWARD if phase == FORWARD else BACKWARD)

    def _fetch_first(self, unit: Unit, phase: str) -> None:
        """At a unit's entry: all of it, or its first weight with prefetch per module."""
        order = self.state.policy.order(unit.weights, phase, unit.recomputed)
        self.fetch(unit, order[:1] if self.state.policy.per_module else order, phase)

    def _ahead(self, block: int, phase: str) -> None:
        for target in self.state.policy.ahead(block, phase):
            if target == len(self.blocks):
                if self.head is not None:
                    self.head.prefetch()
            elif self._may_lease(self.blocks[target]):
                unit, then = self.blocks[target], FORWARD if phase == FORWARD else BACKWARD
                order = self.state.policy.order(unit.weights, then, unit.recomputed)
                self.fetch(unit, order, then)

    def _may_lease(self, unit: Unit) -> bool:
        """Where another order is allowed, a prefetch gives way instead of failing (WP-2)."""
        holder = self.state.pool.slots[unit.slot].holder
        return self.strict_order or holder is None or holder is unit

    def _recomputing(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def _check_order(self, unit: Unit) -> None:
        if self.strict_order and unit.block != self._next:
            expected = self.blocks[self._next].name if self._next < len(self.blocks) else "the end"
            raise OrderError(
                f"block {unit.name} ran on rank {self.mesh.rank} where {expected} was expected: "
                "the prefetch order would be wrong. Declare the blocks in the order in which they "
                "run (weight_parallel.blocks), or set weight_parallel.unexpected_order = 'gather'"
            )
        if not self.strict_order:
            slot = self.state.pool.slots[unit.slot]
            if slot.holder is not None and slot.holder is not unit:
                slot.release(slot.holder)  # a prefetch for a block that did not come next
        self._next = unit.block + 1

    def _finish(self, unit: Unit) -> None:
        """A unit's backward is over: weights without a gradient take their place with zeros."""
        waiting, held = self._waiting.pop(unit, []), self._held.pop(unit, {})
        self._recomputed.discard(unit)
        trained = [w for w in unit.weights if w.requires_grad]
        if len(waiting) < len(trained) or held:
            for weight in waiting:
                self.reduce(unit, weight, held.get(weight))
        self.state.pool.slots[unit.slot].release(unit)

    def _ensure_callback(self) -> None:
        """A gradient was born though no output of the model was hooked: drain at this task's end.

        Under reentrant checkpointing that task is an inner one: early, but complete.
        """
        if self._backward_task < 0:
            self._backward_task = torch._C._current_graph_task_id()
            self._nested = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def _autocast(self) -> None:
        """Under autocast a linear layer's weight travels in autocast's dtype (WP-1)."""
        device = self.mesh.device.type
        active = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if active else None
        for weight in self.small.sharded:
            if weight.autocasts and weight.base_compute_dtype == torch.float32:
                weight.compute_dtype = dtype or weight.base_compute_dtype

    def _recover(self) -> None:
        """After an exception: rest, if all ranks met it; else abort the groups (WP-10)."""
        self._failures += 1
        ranks = self.mesh.shape.ranks("stage")[self.mesh.pipeline_rank]
        key = f"internsp/{self._name}/failed/{self._failures}"
        cause = self.cause or "a backward pass that did not end"
        if not all_meet(default_store(), key, self.mesh.rank, ranks, MEET_SECONDS):
            self._broken = (
                f"rank {self.mesh.rank} failed alone ({cause}); its groups are aborted because the "
                "other ranks cannot be in the same place. Restart the job from a checkpoint"
            )
            for group in (self.mesh.weight_group, self.mesh.replica_group, self.mesh.sequence_group):
                dist.destroy_process_group(group)
            raise CollectiveError(self._broken)
        self.rest()

    def rest(self) -> None:
        """Let everything in flight arrive and forget it: no lease, no partial gradient."""
        for communicator in (self, self.head, self.embedding, *self.others):
            for unit in getattr(communicator, "blocks", None) or [getattr(communicator, "unit", None)]:
                if unit is not None:
                    self.settle(unit)
        self.state.pending.discard()
        self.state.pool.forget()
        self.state.touched.clear()
        for weight in self.small.sharded:
            weight.partial = None
        self.small.reset()
        self._forward_open, self._backward_task, self._nested = False, -1, False
        self._open, self._held, self._waiting = [], {}, {}
        self._recomputed.clear()
        self.cause = ""
        for callback in self.after_rest:
            callback()


def _accumulate(member: ShardedWeight | ReplicatedParameter, value: Tensor) -> None:
    """Add ``value`` (like the parameter's storage) to ``.grad``, which keeps its own dtype."""
    gradient = member.wrap(value.to(member.dtype))
    if member.parameter.grad is None:
        member.parameter.grad = gradient
    else:
        member.parameter.grad._local_tensor.add_(gradient._local_tensor)  # type: ignore[attr-defined]
