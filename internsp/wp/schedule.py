"""Pure: the words of a schedule, and its limits (WP-1, WP-2).

Three orders make up a pass. Forward gathers by first use: what lies beside the blocks, the blocks,
the head. Backward gathers by reverse last use, a block that recomputes in its forward order.
Reductions go by the reverse of use. All ranks keep them, whatever their data leave unused.
:class:`internsp.wp.queue.GatherQueue` follows gathers through a pass,
:class:`internsp.wp.reductions.Reductions` the gradients; both answer events with :class:`Action`.

Nothing here imports torch: weights and units are what has the attributes of :class:`Weight` and
:class:`Unit`, in a plan or at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

FORWARD, RECOMPUTE, BACKWARD, FINISH = "forward", "recompute", "backward", "finish"

ALL_GATHER, WAIT, USE, FREE = "AG", "WAIT", "USE", "FREE"
REDUCE_SCATTER, ACCUMULATE, FINISH_OLDEST, NEXT_PASS = "RS", "ACCUMULATE", "FINISH", "NEXT"
EXCHANGE, FINISH_EXCHANGE = "EX", "FINISH_EXCHANGE"
NEAR_GATHER = "AG_NEAR"


class Weight(Protocol):
    """A weight as the schedule sees it."""

    @property
    def name(self) -> str:
        """Fully qualified."""

    @property
    def moves(self) -> bool:
        """Whether it is gathered at all: false where the shard is the unsharded weight."""

    @property
    def travels(self) -> bool:
        """Whether its collectives take time: false in a weight group of one."""

    @property
    def slices(self) -> int:
        """Near ranks that keep slices of it after its first gather of a step; 0: none do."""

    @property
    def trained(self) -> bool:
        """Whether it has a gradient, as of the last forward: a user may freeze and thaw it."""

    @property
    def compute_dtype(self) -> Hashable:
        """What a slot must hold of it, now: autocast may decide it."""

    @property
    def gradient_bytes(self) -> int:
        """Of its unsharded gradient as it travels, padded."""


W = TypeVar("W", bound=Weight)


class Group(Generic[W]):
    """What travels in one collective: one large weight, or small neighbors of one kind.

    Attributes:
        weights: in the order of use.
        start, end: its bytes in the slot of its unit.
    """

    __slots__ = ("end", "start", "weights")

    def __init__(self, weights: Sequence[W], start: int, end: int) -> None:
        self.weights = tuple(weights)
        self.start, self.end = start, end

    @property
    def name(self) -> str:
        """Its first weight's."""
        return self.weights[0].name


@dataclass(eq=False)
class Unit(Generic[W]):
    """Weights that come and go together: a block, the embedding, the head.

    Attributes:
        weights, groups: in the order of use; groups as they travel, with their bytes in the slot.
        slot: index of its slot, fixed by the schedule (DESIGN 4.1).
        block: index among the chunk's blocks; -1 beside them.
        recomputed: activation checkpointing recomputes it, so that backward gathers in its order.
        trigger_at: position of the first weight used after the prefetch trigger; -1: its entry is
            the trigger.
        at_entry: the block takes all its weights at its entry (compiled, or all of them small).
        around: number of the enclosing block that it is a unit of; -1: of none.
    """

    name: str
    weights: Sequence[W]
    slot: int = -1
    block: int = -1
    recomputed: bool = False
    trigger_at: int = -1
    at_entry: bool = False
    around: int = -1
    groups: Sequence[Group[W]] = field(default=(), init=False)

    @property
    def has_trigger(self) -> bool:
        """Whether a module inside it is the prefetch trigger; else its entry is."""
        return self.trigger_at >= 0


U = TypeVar("U", bound=Unit[Any])


class Action(NamedTuple):
    """One element of a schedule; ``kind`` as in :mod:`internsp.trace`.

    ``AG``: gather ``weights`` in one launch, into bytes that the ``others`` had; ``AG_NEAR``: from
    slices within the near group (an ``AG`` of fewer bytes in a trace). ``WAIT``: for the
    gather that brings ``weights`` and all ``others`` of its launch. ``RS``: reduce their
    gradients in one launch, zeros where there is none. ``ACCUMULATE``: add their unsharded
    gradients to their sums. ``FINISH``: wait for the oldest reduction. ``EX``: exchange the
    reduced gradients of ``weights`` between replicas (``unit`` is what they are a
    :class:`internsp.wp.reductions.Parcel` of); ``FINISH_EXCHANGE``: wait for the oldest of these.
    ``NEXT``: the pass gathers nothing more, so that a pipeline may begin the next one's gathers.
    """

    kind: str
    phase: str
    unit: Any
    weights: Sequence[Any]
    others: Sequence[Any] = ()


def groups_of(
    weights: Sequence[W],
    small: Callable[[W], bool],
    alike: Callable[[W], object],
    extent: Callable[[W], tuple[int, int]],
) -> tuple[Group[W], ...]:
    """``weights`` as they travel: neighbors that are ``small`` and ``alike`` together (DESIGN 8).

    This is the one place that states the rule.

    Args:
        small: whether a weight is small.
        alike: what those that travel together have in common, of a weight.
        extent: first and last byte (excluded) of a weight in its slot.
    """
    found: list[list[W]] = []
    for weight in weights:
        last = found[-1][-1] if found else None
        if last is not None and small(last) and small(weight) and alike(last) == alike(weight):
            found[-1].append(weight)
        else:
            found.append([weight])
    return tuple(Group(g, extent(g[0])[0], extent(g[-1])[1]) for g in found)


