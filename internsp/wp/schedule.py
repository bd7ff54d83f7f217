"""Pure: blocks + phase -> ordered actions. What the hooks perform, `internsp plan` prints.

:class:`Policy` holds every decision about order, and both the running hooks
(:mod:`internsp.wp.prefetch`) and :mod:`internsp.wp.simulate` ask it, so that the printed schedule
and the recorded trace of a step can be compared line by line (WP-2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch

from internsp.wp.line import launches
from internsp.wp.message import Message
from internsp.wp.resident import reach, slot_of, slot_sizes

T = TypeVar("T")
Step = tuple[str, int] | None

FORWARD, RECOMPUTE, BACKWARD, DRAIN = "forward", "recompute", "backward", "drain"


@dataclass(frozen=True)
class Policy:
    """When what is gathered.

    Attributes:
        blocks: transformer blocks of the chunk.
        depth: blocks gathered ahead; the chunk has ``depth + 1`` slots.
        per_module: in forward, gather the next weight at each weight's use instead of the next
            block at the anchor (InternEvo's prefetch per module). A backward gathers a block's
            weights at its entry, and the first of the block before: between a block's reductions,
            whose moments data decide, no gather is launched (WP-2).
        resident: blocks with slots of their own, that stay whole until the optimizer step.
        together_bytes: whole weights up to this size are small: neighbours share one launch.
        accumulate_whole: sum whole gradients and reduce them in the last micro-batch only.
        rolling: gather each weight as soon as its place in its slot is free, instead of the next
            block at the anchor (:mod:`internsp.wp.line`).
        one_order: passes hold exchanges of sequences or tokens, and launches of all groups must
            have one order on all ranks, whatever data leave idle: on a device, whose groups share
            its queues, and where each launch is waited for at once. Then no gather and no
            reduction of a block waits for a weight's use: forward gathers at the block's entry,
            backward reduces when the block's is over.
    """

    blocks: int
    depth: int = 1
    per_module: bool = False
    resident: frozenset[int] = frozenset()
    together_bytes: int = 0
    accumulate_whole: bool = False
    rolling: bool = False
    one_order: bool = False

    def one_by_one(self, phase: str) -> bool:
        """Whether a block's gathers come weight by weight, each at the use of the one before."""
        return self.per_module and phase == FORWARD and not self.one_order

    def small(self, nbytes: int) -> bool:
        """Whether a whole weight of so many bytes travels together with its small neighbours."""
        return nbytes <= self.together_bytes

    @property
    def slots(self) -> int:
        """Slots of the chunk's blocks (WP-1)."""
        return len(slot_sizes([0] * self.blocks, self.depth, self.resident))

    def slot(self, block: int) -> int:
        """The slot of a block, fixed: saved views alias it (DESIGN 4.1)."""
        return slot_of(block, self.blocks, self.depth, self.resident)

    def ahead(self, block: int, phase: str) -> list[int]:
        """Blocks to have in flight once ``block``'s trigger fires, nearest first.

        ``blocks`` itself stands for what follows the last block in forward: the head.
        """
        if self.per_module or self.rolling:
            return []
        coming = range(block + 1, self.blocks + 1) if phase == FORWARD else range(block - 1, -1, -1)
        return reach(coming, self.depth, self.resident)

    def onward(self, block: int, phase: str) -> Sequence[int]:
        """The blocks from ``block`` on, in the order of a pass."""
        return range(block, self.blocks) if phase == FORWARD else range(block, -1, -1)

    def at_boundary(self, block: int, phase: str) -> bool:
        """Whether ``block`` is the pass's last: what follows its trigger is another pass's."""
        return block == (self.blocks - 1 if phase == FORWARD else 0)

    def exhausted(self, position: int, count: int, block: int, phase: str) -> bool:
        """With prefetch per module: whether a pass gathers nothing after weight ``position``."""
        last = position + 1 == count and self.at_boundary(block, phase)
        return self.one_by_one(phase) and block >= 0 and last

    def follow(self, position: int, count: int, block: int, phase: str) -> Step:
        """With prefetch per module: what to gather once weight ``position`` of the order is used.

        Returns:
            ``("weight", p)``: position ``p`` of the same unit's order; ``("block", b)``: the
            first weight of block ``b`` (``blocks`` stands for the head); ``None``: nothing.
        """
        if not self.one_by_one(phase) or block < 0:
            return None
        return ("weight", position + 1) if position + 1 < count else ("block", block + 1)

    def begins(self, block: int, phase: str) -> int | None:
        """With prefetch per module, of a block gathered whole: of which the first weight follows.

        ``blocks`` itself stands for the head.
        """
        if not self.per_module or self.one_by_one(phase):
            return None
        other = block + (1 if phase == FORWARD else -1)
        return other if other >= 0 else None

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
    coded: Message | None = None
    """What is gathered of each shard, where a codec codes it."""
    expert: bool = False
    """Travels over the experts' weight group, which is not the dense weights'."""
    gather_dtype: torch.dtype | None = None
    """What it is gathered in; what travels together has one dtype."""
    reduce_dtype: torch.dtype | None = None
    """What its gradient travels in."""
    gradient_bytes: int = 0
    """Of its whole gradient as it travels, padded."""
    sum_bytes: int = 0
    """Of its whole gradient, summed over micro-batches in fp32 or wider."""


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
        return slot_bytes(self.weights)

    def extent(self, weight: WeightPlan) -> tuple[int, int]:
        """First and last byte (excluded) of a weight in the slot."""
        start = slot_bytes(self.weights[: self.weights.index(weight)])
        return start, start + weight.slot_bytes


def slot_bytes(weights: Sequence[WeightPlan]) -> int:
    """Bytes of whole weights in a slot."""
    return sum(w.slot_bytes for w in weights if not w.resident)


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
    """Everything :func:`internsp.wp.simulate.simulate` needs to know about a chunk."""

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

    @cached_property
    def pending_bytes(self) -> int:
        """Whole gradients that may be in flight: those of the ``pending_units`` largest units."""
        sizes = [sum(w.gradient_bytes for w in u.weights if w.trainable) for u in self.units]
        return sum(sorted(sizes, reverse=True)[: self.pending_units])

    @property
    def units(self) -> tuple[UnitPlan, ...]:
        """All of them, each once (a tied head is the embedding)."""
        head = () if self.head is None or self.head is self.embedding else (self.head,)
        return (*self.blocks, *self.outer, *head)

    def launches(self, unit: UnitPlan, phase: str) -> list[list[WeightPlan]]:
        """A block's gathers in the order of a pass, as they are launched."""
        order = self.policy.order(unit.weights, phase, unit.recomputed)
        return launches([w for w in order if not w.resident], lambda w: w.small)

    def slots(self) -> list[int]:
        """Bytes of each slot: the pool's exact size (WP-1)."""
        policy = self.policy
        own = slot_sizes([u.slot_bytes for u in self.blocks], policy.depth, policy.resident)
        sizes = dict(enumerate(own))
        sizes |= {unit.slot: unit.slot_bytes for unit in self.units if unit.block < 0}
        return [sizes[i] for i in sorted(sizes)]
