"""Simulates a step: calls :class:`internsp.schedule.queue.GatherQueue` as the hooks would (WP-2).
Pure.

The queue's methods are called in the order in which hooks fire, and the actions that they return
are the schedule that ``internsp plan`` prints. The queue alone decides what is gathered when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from internsp.schedule.chunk import ChunkLayout, Schedule, ScheduleLine, UnitLayout, WeightLayout
from internsp.schedule.queue import GatherQueue
from internsp.schedule.terms import (
    ACCUMULATE,
    ALL_GATHER,
    BACKWARD,
    EXCHANGE,
    FINISH,
    FINISH_OLDEST,
    FORWARD,
    GO_ON,
    NEAR_GATHER,
    NEXT_PASS,
    RECOMPUTE,
    REDUCE_SCATTER,
    WAIT,
    Action,
    Unit,
)

_PRINTED = ("AG", "WAIT", "USE", "FREE", "RS", "FINISH")


@dataclass(frozen=True)
class BatchUsage:
    """Which weights and blocks a rank's batch uses in a pass; by default each weight once.

    Attributes:
        uses: how often a weight is used, by name; 0: unused; a missing name: once.
        earlier_uses: how often it was used in an earlier forward, if more often.
        without_trigger: blocks in which the prefetch trigger does not run.
        without_gradient: blocks through which no gradient flows.
        head_gradient: whether a gradient flows through the head.
        exchanges: in every block, positions of weights before which ranks exchange sequences or
            tokens (``A2A``); the same on all ranks.
    """

    uses: Mapping[str, int] = field(default_factory=dict)
    earlier_uses: Mapping[str, int] = field(default_factory=dict)
    without_trigger: frozenset[int] = frozenset()
    without_gradient: frozenset[int] = frozenset()
    head_gradient: bool = True
    exchanges: tuple[int, ...] = ()

    def used(self, weight: WeightLayout) -> int:
        """How often ``weight`` is used in this pass."""
        return self.uses.get(weight.name, 1)

    def most_used(self, weight: WeightLayout) -> int:
        """How often ``weight`` is used in this pass or an earlier forward; at least once."""
        return max(self.used(weight), self.earlier_uses.get(weight.name, 1), 1)


class Simulator:
    """Calls the gather queue as the hooks of a model would whose weights are used in order.

    Args:
        data: how this rank's batch uses the weights.
    """

    def __init__(self, plan: ChunkLayout, overlap: bool, data: BatchUsage | None = None) -> None:
        self.plan = plan
        self.data = data or BatchUsage()
        self.overlap = overlap
        self.schedule = Schedule()
        self.queue: GatherQueue[WeightLayout] = GatherQueue(
            plan.policy,
            plan.blocks,
            plan.root_units,
            plan.head,
            plan.enclosing,
            overlap,
            limit=plan.pending_bytes,
        )
        if plan.order:
            self.queue.reorder(plan.run_policy, plan.run_order)
        self.exchanges = False  # the running backward is the last one before replicas exchange
        parcels = plan.parcels if plan.exchanged else ()
        self.queue.reductions.exchanges.declare(parcels, limit=0)
        self._accumulated: dict[WeightLayout, Unit[WeightLayout]] = {}
        self._near: deque[Sequence[WeightLayout]] = deque()  # sums that have not gone on

    def set_uses(self, data: Sequence[BatchUsage] = ()) -> None:
        """Set how often each weight is used, which the runtime counts in earlier forwards."""
        every = data or [self.data]
        self.queue.uses.set({
            weight: max(one.most_used(weight) for one in every)
            for unit in self.plan.units
            for weight in unit.weights
        })  # fmt: skip

    def record(self, actions: Sequence[Action[WeightLayout]]) -> None:
        """Append actions to the schedule, one line a weight."""
        for kind, phase, unit, weights, _, parcel in actions:
            if kind == NEXT_PASS:
                self.at_next_pass()
            elif kind == ACCUMULATE and unit is not None:
                self._accumulated.update(dict.fromkeys(weights, unit))
            elif kind == EXCHANGE and parcel is not None:
                self.schedule.actions.append(ScheduleLine(kind, phase, parcel.name))
            elif kind == GO_ON:
                while self._near:
                    self._leave_near()
            elif kind == NEAR_GATHER:
                for weight in weights:
                    line = ScheduleLine(
                        ALL_GATHER, phase, weight.name, weight.near_bytes, near=True
                    )
                    self.schedule.actions.append(line)
            elif kind in _PRINTED:
                self._print(kind, phase, weights)

    def _print(self, kind: str, phase: str, weights: Sequence[WeightLayout]) -> None:
        if kind == FINISH_OLDEST:
            if self._near and self._near[0] is weights:
                self._leave_near()
            if self.overlap and weights[0].reduce_bytes:
                self.add(WAIT, FINISH, weights[0])
        sends = {ALL_GATHER: "gather_bytes", REDUCE_SCATTER: "reduce_bytes"}
        for weight in weights:
            near = kind == REDUCE_SCATTER and weight.far_bytes > 0
            nbytes = getattr(weight, sends[kind]) if kind in sends else 0
            self.add(kind, phase, weight, nbytes, near)
            if kind == REDUCE_SCATTER:
                self._accumulated.pop(weight, None)
        if kind == REDUCE_SCATTER and weights[0].far_bytes:
            self._near.append(weights)
            if not self.overlap:
                self._leave_near()

    def _leave_near(self) -> None:
        """The oldest of them goes on between near groups (:mod:`internsp.wp.two_level`)."""
        weights = self._near.popleft()
        self.add(WAIT, BACKWARD, weights[0])
        for weight in weights:
            self.add(REDUCE_SCATTER, BACKWARD, weight, weight.far_bytes)

    def add(
        self, kind: str, phase: str, weight: WeightLayout, nbytes: int = 0, near: bool = False
    ) -> None:
        """Append one line."""
        self.schedule.actions.append(ScheduleLine(kind, phase, weight.name, nbytes, near))

    def at_next_pass(self) -> None:
        """Called when a pass has nothing left to gather: a pipeline prefetches the next pass."""

    def use(self, unit: Unit[WeightLayout], weight: WeightLayout, phase: str) -> None:
        """Simulate a use of a weight."""
        self.record(self.queue.use(unit, weight, phase))

    def forward(self) -> None:
        """Simulate one forward."""
        plan, queue = self.plan, self.queue
        self.record(queue.root_pre_forward(keep=True))
        self._use_unit(plan.embedding)
        for unit in plan.run_order:
            if unit.around >= 0 and unit.block == plan.enclosing[unit.around].first:
                around = plan.enclosing[unit.around]
                self.record(queue.backward.enclosing.pre_forward(around))
                self._use_unit(around.rest)
            self.record(queue.pre_forward(unit))
            self._run(unit, FORWARD)
            self.record(queue.post_forward(unit))
        self._use_unit(plan.head)

    def _use_unit(self, unit: Unit[WeightLayout] | None) -> None:
        if unit is not None:
            for weight in unit.weights:
                self.use(unit, weight, FORWARD)
                self.record(self.queue.release(unit, weight))

    def _run(self, unit: UnitLayout, phase: str) -> None:
        """Simulate a unit's forward or recompute."""
        data = self.data
        if unit.trigger_at < 0:
            self._trigger(unit, phase)
        for position, weight in enumerate(unit.weights):
            if position in data.exchanges:
                self.add("A2A", phase, weight)
            if position == unit.trigger_at and not unit.unshard_at_entry:
                self._trigger(unit, phase)
            for _ in range(1 if unit.unshard_at_entry else data.used(weight)):
                self.use(unit, weight, phase)
                if phase == FORWARD and not unit.unshard_at_entry:
                    self.record(self.queue.release(unit, weight))
        if unit.unshard_at_entry and unit.trigger_at >= 0:
            self._trigger(unit, phase)
        for weight in unit.weights if unit.unshard_at_entry and phase == FORWARD else ():
            self.record(self.queue.release(unit, weight))

    def _trigger(self, unit: UnitLayout, phase: str) -> None:
        if unit.trigger_at < 0 or unit.block not in self.data.without_trigger:
            self.record(self.queue.trigger(unit, recompute=phase != FORWARD))

    def backward(self, weight_gradients: bool = True, forwards: Sequence[BatchUsage] = ()) -> None:
        """Simulate one backward.

        Args:
            weight_gradients: false for an input backward, which computes no weight gradients.
            forwards: the forwards that it goes back through, in their order; if empty, the most
                recent one only.
        """
        backward = self.queue.backward
        backward.root_pre_backward(self.exchanges and len(forwards) < 2)
        for index, data in enumerate(reversed(forwards or [self.data])):
            self.data = data
            if index:
                self.record(backward.begin_earlier_graph(all_ranks=True))
            self._backward_of_graph(weight_gradients)
        self.record(backward.root_post_backward(all_ranks=True))
        if weight_gradients:
            self.end_pass()
        else:
            backward.end_pass()
            self.record(backward.end_backward_part())

    def _backward_of_graph(self, weight_gradients: bool) -> None:
        """Backward through head and blocks of one forward's graph."""
        plan, queue, data = self.plan, self.queue, self.data
        if data.head_gradient:
            self.record(queue.backward.prefetch_at_output())
        if plan.head is not None and data.head_gradient:
            for weight in reversed(plan.head.weights):
                self.use(plan.head, weight, BACKWARD)
                self._grad_ready(plan.head, weight, weight_gradients=weight_gradients)
        for number, unit in reversed([*enumerate(plan.run_order)]):
            if unit.block not in data.without_gradient:
                self._pre_backward(unit, number)
                self._run_backward(unit, weight_gradients)

    def _pre_backward(self, unit: UnitLayout, number: int) -> None:
        """The pre-backward of a unit, after that of the enclosing block."""
        backward = self.queue.backward
        if unit.around < 0:
            self.record(backward.pre_backward(unit, all_ranks=True, run=number))
            return
        block = self.plan.enclosing[unit.around]
        first = backward.enclosing.open is not block
        self.record(backward.enclosing.pre_backward(block, all_ranks=True))
        self.record(backward.pre_backward(unit, all_ranks=True))
        if first and block.recomputed:
            for each in self.plan.blocks[block.first : block.last + 1]:
                self.record(backward.enclosing.recompute(each))
                self._run(each, RECOMPUTE)
                backward.leave_recompute(each)
        if first:
            for weight in reversed(block.rest.weights):
                self.use(block.rest, weight, BACKWARD)

    def end_pass(self) -> None:
        """Reduce accumulated gradients that are still unreduced, unless accumulation goes on."""
        if not self.queue.reductions.accumulating:
            for weight, unit in list(self._accumulated.items()):
                self.record(self.queue.reduce(unit, weight))
        self.queue.backward.end_pass()

    def _run_backward(self, unit: UnitLayout, weight_gradients: bool) -> None:
        """Recompute and gradients of a unit."""
        data = self.data
        if unit.recomputed:
            self._run(unit, RECOMPUTE)
        for weight in (
            reversed(unit.weights) if unit.unshard_at_entry and not unit.recomputed else ()
        ):
            self.use(unit, weight, BACKWARD)
        for position, weight in reversed([*enumerate(unit.weights)]):
            uses = data.used(weight)
            for _ in range(min(uses, 1) if unit.unshard_at_entry else uses):
                if not unit.unshard_at_entry:
                    self.record(self.queue.backward.use(unit, weight))
                self._grad_ready(unit, weight, unit.unshard_at_entry, weight_gradients)
            if position in data.exchanges:
                self.add("A2A", BACKWARD, weight)

    def _grad_ready(
        self,
        unit: UnitLayout,
        weight: WeightLayout,
        last: bool = False,
        weight_gradients: bool = True,
    ) -> None:
        if weight.trainable and weight_gradients:
            self.record(self.queue.backward.grad_ready(unit, weight, last))


