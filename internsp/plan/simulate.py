"""Pure: drives :class:`internsp.wp.queue.GatherQueue` over a chunk's plan (WP-2).

Events come in the order in which hooks fire; the actions that they return are the schedule that
``internsp plan`` prints. What is gathered when is decided by nothing in this file.
"""

from __future__ import annotations

from collections.abc import Sequence

from internsp.plan.chunk import ChunkPlan, Line, Schedule, UnitPlan, WeightPlan
from internsp.plan.unused import Data
from internsp.wp.enclosing import EnclosingBlocks
from internsp.wp.queue import GatherQueue
from internsp.wp.schedule import (
    ALL_GATHER,
    BACKWARD,
    EXCHANGE,
    FINISH,
    FINISH_OLDEST,
    FORWARD,
    NEAR_GATHER,
    NEXT_PASS,
    RECOMPUTE,
    REDUCE_SCATTER,
    WAIT,
    Action,
)

_PRINTED = ("AG", "WAIT", "USE", "FREE", "RS", "FINISH")


class Simulator:
    """Fires the events of a model whose weights are used in order.

    Args:
        data: what this rank's data leave unused.
    """

    def __init__(self, plan: ChunkPlan, overlap: bool, data: Data | None = None) -> None:
        self.plan = plan
        self.data = data or Data()
        self.overlap = overlap
        self.out = Schedule()
        self.queue: GatherQueue[UnitPlan, WeightPlan] = GatherQueue(
            plan.run_policy, plan.runs, plan.outer, plan.head, overlap, limit=plan.pending_bytes
        )
        self.enclosing: EnclosingBlocks[UnitPlan, WeightPlan]
        self.enclosing = EnclosingBlocks(self.queue, plan.enclosing)
        self.exchanges = False  # the backward that runs is the last before replicas exchange
        parcels = plan.parcels if plan.exchanged else ()
        self.queue.reductions.exchanges.declare(parcels, limit=0)
        self._accumulated: dict[WeightPlan, UnitPlan] = {}

    def learn(self, data: Sequence[Data] = ()) -> None:
        """Forwards before this step have counted how often each weight is used."""
        every = data or [self.data]
        self.queue.learn({
            weight: max(one.most_used(weight) for one in every)
            for unit in self.plan.units
            for weight in unit.weights
        })  # fmt: skip

    def perform(self, actions: Sequence[Action]) -> None:
        """Write actions down, a line a weight."""
        for kind, phase, unit, weights, _ in actions:
            if kind == NEXT_PASS:
                self.at_next_pass()
            elif kind == "ACCUMULATE":
                self._accumulated.update(dict.fromkeys(weights, unit))
            elif kind == EXCHANGE:
                self.out.actions.append(Line(kind, phase, unit.name))
            elif kind == NEAR_GATHER:
                for weight in weights:
                    line = Line(ALL_GATHER, phase, weight.name, weight.near_bytes, near=True)
                    self.out.actions.append(line)
            elif kind in _PRINTED:
                if kind == FINISH_OLDEST and self.overlap and weights[0].reduce_bytes:
                    self.add(WAIT, FINISH, weights[0])
                for weight in weights:
                    nbytes = {
                        ALL_GATHER: weight.gather_bytes, REDUCE_SCATTER: weight.reduce_bytes
                    }.get(kind, 0)  # fmt: skip
                    self.add(kind, phase, weight, nbytes)
                    if kind == REDUCE_SCATTER:
                        self._accumulated.pop(weight, None)

    def add(self, kind: str, phase: str, weight: WeightPlan, nbytes: int = 0) -> None:
        """Append one line."""
        self.out.actions.append(Line(kind, phase, weight.name, nbytes))

    def at_next_pass(self) -> None:
        """A pass gathers nothing more; a pipeline's chunk begins what comes."""

    def use(self, unit: UnitPlan, weight: WeightPlan, phase: str) -> None:
        """A weight is used."""
        self.perform(self.queue.use(unit, weight, phase))

    def forward(self) -> None:
        """One forward."""
        plan, queue = self.plan, self.queue
        self.perform(queue.begin_forward(keep=True))
        self._beside(plan.embedding)
        for unit in plan.runs:
            if unit.around >= 0 and unit.block == plan.enclosing[unit.around].first:
                self.perform(self.enclosing.enter(plan.enclosing[unit.around]))
                self._beside(plan.enclosing[unit.around].rest)
            self.perform(queue.enter(unit))
            self._run(unit, FORWARD)
            self.perform(queue.leave(unit))
        self._beside(plan.head)

    def _beside(self, unit: UnitPlan | None) -> None:
        if unit is not None:
            for weight in unit.weights:
                self.use(unit, weight, FORWARD)
                self.perform(self.queue.release(unit, weight))

    def _run(self, unit: UnitPlan, phase: str) -> None:
        """A block's forward or recompute."""
        data = self.data
        if unit.trigger_at < 0:
            self._trigger(unit, phase)
        for position, weight in enumerate(unit.weights):
            if position in data.exchanges:
                self.add("A2A", phase, weight)
            if position == unit.trigger_at and not unit.at_entry:
                self._trigger(unit, phase)
            for _ in range(1 if unit.at_entry else data.used(weight)):
                self.use(unit, weight, phase)
                if phase == FORWARD and not unit.at_entry:
                    self.perform(self.queue.release(unit, weight))
        if unit.at_entry and unit.trigger_at >= 0:
            self._trigger(unit, phase)
        for weight in unit.weights if unit.at_entry and phase == FORWARD else ():
            self.perform(self.queue.release(unit, weight))

    def _trigger(self, unit: UnitPlan, phase: str) -> None:
        if unit.trigger_at < 0 or unit.block not in self.data.silent:
            self.perform(self.queue.trigger(unit, recompute=phase != FORWARD))

    def backward(self, gives: bool = True, forwards: Sequence[Data] = ()) -> None:
        """One backward.

        Args:
            gives: whether it gives weights gradients; not the input part of one in two.
            forwards: what it goes through the graphs of, the last first; the one at hand if empty.
        """
        queue = self.queue
        queue.begin_backward(self.exchanges and len(forwards) < 2)
        for index, data in enumerate(reversed(forwards or [self.data])):
            self.data = data
            if index:
                self.perform(queue.come_to_earlier(everywhere=True))
            self._through(gives)
        self.perform(queue.end_backward(everywhere=True))
        if gives:
            self.end_pass()
        else:
            self.perform(queue.end_part())
            queue.end_pass()

    def _through(self, gives: bool) -> None:
        """Backward through head and blocks, in one forward's graph."""
        plan, queue, data = self.plan, self.queue, self.data
        if data.top:
            self.perform(queue.at_output())
        if plan.head is not None and data.top:
            for weight in reversed(plan.head.weights):
                self.use(plan.head, weight, BACKWARD)
                self._ready(plan.head, weight, gives=gives)
        for number, unit in reversed([*enumerate(plan.runs)]):
            if unit.block not in data.skipped:
                self._enter_backward(unit, number)
                self._run_backward(unit, gives)

    def _enter_backward(self, unit: UnitPlan, number: int) -> None:
        """A gradient arrives at a unit's output, and before that at its block's."""
        if unit.around < 0:
            self.perform(self.queue.enter_backward(unit, everywhere=True, run=number))
            return
        block = self.plan.enclosing[unit.around]
        first = self.enclosing.open is not block
        self.perform(self.enclosing.enter_backward(block, everywhere=True))
        self.perform(self.queue.enter_backward(unit, everywhere=True))
        if first and block.recomputed:
            for each in self.plan.blocks[block.first : block.last + 1]:
                self.perform(self.enclosing.recompute(each))
                self._run(each, RECOMPUTE)
                self.queue.leave_recompute(each)
        if first:
            for weight in reversed(block.rest.weights):
                self.use(block.rest, weight, BACKWARD)

    def end_pass(self) -> None:
        """What is accumulated and was not reduced comes last, unless more is to come."""
        if not self.queue.reductions.accumulating:
            for weight, unit in list(self._accumulated.items()):
                self.perform(self.queue.reduce(unit, weight))
        self.queue.end_pass()

    def _run_backward(self, unit: UnitPlan, gives: bool) -> None:
        """Recompute and gradients of a block."""
        data = self.data
        if unit.recomputed:
            self._run(unit, RECOMPUTE)
        for weight in reversed(unit.weights) if unit.at_entry and not unit.recomputed else ():
            self.use(unit, weight, BACKWARD)
        for position, weight in reversed([*enumerate(unit.weights)]):
            uses = data.used(weight)
            for _ in range(min(uses, 1) if unit.at_entry else uses):
                if not unit.at_entry:
                    self.perform(self.queue.before_backward(unit, weight))
                self._ready(unit, weight, unit.at_entry, gives)
            if position in data.exchanges:
                self.add("A2A", BACKWARD, weight)

    def _ready(
        self, unit: UnitPlan, weight: WeightPlan, last: bool = False, gives: bool = True
    ) -> None:
        if weight.trainable and gives:
            self.perform(self.queue.grad_ready(unit, weight, last))


def simulate(
    plan: ChunkPlan,
    micro_batches: int = 1,
    overlap: bool = True,
    data: Sequence[Data] = (),
    added: bool = False,
) -> Schedule:
    """The actions of one optimizer step from rest, in the order in which they happen.

    Args:
        micro_batches: forward and backward passes in the step.
        overlap: false for the synchronous path, which waits at each launch.
        data: of each micro-batch, where a rank's data leave weights unused.
        added: their losses are added up for one backward.
    """
    simulator = Simulator(plan, overlap)
    every = [data[n] if n < len(data) else Data() for n in range(micro_batches)]
    simulator.learn(every)
    if added:
        for simulator.data in every:
            simulator.forward()
        simulator.backward(forwards=every)
        simulator.perform(simulator.queue.reductions.complete())
        return simulator.out
    for number, simulator.data in enumerate(every):
        last = number == micro_batches - 1
        simulator.queue.reductions.accumulating = plan.policy.accumulate_whole and not last
        simulator.forward()
        simulator.exchanges = last
        simulator.backward()
        simulator.perform(simulator.queue.reductions.finish(last))
    simulator.perform(simulator.queue.reductions.complete())
    return simulator.out