def runs_of(weights: Sequence[W], alike: Callable[[W], object]) -> list[list[W]]:
    """``weights`` of one group as their messages have them: neighbors that are ``alike`` together.

    One run, but where autocast is on for a part of the group only: a message has one dtype.
    """
    return [list(run) for _, run in groupby(weights, alike)]


@dataclass(frozen=True)
class Policy:
    """The limits of a chunk's gathers, and who has which slot.

    Attributes:
        blocks: transformer blocks of the chunk.
        depth: blocks gathered ahead, at most; the chunk has ``depth + 1`` slots. With 0 each block
            is gathered when it is entered, after the one before has left the only slot.
        depths: of each block, where they differ.
        named: how many of the blocks that come next a block's trigger gathers, where a rule has
            said it of one direction: ``(phase, block) -> number``; the head counts as one.
        per_module: in forward the limit is the next group after each use (InternEvo's prefetch per
            module). A backward gathers a block at its entry, and the first group of the block
            before: between a block's reductions, whose moments data decide, no gather is launched.
        kept: blocks with slots of their own, that stay unsharded until the optimizer step.
        accumulate_whole: sum unsharded gradients and reduce them in the last micro-batch only.
        rolling: no limit but the bytes: a group is gathered as soon as those it takes are free.
        one_order: passes hold exchanges of sequences or tokens, and launches of all groups must
            have one order on all ranks, whatever data leave idle: on a device, whose groups share
            its queues, and where each launch is waited for at once. Then no gather and no
            reduction of a block waits for a weight's use: forward gathers at the block's entry,
            backward reduces when the block's is over.
    """

    blocks: int
    depth: int = 1
    per_module: bool = False
    kept: frozenset[int] = frozenset()
    accumulate_whole: bool = False
    rolling: bool = False
    one_order: bool = False
    depths: tuple[int, ...] = ()
    named: Mapping[tuple[str, int], int] = field(default_factory=dict)

    def one_by_one(self, phase: str) -> bool:
        """Whether a block's gathers come group by group, each at the use of the one before."""
        return self.per_module and phase == FORWARD and not self.one_order

    @property
    def slots(self) -> int:
        """Slots of the chunk's blocks (WP-1)."""
        return len(slot_sizes([0] * self.blocks, self.depth, self.kept))

    def slot(self, block: int) -> int:
        """The slot of a block, fixed: saved views alias it (DESIGN 4.1)."""
        return slot_of(block, self.blocks, self.depth, self.kept)

    def targets(self, block: int, phase: str) -> list[int]:
        """Blocks to have in flight once ``block``'s trigger fires, nearest first.

        ``blocks`` itself stands for what follows the last block in forward: the head, which has a
        slot of its own. It comes with the last block at the latest: a rank that does not use it
        gathers it all the same (WP-2).
        """
        if self.per_module or self.rolling:
            return []
        depth = self.depths[block] if self.depths else self.depth
        if phase == FORWARD and block == self.blocks - 1:
            return [self.blocks]
        coming = range(block + 1, self.blocks + 1) if phase == FORWARD else range(block - 1, -1, -1)
        if (phase, block) in self.named:
            return [*coming[: self.named[phase, block]]]
        return reach(coming, depth, self.kept)

    @staticmethod
    def order(groups: Sequence[Any], phase: str, recomputed: bool) -> Sequence[Any]:
        """Order of a unit's gathers: of use in forward and recompute, else its exact reverse."""
        return groups[::-1] if phase == BACKWARD and not recomputed else groups



def slot_sizes(sizes: Sequence[int], depth: int, kept: Collection[int]) -> list[int]:
    """Bytes of each slot of a chunk's blocks: the shared ones first, as large as the largest."""
    moving = [size for block, size in enumerate(sizes) if block not in kept]
    shared = [max(moving)] * min(depth + 1, len(moving)) if moving else []
    return [*shared, *(sizes[block] for block in sorted(kept))]


def slot_of(block: int, blocks: int, depth: int, kept: Collection[int]) -> int:
    """Index of ``block``'s slot in :func:`slot_sizes`."""
    before = sum(other < block for other in kept)
    shared = min(depth + 1, blocks - len(kept))
    return shared + before if block in kept else (block - before) % shared


def reach(coming: Iterable[int], depth: int, kept: Collection[int]) -> list[int]:
    """Of the blocks that come next those to have in flight: ``depth`` that share slots.

    Kept ones on the way need no shared slot, so they do not count; but no more than ``depth``
    of them are passed, or the first pass would gather a long run of them at once and get in the
    way of the sequence exchange.
    """
    chosen: list[int] = []
    left = {True: depth, False: depth}
    for block in coming:
        if not left[block in kept]:
            break
        left[block in kept] -= 1
        chosen.append(block)
        if not left[False]:
            break
    return chosen
