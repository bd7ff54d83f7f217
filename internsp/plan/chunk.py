"""Pure: a chunk as ``internsp plan``, ``parallelize`` and :mod:`internsp.plan.simulate` see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from internsp.host import WEIGHTS
from internsp.packed import PackedShard
from internsp.quantize import QuantizedShard
from internsp.wp.enclosing import Enclosing
from internsp.wp.reductions import Parcel
from internsp.wp.schedule import Policy, Unit, groups_of, slot_sizes


@dataclass(frozen=True, eq=False)
class WeightPlan:
    """One weight as the schedule sees it; bytes are per rank and message payload."""

    name: str
    gather_bytes: int
    reduce_bytes: int
    slot_bytes: int
    shard_bytes: int
    slices: int = 0
    """See :class:`internsp.wp.schedule.Weight`."""
    trainable: bool = True
    moves: bool = True
    """See :class:`internsp.wp.schedule.Weight`; not in a weight group of one, without a cast."""
    small: bool = False
    """Travels together with its small neighbors."""
    quantized: QuantizedShard | PackedShard | None = None
    """What is gathered of each shard, where it is rounded, or a user's function packs it."""
    expert: bool = False
    """Travels over the experts' weight group, which is not the dense weights'."""
    gather_dtype: torch.dtype | None = None
    """What it is gathered in; what travels together has one dtype."""
    reduce_dtype: torch.dtype | None = None
    """What its gradient travels in."""
    autocasts: bool = False
    """Whether an active autocast decides its dtype."""
    dtype: torch.dtype = torch.float32
    """At rest."""
    offload: frozenset[str] = frozenset()
    """What of it lies in host memory."""
    gradient_bytes: int = 0
    """Of its unsharded gradient as it travels, padded."""
    unsharded_bytes: int = 0
    """As it is gathered, padded."""
    sum_bytes: int = 0
    """Of its unsharded gradient, summed over micro-batches in fp32 or wider."""

    def kind(self) -> tuple[object, ...]:
        """What those that travel together have in common."""
        return (
            self.expert, self.gather_dtype, self.reduce_dtype, self.autocasts, self.hosted,
            self.slices,
        )  # fmt: skip

    @property
    def hosted(self) -> bool:
        """Whether its shard lies in host memory."""
        return WEIGHTS in self.offload

    @property
    def slice_bytes(self) -> int:
        """Of this rank's slice for gathers within its near group."""
        return self.unsharded_bytes // self.slices if self.slices else 0

    @property
    def near_bytes(self) -> int:
        """What a gather within the near group brings."""
        return self.unsharded_bytes - self.slice_bytes

    @property
    def travels(self) -> bool:
        """See :class:`internsp.wp.schedule.Weight`."""
        return self.reduce_bytes > 0 or self.hosted

    @property
    def trained(self) -> bool:
        """See :class:`internsp.wp.schedule.Weight`."""
        return self.trainable

    compute_dtype = None  # what a slot must hold of it: a plan has one dtype


@dataclass(eq=False)
class UnitPlan(Unit[WeightPlan]):
    """One unit of a plan."""

    weights: tuple[WeightPlan, ...]

    def __post_init__(self) -> None:
        self.groups = groups_of(self.weights, lambda w: w.small, WeightPlan.kind, self.extent)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the unit's unsharded weights in a slot."""
        return slot_bytes(self.weights)

    def extent(self, weight: WeightPlan) -> tuple[int, int]:
        """First and last byte (excluded) of a weight in the slot."""
        start = slot_bytes(self.weights[: self.weights.index(weight)])
        return start, start + weight.slot_bytes


def slot_bytes(weights: Sequence[WeightPlan]) -> int:
    """Bytes of unsharded weights in a slot."""
    return sum(w.slot_bytes for w in weights if w.moves)


@dataclass(frozen=True)
class Line:
    """One line of a schedule: what happens to one weight; ``kind`` as in :mod:`internsp.trace`."""

    kind: str
    phase: str
    weight: str
    nbytes: int = 0
    near: bool = False
    """Of a gather: from slices within the near group."""

    def line(self) -> str:
        """As :meth:`internsp.trace.Event.line`."""
        return f"{self.kind} {self.phase} {self.weight}"


