"""Pure: the terms of a schedule, and its limits (WP-1, WP-2).

A pass has three orders. Forward gathers by first use: the units outside of the blocks, the blocks,
the head. Backward gathers by reverse last use; a block that is recomputed, in forward order.
Reductions go by reverse first use. The orders are the same on all ranks, whichever weights their
data leave unused. :class:`internsp.schedule.queue.GatherQueue` follows the gathers of a pass,
:class:`internsp.schedule.reductions.Reductions` the gradients; both answer events with
:class:`Action`.

Nothing here imports torch: a plan and a run have weights and units of their own, with the
attributes of :class:`Weight` and :class:`Unit`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Generic, NamedTuple, Protocol, TypeVar

FORWARD, RECOMPUTE, BACKWARD, FINISH = "forward", "recompute", "backward", "finish"

ALL_GATHER, WAIT, USE, FREE = "AG", "WAIT", "USE", "FREE"
REDUCE_SCATTER, ACCUMULATE, FINISH_OLDEST, NEXT_PASS = "RS", "ACCUMULATE", "FINISH", "NEXT"
EXCHANGE, FINISH_EXCHANGE = "EX", "FINISH_EXCHANGE"
NEAR_GATHER, GO_ON = "AG_NEAR", "GO_ON"


class Weight(Protocol):
    """A weight as the schedule sees it."""

    @property
    def name(self) -> str:
        """Fully qualified name."""

    @property
    def needs_gather(self) -> bool:
        """Whether it is gathered at all: false if the shard is the unsharded weight."""

    @property
    def needs_wait(self) -> bool:
        """Whether its gathers must be waited for: false in a weight group of one."""

    @property
    def slices(self) -> int:
        """Number of near ranks that keep slices of it after a step's first gather, or 0."""

    @property
    def trained(self) -> bool:
        """Whether it gets a gradient; noted at each forward, since a user may freeze it."""

    @property
    def compute_dtype(self) -> Hashable:
        """The dtype that it is gathered in now; autocast may change it."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of its padded unsharded gradient, in the dtype in which it is reduced."""


W = TypeVar("W", bound=Weight)
G = TypeVar("G")


class Group(Generic[W]):
    """A parameter group: what travels in one collective, one large weight or small neighbors.

    Attributes:
        weights: in the order of use.
        start, end: its byte range in the slot of its unit.
    """

    __slots__ = ("end", "start", "weights")

    def __init__(self, weights: Sequence[W], start: int, end: int) -> None:
        self.weights = tuple(weights)
        self.start, self.end = start, end

    @property
    def name(self) -> str:
        """Name of its first weight."""
        return self.weights[0].name


@dataclass(eq=False)
class Unit(Generic[W]):
    """Weights that are gathered and released together: a block, the embedding, the head.

    Attributes:
        weights, groups: in the order of use; each group has its byte range in the slot.
        slot: index of its slot, fixed by the schedule (design.md 4.1).
        block: index among the chunk's blocks; -1 for a unit outside of the blocks.
        recomputed: activation checkpointing recomputes it, so that backward gathers it in forward
            order.
        trigger_at: position of the first weight used after the prefetch trigger; -1 if the
            trigger is the block's entry.
        unshard_at_entry: the block unshards all its weights at its entry (it is compiled, or all of
            its weights are small).
        around: number of the enclosing block that it is a unit of; -1 if it is in none.
    """

    name: str
    weights: Sequence[W]
    slot: int = -1
    block: int = -1
    recomputed: bool = False
    trigger_at: int = -1
    unshard_at_entry: bool = False
    around: int = -1
    groups: Sequence[Group[W]] = field(default=(), init=False)


@dataclass(frozen=True, eq=False)
class Parcel(Generic[W]):
    """Reduced gradients that replicas exchange in one collective.

    Attributes:
        name: name for the trace and errors.
        nbytes: bytes of the buffers that are held while it is in flight.
    """

    name: str
    weights: Sequence[W]
    nbytes: int


class Action(NamedTuple, Generic[W]):
    """One element of a schedule; ``kind`` as in :mod:`internsp.base.trace`.

    ``AG``: all-gather ``weights`` in one launch, into bytes that held the ``others``. ``AG_NEAR``:
    the same from slices within the near group (a trace shows it as an ``AG`` of fewer bytes).
    ``WAIT``: wait for the gather of ``weights``; ``others`` are all weights of its launch. ``USE``,
    ``FREE``: ``weights`` are used, or released. ``RS``: reduce-scatter the gradients of ``weights``
    in one launch, zeros where there is none. ``ACCUMULATE``: add the unsharded gradients to their
    sums. ``FINISH``: wait for the oldest reduction. ``EX``: exchange the reduced gradients of
    ``parcel`` between replicas. ``FINISH_EXCHANGE``: wait for the oldest exchange. ``NEXT``: the
    pass gathers nothing more, so that a pipeline may start the gathers of the next pass.

    ``phase``: :data:`FORWARD`, :data:`RECOMPUTE`, :data:`BACKWARD` or :data:`FINISH`; ``"settle"``
    for a wait that is not for a use, but because the bytes, or the shards, are about to be written.

    ``unit``: the one that holds ``weights``; ``None`` where no event of one unit is the cause.
    """

    kind: str
    phase: str
    unit: Unit[W] | None
    weights: Sequence[W]
    others: Sequence[W] = ()
    parcel: Parcel[W] | None = None


