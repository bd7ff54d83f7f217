"""The weights, units and slots of a chunk, and its schedule: what plan and runtime share. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from internsp.base.host import WEIGHTS
from internsp.schedule.enclosing import Enclosing
from internsp.schedule.terms import Group, Parcel, Policy, Unit, slot_sizes

if TYPE_CHECKING:  # loaded where a model uses it
    from internsp.schedule.encoding import Encoding


@dataclass(frozen=True)
class WeightDtypes:
    """In which dtypes a weight lies and travels."""

    shard: torch.dtype = torch.float32
    gather: torch.dtype | None = None
    """In which it is gathered; one for all weights of a parameter group."""
    reduce: torch.dtype | None = None
    """In which its gradient is reduced."""
    autocasts: bool = False
    """Whether an active autocast decides its compute dtype."""


@dataclass(frozen=True, eq=False)
class WeightLayout:
    """One weight as the schedule needs it; bytes are per rank, and of collectives the payload."""

    name: str
    gather_bytes: int
    reduce_bytes: int
    slot_bytes: int
    shard_bytes: int
    slices: int = 0
    """See :class:`internsp.schedule.terms.Weight`."""
    trainable: bool = True
    needs_gather: bool = True
    """See :class:`internsp.schedule.terms.Weight`; false in a weight group of one without a
    cast."""
    far_bytes: int = 0
    """Bytes of its second message where gradients are summed within near groups first, whose
    message is then ``reduce_bytes``; else 0."""
    coalesced: bool = False
    """Shares collectives with its small neighbors."""
    encoding: Encoding | None = None
    """How a shard is gathered as bytes, if it is quantized or a user's function packs it."""
    expert: bool = False
    """Is sharded over the experts' weight group, which is not the dense weights'."""
    dtypes: WeightDtypes = WeightDtypes()
    offload: frozenset[str] = frozenset()
    """Which of its shard, gradient sum and optimizer state are in host memory."""
    gradient_bytes: int = 0
    """Bytes of its padded, unsharded gradient in the dtype in which it is reduced."""
    unsharded_bytes: int = 0
    """Bytes of the padded, unsharded weight in the dtype in which it is gathered, or as its class
    holds it."""

    def coalescing_key(self) -> tuple[object, ...]:
        """What must be equal for weights to share collectives."""
        dtypes = self.dtypes
        return (
            self.expert, dtypes.gather, dtypes.reduce, dtypes.autocasts, self.hosted, self.slices
        )  # fmt: skip

    @property
    def hosted(self) -> bool:
        """Whether its shard lies in host memory."""
        return WEIGHTS in self.offload

    @property
    def slice_bytes(self) -> int:
        """Bytes of this rank's slice for gathers within its near group."""
        return self.unsharded_bytes // self.slices if self.slices else 0

    @property
    def near_bytes(self) -> int:
        """Bytes that a gather within the near group receives."""
        return self.unsharded_bytes - self.slice_bytes

    @property
    def sum_bytes(self) -> int:
        """Bytes of its unsharded gradient summed over micro-batches, in fp32 or wider."""
        size = (self.dtypes.gather or torch.float32).itemsize
        elements = self.gradient_bytes // (self.dtypes.reduce or torch.float32).itemsize
        return elements * max(size, torch.float32.itemsize)

    def reduction_bytes(self, summed: bool) -> int:
        """Most bytes of the buffers of its reduction: what is sent and received, and in two levels
        (:mod:`internsp.wp.two_level`) a copy in another order, and the same of the sums.

        Args:
            summed: received is one part, a sum (:mod:`internsp.wp.backend_sums`).
        """
        if summed:
            return 2 * self.gradient_bytes - self.reduce_bytes
        more = self.gradient_bytes + 4 * self.far_bytes if self.far_bytes else 0
        return 2 * self.gradient_bytes + more

    @property
    def needs_wait(self) -> bool:
        """See :class:`internsp.schedule.terms.Weight`."""
        return self.reduce_bytes > 0 or self.hosted

    @property
    def trained(self) -> bool:
        """See :class:`internsp.schedule.terms.Weight`."""
        return self.trainable

    compute_dtype = None  # unlike the runtime's weights, a planned weight never changes its dtype


@dataclass(eq=False)
class UnitLayout(Unit[WeightLayout]):
    """One unit: its weights, their parameter groups and their byte ranges in a slot."""

    weights: tuple[WeightLayout, ...]

    def __post_init__(self) -> None:
        # Small neighbors that are alike share a group (design.md 8).
        runs = groupby(self.weights, lambda w: w.coalescing_key() if w.coalesced else w)
        found = [[*own] for _, own in runs]
        self.groups = [
            Group(own, self.byte_range(own[0])[0], self.byte_range(own[-1])[1]) for own in found
        ]

    @property
    def slot_bytes(self) -> int:
        """Bytes of the unit's unsharded weights in a slot."""
        return slot_bytes(self.weights)

    def byte_range(self, weight: WeightLayout) -> tuple[int, int]:
        """First byte of a weight in the slot, and the byte after its last."""
        start = slot_bytes(self.weights[: self.weights.index(weight)])
        return start, start + weight.slot_bytes