@dataclass
class Schedule:
    """The ordered actions of one optimizer step."""

    actions: list[Line] = field(default_factory=list)

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
    """Everything :func:`internsp.plan.simulate.simulate` needs to know about a chunk."""

    policy: Policy
    blocks: tuple[UnitPlan, ...]
    embedding: UnitPlan | None
    head: UnitPlan | None
    pending_units: int
    others: tuple[UnitPlan, ...] = ()
    enclosing: tuple[Enclosing[UnitPlan], ...] = ()
    """Blocks that hold units of their own; their rests' slots are shared by turns."""
    exchanged: bool = False
    """Whether replicas hold the same weights, and exchange reduced gradients."""
    order: tuple[int, ...] = ()
    """Indices of the blocks as they run, where that was learned; empty: as declared."""

    @property
    def runs(self) -> tuple[UnitPlan, ...]:
        """The blocks in the order in which they run."""
        return tuple(self.blocks[block] for block in self.order) or self.blocks

    @property
    def run_policy(self) -> Policy:
        """The policy of :attr:`runs`. Where a block recurs, "rolling" is block by block: bytes that
        its one run frees would go to other blocks before its next one comes."""
        policy, order = self.policy, self.order
        if not order:
            return policy
        return replace(
            policy,
            blocks=len(order),
            kept=frozenset(place for place, block in enumerate(order) if block in policy.kept),
            depths=tuple(policy.depths[block] for block in order) if policy.depths else (),
            rolling=policy.rolling and len(set(order)) == len(order),
            named={
                (phase, place): number
                for (phase, block), number in policy.named.items()
                for place in range(len(order))
                if order[place] == block
            },
        )

    @property
    def outer(self) -> tuple[UnitPlan, ...]:
        """Gathered at the model's entry and reduced at the end of backward."""
        return (*((self.embedding,) if self.embedding is not None else ()), *self.others)

    @cached_property
    def pending_bytes(self) -> int:
        """Unsharded gradients that may be in flight: of the ``pending_units`` largest units."""
        sizes = [sum(w.gradient_bytes for w in u.weights if w.trainable) for u in self.units]
        return sum(sorted(sizes, reverse=True)[: self.pending_units])

    @property
    def units(self) -> tuple[UnitPlan, ...]:
        """All of them, each once (a tied head is the embedding)."""
        head = () if self.head is None or self.head is self.embedding else (self.head,)
        return (*self.blocks, *self.outer, *self.rests, *head)

    @property
    def rests(self) -> tuple[UnitPlan, ...]:
        """What of enclosing blocks lies in none of their units."""
        return tuple(each.rest for each in self.enclosing if each.rest.weights)

    @property
    def parcels(self) -> list[Parcel[WeightPlan]]:
        """What replicas of a ``ZeroOptimizer`` exchange at once: a unit's sums, of weights of one
        axis. In the order in which a backward completes them."""
        above = [self.head] if self.head is not None and self.head not in self.outer else []
        run = dict.fromkeys(self.runs)
        idle = [unit for unit in reversed(self.blocks) if unit not in run]
        return [
            Parcel(unit.name, weights, sum(w.shard_bytes for w in weights))
            for unit in (*above, *reversed(run), *self.outer, *self.rests, *idle)
            for expert in reversed(dict.fromkeys(w.expert for w in unit.weights))
            for weights in [tuple(w for w in unit.weights if w.expert == expert)]
        ]

    def slots(self) -> list[int]:
        """Bytes of each slot: the pool's exact size (WP-1)."""
        policy = self.policy
        own = slot_sizes([u.slot_bytes for u in self.blocks], policy.depth, policy.kept)
        sizes = dict(enumerate(own))
        for unit in self.units:
            if unit.block < 0:
                sizes[unit.slot] = max(unit.slot_bytes, sizes.get(unit.slot, 0))
        return [sizes[i] for i in sorted(sizes)]

    def lowest_bytes(self) -> int:
        """Of all slots, if no unit were gathered ahead and none stayed unsharded."""
        beside = {unit.slot: unit.slot_bytes for unit in (*self.outer, self.head) if unit}
        blocks = slot_sizes([unit.slot_bytes for unit in self.blocks], 0, ())
        rest = max((unit.slot_bytes for unit in self.rests), default=0)
        return sum(blocks) + rest + sum(beside.values())
