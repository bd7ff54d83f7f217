"""Pure: blocks + phase -> ordered actions. What the hooks perform, `internsp plan` prints.

:class:`Policy` holds every decision about order, and both the running hooks
(:mod:`internsp.wp.prefetch`) and :func:`simulate` ask it, so that the printed schedule and the
recorded trace of a step can be compared line by line (WP-2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
Step = tuple[str, int] | None

FORWARD, RECOMPUTE, BACKWARD, DRAIN = "forward", "recompute", "backward", "drain"


@dataclass(frozen=True)
class Policy:
    """When what is gathered.

    Attributes:
        blocks: transformer blocks of the chunk.
        depth: blocks gathered ahead; the chunk has ``depth + 1`` slots.
        per_module: gather the next weight at each weight's use instead of the next block at the
            anchor (InternEvo's prefetch per module).
        keep: a slot for every block, so that blocks stay whole between micro-batches.
        together_bytes: whole weights up to this size are small: neighbours share one launch.
    """

    blocks: int
    depth: int = 1
    per_module: bool = False
    keep: bool = False
    together_bytes: int = 0

    def small(self, nbytes: int) -> bool:
        """Whether a whole weight of so many bytes travels together with its small neighbours."""
        return nbytes <= self.together_bytes

    @property
    def slots(self) -> int:
        """Slots of the chunk (WP-1)."""
        return max(self.blocks, 1) if self.keep else min(self.depth + 1, max(self.blocks, 1))

    def slot(self, block: int) -> int:
        """The slot of a block, fixed: saved views alias it (DESIGN 4.1)."""
        return block % self.slots

    def ahead(self, block: int, phase: str) -> list[int]:
        """Blocks to have in flight once ``block``'s trigger fires, nearest first.

        ``blocks`` itself stands for what follows the last block in forward: the head.
        """
        if self.per_module:
            return []
        if phase == FORWARD:
            return list(range(block + 1, min(block + self.depth, self.blocks) + 1))
        return list(range(block - 1, max(block - self.depth, 0) - 1, -1))

    def at_boundary(self, block: int, phase: str) -> bool:
        """Whether ``block``'s trigger is the pass's last: what follows is another pass's."""
        return block == (self.blocks - 1 if phase == FORWARD else 0)

    def follow(self, position: int, count: int, block: int, phase: str, recomputed: bool) -> Step:
        """With prefetch per module: what to gather once weight ``position`` of the order is used.

        Returns:
            ``("weight", p)``: position ``p`` of the same unit's order; ``("block", b)``: the
            first weight of block ``b`` (``blocks`` stands for the head); ``None``: nothing.
        """
        if not self.per_module or block < 0 or (phase == BACKWARD and recomputed):
            return None  # recompute has gathered everything, and reached for the block before
        if position + 1 < count:
            return ("weight", position + 1)
        other = block + (1 if phase == FORWARD else -1)
        return ("block", other) if 0 <= other <= self.blocks else None

    @staticmethod
    def order(weights: Sequence[T], phase: str, recomputed: bool) -> list[T]:
        """Order of a unit's gathers: of use in forward and recompute, else its exact reverse."""
        if phase == BACKWARD and not recomputed:
            return list(reversed(weights))
        return list(weights)


@dataclass(frozen=True)
class WeightPlan:
    """One weight as the schedule sees it; bytes are per rank and message payload."""

    name: str
    gather_bytes: int
    reduce_bytes: int
    slot_bytes: int
    shard_bytes: int
    trainable: bool = True
    resident: bool = False
    """Whole at rest (weight group of one, same dtype): never gathered."""
    small: bool = False
    """Travels together with its small neighbours."""


@dataclass(frozen=True)
class UnitPlan:
    """One unit as the schedule sees it; ``block`` is -1 outside the blocks."""

    name: str
    weights: tuple[WeightPlan, ...]
    slot: int
    block: int = -1
    recomputed: bool = False
    anchor: int = -1
    """Position of the first weight used after the anchor; -1: the block's entry triggers."""
    at_entry: bool = False
    """Whether the block takes all its weights at its entry."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of the unit's whole weights in a slot."""
        return sum(w.slot_bytes for w in self.weights if not w.resident)


@dataclass(frozen=True)
class Action:
    """One line of a schedule: ``kind`` as in :mod:`internsp.trace`."""

    kind: str
    phase: str
    weight: str
    nbytes: int = 0

    def line(self) -> str:
        """As :meth:`internsp.trace.Event.line`."""
        return f"{self.kind} {self.phase} {self.weight}"


@dataclass
class Schedule:
    """The ordered actions of one optimizer step."""

    actions: list[Action] = field(default_factory=list)

    def lines(self, kinds: Sequence[str] | None = None) -> list[str]:
        """The actions as text, optionally only some kinds."""
        return [a.line() for a in self.actions if kinds is None or a.kind in kinds]

    def nbytes(self, kind: str) -> int:
        """Payload bytes of all actions of a kind."""
        return sum(a.nbytes for a in self.actions if a.kind == kind)

    def count(self, kind: str) -> int:
        """Number of actions of a kind."""
        return sum(a.kind == kind for a in self.actions)


@dataclass(frozen=True)
class ChunkPlan:
    """Everything :func:`simulate` needs to know about a chunk."""

    policy: Policy
    blocks: tuple[UnitPlan, ...]
    embedding: UnitPlan | None
    head: UnitPlan | None
    pending_units: int
    others: tuple[UnitPlan, ...] = ()

    @property
    def outer(self) -> tuple[UnitPlan, ...]:
        """Gathered at the model's entry and reduced at the end of backward."""
        return (*((self.embedding,) if self.embedding is not None else ()), *self.others)

    def slots(self) -> list[int]:
        """Bytes of each slot: the pool's exact size (WP-1)."""
        largest = max((u.slot_bytes for u in self.blocks), default=0)
        sizes = dict.fromkeys(range(self.policy.slots if self.blocks else 0), largest)
        for unit in (self.embedding, self.head, *self.others):
            if unit is not None:
                sizes[unit.slot] = unit.slot_bytes
        return [sizes[i] for i in sorted(sizes)]


class Simulator:
    """Plays the hooks over an ideal model: each weight used once, in order, all trained."""

    def __init__(self, plan: ChunkPlan, overlap: bool) -> None:
        self.plan = plan
        self.overlap = overlap
        self.out = Schedule()
        self.slots: dict[int, tuple[UnitPlan, set[str]]] = {}
        self.flying: dict[str, list[WeightPlan]] = {}  # with what travels together
        self.pending: deque[tuple[UnitPlan, list[WeightPlan]]] = deque()
        self.kept: list[WeightPlan] = []  # small weights of one unit, born and not yet launched
        self.kept_unit: UnitPlan | None = None

    def add(self, kind: str, phase: str, weight: WeightPlan, nbytes: int = 0) -> None:
        """Append one action."""
        self.out.actions.append(Action(kind, phase, weight.name, nbytes))

    def fetch(self, unit: UnitPlan, phase: str, only: WeightPlan | None = None) -> None:
        """As ``UnitCommunicator.fetch``; ``only`` one weight of the unit."""
        owner, present = self.slots.get(unit.slot, (None, set()))
        if owner is not unit:
            present = set()
            self.slots[unit.slot] = (unit, present)
        order = self.plan.policy.order(unit.weights, phase, unit.recomputed)
        together: list[WeightPlan] = []
        for weight in [only] if only else order:
            if weight.name in present or weight.resident:
                continue
            present.add(weight.name)
            if weight.small:
                together.append(weight)
                continue
            self.gather(together, phase)
            together = []
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
        if unit.at_entry and unit.anchor >= 0:
            self.ahead(unit.block, phase)
        for weight in unit.weights if unit.at_entry and phase == FORWARD else ():
            self.add("FREE", FORWARD, weight)

    def born(self, unit: UnitPlan, weight: WeightPlan) -> None:
        """As ``ISPCommunicator.gradient_hook``."""
        if not weight.trainable:
            return
        if not weight.small or unit is not self.kept_unit:
            self.flush()
        if weight.small:
            self.kept_unit = unit
            self.kept.append(weight)
        else:
            self.reduce(unit, [weight])
        self.add("FREE", BACKWARD, weight)

    def flush(self) -> None:
        """As ``PendingGradients.flush``."""
        kept, self.kept = self.kept, []
        if kept and self.kept_unit is not None:
            self.reduce(self.kept_unit, kept)

    def reduce(self, unit: UnitPlan, weights: list[WeightPlan]) -> None:
        """One launch."""
        while len({id(u) for u, _ in self.pending} - {id(unit)}) >= self.plan.pending_units:
            self.drain_one()
        for weight in weights:
            self.add("RS", BACKWARD, weight, weight.reduce_bytes)
        if weights[0].reduce_bytes and not self.overlap:
            self.add("WAIT", BACKWARD, weights[0])
        self.pending.append((unit, weights))

    def drain(self) -> None:
        """As ``PendingGradients.drain``."""
        self.flush()
        while self.pending:
            self.drain_one()

    def drain_one(self) -> None:
        """As ``PendingGradients.drain_one``."""
        _, weights = self.pending.popleft()
        if weights[0].reduce_bytes and self.overlap:
            self.add("WAIT", DRAIN, weights[0])
        for weight in weights:
            self.add("DRAIN", DRAIN, weight)

    def backward(self) -> None:
        """One backward."""
        plan = self.plan
        if plan.blocks and not plan.policy.per_module:
            self.fetch(plan.blocks[-1], BACKWARD)
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
        for outer in plan.outer:
            for weight in outer.weights:
                self.born(outer, weight)


def simulate(plan: ChunkPlan, micro_batches: int = 1, overlap: bool = True) -> Schedule:
    """The actions of one optimizer step from rest, in the order in which they happen.

    Args:
        micro_batches: forward and backward passes in the step.
        overlap: false for the synchronous path, which waits at each launch.
    """
    simulator = Simulator(plan, overlap)
    for _ in range(micro_batches):
        simulator.forward()
        simulator.backward()
        simulator.drain()
    return simulator.out