def runs_of(weights: Sequence[W], alike: Callable[[W], object]) -> list[list[W]]:
    """Neighbors among the ``weights`` of one group that are ``alike``: each run is one message.

    There is one run, unless autocast is on for a part of the group: a message has one dtype.
    """
    return [list(run) for _, run in groupby(weights, alike)]


@dataclass(frozen=True)
class Policy:
    """The limits of a chunk's gathers, and the slot of each block.

    Attributes:
        blocks: number of transformer blocks of the chunk.
        depth: the most blocks that are prefetched; the chunk has ``depth + 1`` slots. With 0
            each block is gathered at its pre-forward, when the block before has left the only slot.
        depths: the depth of each block, if they differ.
        named: ``(phase, block) -> number``: how many blocks ``block``'s trigger prefetches in
            ``phase``, where a rule sets this; the head counts as one.
        per_module: in forward each use raises the limit by one group (InternEvo's prefetch per
            module). Backward gathers a block at its pre-backward, and the first group of the block
            before it: no gather is launched between the reductions of a block, since data decide
            when these are launched.
        kept: blocks with slots of their own, which stay unsharded from a forward to its backward
            and, within ``unchanged()``, until the optimizer step.
        accumulate_whole: sum unsharded gradients, and reduce them in the last micro-batch only.
        rolling: there is no limit: a group is gathered as soon as its bytes are free.
        one_order: the passes also exchange sequences or tokens, and the launches of all process
            groups together must have one order on all ranks, whatever data leave unused: on a
            device, whose process groups share its queues, and where each launch is waited for at
            once. Or ranks ask each other which block comes next (``unexpected_order``), between
            launches that each is waited for. Then no gather and no reduction depends on the use of
            a weight: forward gathers a block at its pre-forward, backward reduces it at its
            post-backward.
        two_levels: sums go on from near ranks to others, and a wait for one is a wait for what they
            have sent on: they do so where a unit has been reduced, not where data decide.
    """

    blocks: int
    depth: int = 1
    per_module: bool = False
    kept: frozenset[int] = frozenset()
    accumulate_whole: bool = False
    rolling: bool = False
    one_order: bool = False
    two_levels: bool = False
    depths: tuple[int, ...] = ()
    named: Mapping[tuple[str, int], int] = field(default_factory=dict)

    def one_by_one(self, phase: str) -> bool:
        """Whether each group of a block is gathered at the use of the group before it."""
        return self.per_module and phase == FORWARD and not self.one_order

    @property
    def slots(self) -> int:
        """Number of slots of the chunk's blocks (WP-1)."""
        return len(slot_sizes([0] * self.blocks, self.depth, self.kept))

    def slot(self, block: int) -> int:
        """Index of a block's slot in :func:`slot_sizes`: it is fixed, as saved views alias the slot
        (design.md 4.1)."""
        before = sum(other < block for other in self.kept)
        shared = min(self.depth + 1, self.blocks - len(self.kept))
        return shared + before if block in self.kept else (block - before) % shared

    def targets(self, block: int, phase: str) -> list[int]:
        """Blocks to prefetch when ``block``'s trigger fires, the nearest first.

        The number ``blocks`` stands for the head, which follows the last block in forward and has a
        slot of its own. The last block's trigger prefetches it at the latest, also on a rank that
        does not use it (WP-2).
        """
        if self.per_module or self.rolling:
            return []
        depth = self.depths[block] if self.depths else self.depth
        if phase == FORWARD and block == self.blocks - 1:
            return [self.blocks]
        coming = range(block + 1, self.blocks + 1) if phase == FORWARD else range(block - 1, -1, -1)
        if (phase, block) in self.named:
            return [*coming[: self.named[phase, block]]]
        return prefetch_targets(coming, depth, self.kept)

    @staticmethod
    def order(groups: Sequence[G], phase: str, recomputed: bool) -> Sequence[G]:
        """``groups`` of a unit in the order of gathers: of use, or in backward its reverse."""
        return groups[::-1] if phase == BACKWARD and not recomputed else groups


def slot_sizes(sizes: Sequence[int], depth: int, kept: Collection[int]) -> list[int]:
    """Bytes of each slot of a chunk's blocks; the shared ones, of the largest size, come first."""
    moving = [size for block, size in enumerate(sizes) if block not in kept]
    shared = [max(moving)] * min(depth + 1, len(moving)) if moving else []
    return [*shared, *(sizes[block] for block in sorted(kept))]


def prefetch_targets(coming: Iterable[int], depth: int, kept: Collection[int]) -> list[int]:
    """Of the blocks that ``coming`` lists, those to prefetch: ``depth`` blocks that share slots.

    Kept blocks among them do not count, since they need no shared slot. At most ``depth`` of these
    are prefetched, too: otherwise the first pass would gather a long run of kept blocks at once, in
    the way of the sequence exchange.
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
