"""Pure: plays the hooks over a chunk's plan; the actions of a step as they will happen (WP-2)."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Sequence

from internsp.wp.idle import Data
from internsp.wp.line import Rolling
from internsp.wp.schedule import (
    BACKWARD,
    DRAIN,
    FORWARD,
    RECOMPUTE,
    Action,
    ChunkPlan,
    Schedule,
    UnitPlan,
    WeightPlan,
)
from internsp.wp.turns import Turns


class Simulator:
    """Plays the hooks over a model whose weights are used in order, all trained.

    Args:
        data: what this rank's data leave idle.
    """

    def __init__(self, plan: ChunkPlan, overlap: bool, data: Data | None = None) -> None:
        self.plan = plan
        self.data = data or Data()
        self.turns = Turns[WeightPlan, bool]((), self.data.most_used, operator.or_)
        self.reaching = False
        self.overlap = overlap
        self.out = Schedule()
        self.slots: dict[int, tuple[UnitPlan, set[str]]] = {}
        self.flying: dict[str, list[WeightPlan]] = {}  # with what travels together
        self.pending: deque[list[WeightPlan]] = deque()
        self.pending_bytes = 0
        self.kept: list[WeightPlan] = []  # small weights of one unit, born and not yet launched
        self.kept_unit: UnitPlan | None = None
        self.accumulating = False  # whole gradients are summed, not reduced
        self.rolling = self.roll() if plan.policy.rolling else None

    def roll(self) -> Rolling[UnitPlan, WeightPlan]:
        """As :class:`internsp.wp.rolling.RollingCommunicator` makes it."""
        plan = self.plan

        def end(phase: str) -> None:
            if phase == FORWARD and plan.head is not None:
                self.fetch(plan.head, FORWARD)

        return Rolling(
            plan.blocks, plan.policy.onward, plan.launches, UnitPlan.extent, self.launch, end
        )

    def add(self, kind: str, phase: str, weight: WeightPlan, nbytes: int = 0) -> None:
        """Append one action."""
        self.out.actions.append(Action(kind, phase, weight.name, nbytes))

    def fetch(self, unit: UnitPlan, phase: str, only: WeightPlan | None = None) -> None:
        """As ``UnitCommunicator.fetch``; ``only`` one weight of the unit."""
        order = self.plan.policy.order(unit.weights, phase, unit.recomputed)
        self.launch(unit, [only] if only else order, phase)

    def launch(self, unit: UnitPlan, weights: Sequence[WeightPlan], phase: str) -> None:
        """Those of ``weights`` that are not in their slot."""
        owner, present = self.slots.setdefault(unit.slot, (unit, set()))
        if self.rolling is not None and unit.block >= 0:
            for weight in (w for w in weights if not w.resident):
                gone = self.rolling.take(unit, weight, phase)
                present.difference_update(other.name for _, other in gone)
        elif owner is not unit:
            present = set()
            self.slots[unit.slot] = (unit, present)
        together: list[WeightPlan] = []
        for weight in weights:
            if weight.name in present or weight.resident:
                continue
            present.add(weight.name)
            kind = weight.expert, weight.gather_dtype
            if not (weight.small and all((w.expert, w.gather_dtype) == kind for w in together)):
                self.gather(together, phase)
                together = []
            if weight.small:
                together.append(weight)
            else:
                self.gather([weight], phase)
        self.gather(together, phase)

    def gather(self, weights: list[WeightPlan], phase: str) -> None:
        """One launch."""
        for weight in weights:
            self.add("AG", phase, weight, weight.gather_bytes)
            if weight.gather_bytes:
                self.flying[weight.name] = weights
        if not self.overlap and weights:
            self.wait(weights[0], phase)

    def wait(self, weight: WeightPlan, phase: str) -> None:
        """Wait for a gather in flight."""
        if weight.name in self.flying:
            for other in self.flying[weight.name]:
                del self.flying[other.name]
            self.add("WAIT", phase, weight)

    def use(self, unit: UnitPlan, weight: WeightPlan, phase: str) -> None:
        """As ``BlockGathers._present``."""
        before = unit.weights.index(weight) if unit.block >= 0 else 0
        for idle in unit.weights[:before] if self.plan.policy.one_by_one(phase) else ():
            self.fetch(unit, phase, idle)
        self.fetch(unit, phase, weight)
        self.wait(weight, phase)
        self.add("USE", phase, weight)
        self.follow(unit, weight, phase)

    def follow(self, unit: UnitPlan, weight: WeightPlan, phase: str) -> None:
        """As ``ISPCommunicator.follow``."""
        policy = self.plan.policy
        order = policy.order(unit.weights, phase, unit.recomputed)
        step = policy.follow(order.index(weight), len(order), unit.block, phase)
        if step is not None and step[0] == "weight":
            self.fetch(unit, phase, order[step[1]])
        elif step is not None:
            self.begin(step[1], phase)

    def begin(self, block: int, phase: str) -> None:
        """As ``BlockGathers._begin``."""
        if block == len(self.plan.blocks):
            if self.plan.head is not None:
                self.fetch(self.plan.head, FORWARD)
            return
        unit, then = self.plan.blocks[block], FORWARD if phase == FORWARD else BACKWARD
        for first in self.plan.policy.order(unit.weights, then, unit.recomputed)[:1]:
            self.fetch(unit, then, first)

    def complete(self, unit: UnitPlan) -> None:
        """As ``BlockGathers.complete``."""
        if self.plan.policy.one_by_one(FORWARD) and unit.weights:
            for weight in unit.weights:
                self.fetch(unit, FORWARD, weight)
            self.follow(unit, unit.weights[-1], FORWARD)

    def ahead(self, block: int, phase: str) -> None:
        """As ``ISPCommunicator.reach_anchor``."""
        for target in self.plan.policy.ahead(block, phase):
            if target == len(self.plan.blocks):
                if self.plan.head is not None:
                    self.fetch(self.plan.head, FORWARD)
            else:
                self.fetch(self.plan.blocks[target], FORWARD if phase == FORWARD else BACKWARD)
        begins = self.plan.policy.begins(block, phase)
        if begins is not None:
            self.begin(begins, phase)

    def forward(self) -> None:
        """One forward."""
        plan = self.plan
        self.release_all()
        for outer in plan.outer:
            self.fetch(outer, FORWARD)
        if plan.blocks:
            self.enter(plan.blocks[0], FORWARD)
        if plan.embedding is not None:
            for weight in plan.embedding.weights:
                self.use(plan.embedding, weight, FORWARD)
                self.add("FREE", FORWARD, weight)
        for unit in plan.blocks:
            self.enter(unit, FORWARD)
            self.run(unit, FORWARD)
        if plan.head is not None:
            for weight in plan.head.weights:
                self.use(plan.head, weight, FORWARD)
                self.add("FREE", FORWARD, weight)

    def enter(self, unit: UnitPlan, phase: str) -> None:
        """As ``ISPCommunicator.enter_block``."""
        if self.rolling is not None:
            self.rolling.enter(unit, FORWARD if phase == FORWARD else BACKWARD)
        else:
            self.fetch_first(unit, phase)

    def fetch_first(self, unit: UnitPlan, phase: str) -> None:
        """As ``ISPCommunicator.fetch_first``: all of a unit, or its first weight."""
        if self.plan.policy.one_by_one(phase):
            for first in self.plan.policy.order(unit.weights, phase, unit.recomputed)[:1]:
                self.fetch(unit, phase, first)
        else:
            self.fetch(unit, phase)

    def run(self, unit: UnitPlan, phase: str) -> None:
        """A block's forward or recompute."""
        if unit.anchor < 0:
            self.reach_anchor(unit, phase)
        for position, weight in enumerate(unit.weights):
            if position in self.data.exchanges:
                self.add("A2A", phase, weight)
            if position == unit.anchor and not unit.at_entry:
                self.reach_anchor(unit, phase)
            for _ in range(1 if unit.at_entry else self.data.used(weight)):
                self.use(unit, weight, phase)
                if phase == FORWARD and not unit.at_entry:
                    self.release(unit, weight)
        if unit.at_entry and unit.anchor >= 0:
            self.reach_anchor(unit, phase)
        for weight in unit.weights if unit.at_entry and phase == FORWARD else ():
            self.release(unit, weight)
        if phase == FORWARD:
            self.complete(unit)
            if unit.anchor >= 0 and unit.block in self.data.silent:
                self.ahead(unit.block, phase)
            self.give_back(unit)

    def reach_anchor(self, unit: UnitPlan, phase: str) -> None:
        """As ``ISPCommunicator.reach_anchor``, if the anchor runs."""
        if unit.anchor >= 0 and unit.block in self.data.silent:
            return
        if phase != FORWARD:
            self.reaching = False
        self.ahead(unit.block, phase)

    def release(self, unit: UnitPlan, weight: WeightPlan) -> None:
        """As ``release_hook``."""
        self.add("FREE", FORWARD, weight)
        if not self.plan.policy.one_order and self.data.most_used(weight) == 1:
            self.let_go(unit, weight)

    def let_go(self, unit: UnitPlan, weight: WeightPlan) -> None:
        """As ``RollingCommunicator.let_go``."""
        if self.rolling is not None and unit.block >= 0:
            self.rolling.let_go(unit, weight)

    def give_back(self, unit: UnitPlan) -> None:
        """As ``BlockGathers.give_back``."""
        if self.rolling is not None:
            self.rolling.give_back(unit)

    def release_all(self) -> None:
        """As ``BlockGathers.release_all``."""
        if self.rolling is not None:
            self.rolling.release_all()

    def born(self, unit: UnitPlan, weight: WeightPlan) -> None:
        """As ``ISPCommunicator.gradient_hook``."""
        if not weight.trainable:
            return
        if self.accumulating:
            self.add("FREE", BACKWARD, weight)
            self.let_go(unit, weight)
            return
        kind = weight.expert, weight.reduce_dtype
        alike = all((w.expert, w.reduce_dtype) == kind for w in self.kept)
        if not (weight.small and alike and unit is self.kept_unit):
            self.flush()
        if weight.small:
            self.kept_unit = unit
            self.kept.append(weight)
        else:
            self.reduce([weight])
        self.add("FREE", BACKWARD, weight)
        self.let_go(unit, weight)

    def flush(self) -> None:
        """As ``PendingGradients.flush``."""
        kept, self.kept = self.kept, []
        if kept:
            self.reduce(kept)

    def reduce(self, weights: list[WeightPlan]) -> None:
        """One launch."""
        nbytes = sum(w.gradient_bytes for w in weights)
        while self.pending and self.pending_bytes + nbytes > self.plan.pending_bytes:
            self.drain_one()
        self.pending_bytes += nbytes
        for weight in weights:
            self.add("RS", BACKWARD, weight, weight.reduce_bytes)
        if weights[0].reduce_bytes and not self.overlap:
            self.add("WAIT", BACKWARD, weights[0])
        self.pending.append(weights)

    def drain(self) -> None:
        """As ``PendingGradients.drain``."""
        self.flush()
        while self.pending:
            self.drain_one()

    def drain_one(self) -> None:
        """As ``PendingGradients.drain_one``."""
        weights = self.pending.popleft()
        self.pending_bytes -= sum(w.gradient_bytes for w in weights)
        if weights[0].reduce_bytes and self.overlap:
            self.add("WAIT", DRAIN, weights[0])
        for weight in weights:
            self.add("DRAIN", DRAIN, weight)

    def backward(self) -> None:
        """One backward."""
        plan = self.plan
        self.release_all()
        if plan.blocks and not plan.policy.per_module and self.data.top:
            self.enter(plan.blocks[-1], BACKWARD)
        if plan.head is not None:
            for weight in reversed(plan.head.weights) if self.data.top else ():
                self.use(plan.head, weight, BACKWARD)
            for weight in plan.head.weights:
                self.born(plan.head, weight)
        for unit in reversed(plan.blocks):
            self.enter_backward(unit)
            if unit.block not in self.data.skipped:
                self.run_backward(unit)
            self.close(unit)
        self.flush()
        for outer in plan.outer:
            for weight in outer.weights:
                self.born(outer, weight)
        self.release_all()

    def enter_backward(self, unit: UnitPlan) -> None:
        """As ``ISPCommunicator._enter``."""
        self.flush()
        self.enter(unit, BACKWARD)
        order = [weight for weight in reversed(unit.weights) if weight.trainable]
        at_close = self.plan.policy.one_order
        self.turns = Turns(order, self.data.most_used, operator.or_, at_close)
        self.reaching = unit.recomputed and unit.anchor >= 0
        if not self.reaching:
            self.ahead(unit.block, RECOMPUTE if unit.recomputed else BACKWARD)

    def run_backward(self, unit: UnitPlan) -> None:
        """Recompute and gradients of a block."""
        if unit.recomputed:
            self.run(unit, RECOMPUTE)
        for weight in reversed(unit.weights) if unit.at_entry and not unit.recomputed else ():
            self.use(unit, weight, BACKWARD)
        for position, weight in reversed([*enumerate(unit.weights)]):
            uses = self.data.used(weight)
            for _ in range(min(uses, 1) if unit.at_entry else uses):
                if not unit.recomputed and not unit.at_entry:  # a recompute has waited for it
                    self.use(unit, weight, BACKWARD)
                if weight in self.turns:
                    self.take_turns(unit, self.turns.ready(weight, True, unit.at_entry))
            if position in self.data.exchanges:
                self.add("A2A", BACKWARD, weight)

    def take_turns(self, unit: UnitPlan, ready: Iterable[tuple[WeightPlan, bool | None]]) -> None:
        """As ``ISPCommunicator.reduce_in_turn``, each after what the anchor gathers."""
        for weight, _ in ready:
            self.reach(unit)
            self.born(unit, weight)

    def reach(self, unit: UnitPlan) -> None:
        """As ``ISPCommunicator._reach``."""
        if self.reaching:
            self.reaching = False
            self.ahead(unit.block, RECOMPUTE)

    def close(self, unit: UnitPlan) -> None:
        """As ``ISPCommunicator._close``."""
        self.reach(unit)
        self.take_turns(unit, self.turns.close())
        self.flush()
        self.give_back(unit)


def simulate(
    plan: ChunkPlan, micro_batches: int = 1, overlap: bool = True, data: Sequence[Data] = ()
) -> Schedule:
    """The actions of one optimizer step from rest, in the order in which they happen.

    Args:
        micro_batches: forward and backward passes in the step.
        overlap: false for the synchronous path, which waits at each launch.
        data: of each micro-batch, where a rank's data leave weights idle.
    """
    simulator = Simulator(plan, overlap)
    for number in range(micro_batches):
        simulator.data = data[number] if number < len(data) else Data()
        last = number == micro_batches - 1
        simulator.accumulating = plan.policy.accumulate_whole and not last
        simulator.forward()
        simulator.backward()
        simulator.drain()
    return simulator.out