def slot_bytes(weights: Sequence[WeightLayout]) -> int:
    """Bytes that the unsharded ``weights`` take in a slot."""
    return sum(w.slot_bytes for w in weights if w.needs_gather)


@dataclass(frozen=True, eq=False)
class EnclosingLayout(Enclosing[WeightLayout]):
    """A block that holds units of its own."""

    rest: UnitLayout


@dataclass(frozen=True)
class ScheduleLine:
    """One action on one weight, as a schedule prints it; ``kind`` as in
    :mod:`internsp.base.trace`."""

    kind: str
    phase: str
    weight: str
    nbytes: int = 0
    near: bool = False
    """Within the near group: a gather from slices, or a first sum."""

    def line(self) -> str:
        """The action as text, formatted as by :meth:`internsp.base.trace.Event.line`."""
        return f"{self.kind} {self.phase} {self.weight}"


@dataclass
class Schedule:
    """The ordered actions of one optimizer step."""

    actions: list[ScheduleLine] = field(default_factory=list)

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
class ChunkLayout:
    """A chunk's units and gather policy: all that :func:`internsp.schedule.simulate.simulate`
    needs."""

    policy: Policy
    blocks: tuple[UnitLayout, ...]
    embedding: UnitLayout | None
    head: UnitLayout | None
    pending_units: int
    others: tuple[UnitLayout, ...] = ()
    enclosing: tuple[EnclosingLayout, ...] = ()
    """Blocks that are divided into units; their rests take turns in the same slots."""
    exchanged: bool = False
    """Whether several replicas hold the same weights, and so exchange reduced gradients."""
    order: tuple[int, ...] = ()
    """Indices of the blocks in the order learned from a first step; empty: as declared."""
    reduce_near: int = 0
    """Ranks among which gradients are summed before their sums go to others; 0: none are."""

    @property
    def run_order(self) -> tuple[UnitLayout, ...]:
        """The blocks in the order in which they run."""
        return tuple(self.blocks[block] for block in self.order) or self.blocks

    @property
    def run_policy(self) -> Policy:
        """The policy for :attr:`run_order`.

        Where a block runs twice, "rolling" becomes block by block: the bytes that its first run
        frees would go to other blocks before its next run.
        """
        policy, order = self.policy, self.order
        if not order:
            return policy
        return replace(
            policy,
            blocks=len(order),
            kept=frozenset(
                position for position, block in enumerate(order) if block in policy.kept
            ),
            depths=tuple(policy.depths[block] for block in order) if policy.depths else (),
            rolling=policy.rolling and len(set(order)) == len(order),
            named={
                (phase, position): number
                for (phase, block), number in policy.named.items()
                for position in range(len(order))
                if order[position] == block
            },
        )

    @property
    def root_units(self) -> tuple[UnitLayout, ...]:
        """Units gathered at the model's entry and reduced at the end of backward."""
        return (*((self.embedding,) if self.embedding is not None else ()), *self.others)

    @cached_property
    def pending_bytes(self) -> int:
        """Limit of unsharded gradients in flight: those of the ``pending_units`` largest units."""
        sizes = [sum(w.gradient_bytes for w in u.weights if w.trainable) for u in self.units]
        return sum(sorted(sizes, reverse=True)[: self.pending_units])

    @property
    def units(self) -> tuple[UnitLayout, ...]:
        """All units, each once (a tied head is the embedding)."""
        head = () if self.head is None or self.head is self.embedding else (self.head,)
        return (*self.blocks, *self.root_units, *self.enclosing_rests, *head)

    @property
    def enclosing_rests(self) -> tuple[UnitLayout, ...]:
        """One unit for each enclosing block: its weights that are in none of its other units."""
        return tuple(each.rest for each in self.enclosing if each.rest.weights)

    @property
    def parcels(self) -> list[Parcel[WeightLayout]]:
        """What replicas of a ``ZeroOptimizer`` exchange at once: the gradient sums of a unit's
        weights of one mesh axis. In the order in which a backward completes them."""
        above = [self.head] if self.head is not None and self.head not in self.root_units else []
        run = dict.fromkeys(self.run_order)
        unused = [unit for unit in reversed(self.blocks) if unit not in run]
        return [
            Parcel(unit.name, weights, sum(w.shard_bytes for w in weights))
            for unit in (*above, *reversed(run), *self.root_units, *self.enclosing_rests, *unused)
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

    def min_slot_bytes(self) -> int:
        """Bytes of all slots if no unit were prefetched and none stayed unsharded."""
        others = {unit.slot: unit.slot_bytes for unit in (*self.root_units, self.head) if unit}
        blocks = slot_sizes([unit.slot_bytes for unit in self.blocks], 0, ())
        rest = max((unit.slot_bytes for unit in self.enclosing_rests), default=0)
        return sum(blocks) + rest + sum(others.values())


ALIGNMENT = 256  # bytes, as allocators align and vector loads want it


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment of weights in a slot."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