def simulate(
    plan: ChunkLayout,
    micro_batches: int = 1,
    overlap: bool = True,
    data: Sequence[BatchUsage] = (),
    summed_losses: bool = False,
    by: type[Simulator] = Simulator,
) -> Schedule:
    """The actions of one optimizer step, in the order in which they happen.

    Args:
        micro_batches: forward and backward passes in the step.
        overlap: false for the synchronous path, which waits at each launch.
        data: how each micro-batch uses the weights; by default each weight is used once.
        summed_losses: the losses of all micro-batches are summed for one backward.
        by: what simulates it; a subclass may record more.
    """
    simulator = by(plan, overlap)
    every = [data[n] if n < len(data) else BatchUsage() for n in range(micro_batches)]
    simulator.set_uses(every)
    if summed_losses:
        for simulator.data in every:
            simulator.forward()
        simulator.backward(forwards=every)
        simulator.record(simulator.queue.reductions.complete())
        return simulator.schedule
    for number, simulator.data in enumerate(every):
        last = number == micro_batches - 1
        simulator.queue.reductions.accumulating = plan.policy.accumulate_whole and not last
        simulator.forward()
        simulator.exchanges = last
        simulator.backward()
        simulator.record(simulator.queue.reductions.finish(last))
    simulator.record(simulator.queue.reductions.complete())
    return simulator.schedule
