"""Pure: plays the hooks over a chunk's plan; the actions of a step as they will happen (WP-2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

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


class Simulator:
    """Plays the hooks over an ideal model: each weight used once, in order, all trained."""

    def __init__(self, plan: ChunkPlan, overlap: bool) -> None:
        self.plan = plan
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
        """As ``UnitCommunicator.weight_hook``."""
        self.fetch(unit, phase, weight)
        self.wait(weight, phase)
        self.add("USE", phase, weight)
        self.follow(unit, weight, phase)

    def follow(self, unit: UnitPlan, weight: WeightPlan, phase: str) -> None:
        """As ``ISPCommunicator.follow``."""
        policy = self.plan.policy
        order = policy.order(unit.weights, phase, unit.recomputed)
        step = policy.follow(
            order.index(weight), len(order), unit.block, phase, unit.recomputed
        )
        if step is None:
            return
        kind, index = step
        if kind == "weight":
            self.fetch(unit, phase, order[index])
        elif index == len(self.plan.blocks):
            if self.plan.head is not None:
                self.fetch(self.plan.head, FORWARD)
        else:
            self.enter(self.plan.blocks[index], FORWARD if phase == FORWARD else BACKWARD)

    def ahead(self, block: int, phase: str) -> None:
        """As ``ISPCommunicator.reach_anchor``."""
        for target in self.plan.policy.ahead(block, phase):
            if target == len(self.plan.blocks):
                if self.plan.head is not None:
                    self.fetch(self.plan.head, FORWARD)
            else:
                self.fetch(self.plan.blocks[target], FORWARD if phase == FORWARD else BACKWARD)

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
        if self.plan.policy.per_module:
            for first in self.plan.policy.order(unit.weights, phase, unit.recomputed)[:1]:
                self.fetch(unit, phase, first)
        else:
            self.fetch(unit, phase)

    def run(self, unit: UnitPlan, phase: str) -> None:
        """A block's forward or recompute."""
        if unit.anchor < 0:
            self.ahead(unit.block, phase)
        for position, weight in enumerate(unit.weights):
            if position == unit.anchor and not unit.at_entry:
                self.ahead(unit.block, phase)
            self.use(unit, weight, phase)
            if phase == FORWARD and not unit.at_entry:
                self.add("FREE", FORWARD, weight)
                self.let_go(unit, weight)
        if unit.at_entry and unit.anchor >= 0:
            self.ahead(unit.block, phase)
        for weight in unit.weights if unit.at_entry and phase == FORWARD else ():
            self.add("FREE", FORWARD, weight)
            self.let_go(unit, weight)
        if phase == FORWARD:
            self.give_back(unit)

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
        if plan.blocks and not plan.policy.per_module:
            self.enter(plan.blocks[-1], BACKWARD)
        if plan.head is not None:
            for weight in reversed(plan.head.weights):
                self.use(plan.head, weight, BACKWARD)
                self.born(plan.head, weight)
        for unit in reversed(plan.blocks):
            self.flush()
            self.enter(unit, BACKWARD)
            if unit.recomputed:
                self.run(unit, RECOMPUTE)
            else:
                self.ahead(unit.block, BACKWARD)
            for weight in reversed(unit.weights) if unit.at_entry and not unit.recomputed else ():
                self.use(unit, weight, BACKWARD)
            for weight in reversed(unit.weights):
                if not unit.recomputed and not unit.at_entry:  # a recompute has waited for it
                    self.use(unit, weight, BACKWARD)
                self.born(unit, weight)
            self.flush()
            self.give_back(unit)
        self.flush()
        for outer in plan.outer:
            for weight in outer.weights:
                self.born(outer, weight)
        self.release_all()


def simulate(plan: ChunkPlan, micro_batches: int = 1, overlap: bool = True) -> Schedule:
    """The actions of one optimizer step from rest, in the order in which they happen.

    Args:
        micro_batches: forward and backward passes in the step.
        overlap: false for the synchronous path, which waits at each launch.
    """
    simulator = Simulator(plan, overlap)
    for number in range(micro_batches):
        last = number == micro_batches - 1
        simulator.accumulating = plan.policy.accumulate_whole and not last
        simulator.forward()
        simulator.backward()
        simulator.drain()
    return simulator.out
