"""Pure: blocks that hold units of their own, and the rest of such a block (WP-1, WP-2).

The units of a block stand in the gather queue in place of the block. The *rest* of the block, its
weights outside of these units, is gathered at the block's pre-forward. Rests have two slots of
their own, used in turn (one if no block is prefetched), so that a rest may be overwritten at the
pre-forward of the block after the next one. The gradients of a rest are reduced together at the
block's post-backward. An empty or replicated rest costs nothing.

A recompute of the whole block runs the forwards of its units once more before their backwards:
:meth:`GatherQueue.recompute` gathers them; it does not begin their reductions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from internsp.schedule.queue import GatherQueue
from internsp.schedule.terms import BACKWARD, FORWARD, Action, U, W


@dataclass(frozen=True, eq=False)
class Enclosing(Generic[U]):
    """A block that holds units of its own.

    Attributes:
        number: its index among such blocks, in the order of the forward.
        rest: the unit of those of its weights that lie in none of its units.
        first, last: indices of its first and last unit among the queue's blocks.
        recomputed: activation checkpointing recomputes it as a whole.
    """

    name: str
    number: int
    rest: U
    first: int
    last: int
    recomputed: bool = False


class EnclosingBlocks(Generic[U, W]):
    """The enclosing blocks of one chunk. The chunk's gather queue passes their events on to this.

    Attributes:
        blocks: in the order of the forward.
        slots: number of slots that the rests share.
        open: the block whose backward runs.
    """

    def __init__(self, queue: GatherQueue[U, W], blocks: Sequence[Enclosing[U]]) -> None:
        self.queue, self.blocks = queue, blocks
        if blocks:
            queue.enclosing = self
        for block in blocks:
            queue.add(block.rest)
        self.slots = len({block.rest.slot for block in blocks if block.rest.groups})
        self.open: Enclosing[U] | None = None
        self._lowest = len(blocks)  # number of the last block that this backward has come to
        self._again = False  # the open block's recompute has run units
        self._reduced: set[int] = set()  # blocks whose rest was reduced, in the present graph

    def root_pre_forward(self, out: list[Action]) -> None:
        """The model's pre-forward, after the queue's own gathers: gather the first rest."""
        self._gather(0, FORWARD, out)

    def pre_forward(self, block: Enclosing[U]) -> list[Action]:
        """A block's pre-forward: gather its rest, and prefetch the next one."""
        out: list[Action] = []
        self._gather(block.number, FORWARD, out)
        if self.slots > 1:
            self._gather(block.number + 1, FORWARD, out)
        return out

    def pre_backward(self, block: Enclosing[U], all_ranks: bool) -> list[Action]:
        """A block's pre-backward: the gradient of its output has arrived.

        Args:
            all_ranks: as in :meth:`GatherQueue.pre_backward`.
        """
        out: list[Action] = []
        if self.open is not block:
            self.pre_backward_of_unit(block.last, all_ranks, out)
        return out

    def recompute(self, unit: U) -> list[Action]:
        """The pre-forward of a unit within the recompute of its block."""
        self._again = True
        following = unit.block + 1
        alike = following < len(self.queue.blocks) and (
            self.queue.blocks[following].around == unit.around
        )
        return self.queue.recompute(unit, self.queue.blocks[following] if alike else None)

    def end(self, all_ranks: bool, lowest: int, out: list[Action]) -> None:
        """Backward ends, or goes on to another forward's graph. Called before the queue ends it."""
        if all_ranks:
            self.pre_backward_of_unit(lowest, all_ranks, out)
        if self.open is not None:
            self._finish(max(self.open.first, lowest) if all_ranks else None, out)
        for block in reversed(self.blocks):  # in one order on all ranks, zeros where there is none
            self._reduce(block, out)
        self.reset()

    def reset(self) -> None:
        """No backward runs."""
        self.open, self._lowest = None, len(self.blocks)
        self._reduced.clear()

    def prefetchable(self) -> list[U]:
        """Rests that can be gathered before a forward and stay there until it uses them."""
        return [block.rest for block in self.blocks[: self.slots]]

    def pre_backward_of_unit(self, unit: int, all_ranks: bool, out: list[Action]) -> None:
        """Backward comes to unit number ``unit``: close the blocks above it, open its own."""
        while self._lowest and self.blocks[self._lowest - 1].last >= unit:
            block = self.blocks[self._lowest - 1]
            if all_ranks or block.first <= unit:
                self._over(all_ranks, out)
                if all_ranks:  # units between the two blocks that got no gradient on this rank
                    self.queue.pass_over_blocks(block.last, out)
                self._begin(block, all_ranks, out)
            self._lowest = block.number
        if self.open is not None and unit < self.open.first:
            self._over(all_ranks, out)

    # inside

    def _begin(self, block: Enclosing[U], all_ranks: bool, out: list[Action]) -> None:
        self.queue.post_backward(out)
        self.open, self._again = block, False
        self._gather(block.number, BACKWARD, out)
        if self.slots > 1:
            self._gather(block.number - 1, BACKWARD, out)
        if block.recomputed:  # its recompute may come before its last unit's gradient or after
            self.queue.pre_backward_of_unit(self.queue.blocks[block.last], all_ranks, None, out)

    def _over(self, all_ranks: bool, out: list[Action]) -> None:
        """The open block's post-backward, if one is open."""
        if self.open is not None:
            self._finish(self.open.first if all_ranks else None, out)

    def _finish(self, first: int | None, out: list[Action]) -> None:
        """The open block's post-backward.

        Args:
            first: its first unit, if every rank acts for every block down to it; else ``None``.
        """
        block = self.open
        assert block is not None, "the caller has looked"
        if first is not None:
            if block.recomputed and not self._again:
                # It got no gradient on this rank: gather what its recompute would have gathered.
                for unit in self.queue.blocks[block.first : block.last + 1]:
                    out += self.recompute(unit)
                    self.queue.leave_recompute(unit)
            self.queue.pass_over_blocks(first - 1, out)
        self.queue.post_backward(out)
        self.open = None
        self._reduce(block, out)

    def _reduce(self, block: Enclosing[U], out: list[Action]) -> None:
        if block.number not in self._reduced:
            self._reduced.add(block.number)
            self.queue.reduce_unit(block.rest, out, last=True)

    def _gather(self, number: int, phase: str, out: list[Action]) -> None:
        if 0 <= number < len(self.blocks):
            self.queue.gather(self.blocks[number].rest, phase, out)
