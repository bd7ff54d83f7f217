"""Pure: blocks that hold units of their own, and the rest of such a block (WP-1, WP-2).

The units of a block stand in the order in place of the block. The *rest* of the block, its weights
outside of these units, is gathered at the block's pre-forward. Rests have two slots of their own,
used in turn (one if no block is prefetched), so that a rest may be overwritten at the pre-forward
of the block after the next one. The gradients of a rest are reduced together at the block's
post-backward, and once more at the end of the graph if others come after that: the block runs
several times, or its modules run elsewhere. An empty or replicated rest costs nothing.

A recompute of the whole block runs the forwards of its units once more before their backwards:
:meth:`EnclosingBlocks.recompute` gathers them; it does not begin their reductions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from internsp.schedule.terms import BACKWARD, FORWARD, Action, Unit, W

if TYPE_CHECKING:  # it has the enclosing blocks as a part
    from internsp.schedule.backward import Backward


@dataclass(frozen=True, eq=False)
class Enclosing(Generic[W]):
    """A block that holds units of its own.

    Attributes:
        number: its index among such blocks, in the order of the forward.
        rest: the unit of those of its weights that lie in none of its units.
        first, last: indices of its first and last unit among the queue's blocks.
        recomputed: activation checkpointing recomputes it as a whole.
    """

    name: str
    number: int
    rest: Unit[W]
    first: int
    last: int
    recomputed: bool = False


class EnclosingBlocks(Generic[W]):
    """The enclosing blocks of one chunk: a part of its backward, with one event in forward.

    Args:
        units: the backward of their units.

    Attributes:
        blocks: in the order of the forward.
        open: the block whose backward runs.
    """

    def __init__(self, units: Backward[W], blocks: Sequence[Enclosing[W]]) -> None:
        self.blocks = blocks
        self._units = units
        for block in blocks:
            units.slots.add(block.rest)
        # Number of slots that the rests share.
        self._slots = len({block.rest.slot for block in blocks if block.rest.groups})
        self.open: Enclosing[W] | None = None
        self._lowest = len(blocks)  # number of the last block that this backward has come to
        self._again = False  # the open block's recompute has run units
        # Blocks whose rest was reduced, in the present graph, with all gradients so far.
        self._reduced: set[int] = set()

    def root_pre_forward(self, out: list[Action[W]]) -> None:
        """The model's pre-forward, after the queue's own gathers: gather the first rest."""
        self._gather(0, FORWARD, out)

    def pre_forward(self, block: Enclosing[W]) -> list[Action[W]]:
        """A block's pre-forward: gather its rest, and prefetch the next one."""
        out: list[Action[W]] = []
        self._gather(block.number, FORWARD, out)
        if self._slots > 1:
            self._gather(block.number + 1, FORWARD, out)
        return out

    def pre_backward(self, block: Enclosing[W], all_ranks: bool) -> list[Action[W]]:
        """A block's pre-backward: the gradient of its output has arrived.

        Args:
            all_ranks: as in :meth:`internsp.schedule.backward.Backward.pre_backward`.
        """
        out: list[Action[W]] = []
        if self.open is not block:
            self.pre_backward_of_unit(block.last, all_ranks, out)
        self.reduce_again(block.number)
        return out

    def recompute(self, unit: Unit[W]) -> list[Action[W]]:
        """The pre-forward of a unit within the recompute of its block."""
        self._again = True
        coming = self._units.passes.order.blocks[unit.block + 1 : unit.block + 2]
        following = coming[0] if coming and coming[0].around == unit.around else None
        return self._units.recompute(unit, following)

    def end(self, all_ranks: bool, lowest: int, out: list[Action[W]]) -> None:
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

    def reduce_again(self, number: int) -> None:
        """A backward of the block comes, or of one of its units: also on a rank without gradients
        of its rest, that is reduced at the end if it was reduced before."""
        self._reduced.discard(number)

    def grad_ready(self, unit: Unit[W]) -> None:
        """A gradient of a weight of a rest is ready: the same if no backward of the block comes."""
        for block in self.blocks:
            if block.rest is unit:
                self.reduce_again(block.number)

    def prefetchable(self) -> list[Unit[W]]:
        """Rests that can be gathered before a forward and stay there until it uses them."""
        return [block.rest for block in self.blocks[: self._slots]]

    def pre_backward_of_unit(self, unit: int, all_ranks: bool, out: list[Action[W]]) -> None:
        """Backward comes to unit number ``unit``: close the blocks above it, open its own."""
        while self._lowest and self.blocks[self._lowest - 1].last >= unit:
            block = self.blocks[self._lowest - 1]
            if all_ranks or block.first <= unit:
                self._over(all_ranks, out)
                if all_ranks:  # units between the two blocks that got no gradient on this rank
                    self._units.pass_over_blocks(block.last, out)
                self._begin(block, all_ranks, out)
            self._lowest = block.number
        if self.open is not None and unit < self.open.first:
            self._over(all_ranks, out)

    # inside

    def _begin(self, block: Enclosing[W], all_ranks: bool, out: list[Action[W]]) -> None:
        self._units.post_backward(out)
        self.open, self._again = block, False
        self._gather(block.number, BACKWARD, out)
        if self._slots > 1:
            self._gather(block.number - 1, BACKWARD, out)
        if block.recomputed:  # its recompute may come before its last unit's gradient or after
            last = self._units.passes.order.blocks[block.last]
            self._units.pre_backward_of_unit(last, all_ranks, None, out)

    def _over(self, all_ranks: bool, out: list[Action[W]]) -> None:
        """The open block's post-backward, if one is open."""
        if self.open is not None:
            self._finish(self.open.first if all_ranks else None, out)

    def _finish(self, first: int | None, out: list[Action[W]]) -> None:
        """The open block's post-backward.

        Args:
            first: its first unit, if every rank acts for every block down to it; else ``None``.
        """
        block = self.open
        assert block is not None, "the caller has looked"
        if first is not None:
            if block.recomputed and not self._again:
                # It got no gradient on this rank: gather what its recompute would have gathered.
                for unit in self._units.passes.order.blocks[block.first : block.last + 1]:
                    out += self.recompute(unit)
                    self._units.leave_recompute(unit)
            self._units.pass_over_blocks(first - 1, out)
        self._units.post_backward(out)
        self.open = None
        self._reduce(block, out)

    def _reduce(self, block: Enclosing[W], out: list[Action[W]]) -> None:
        if block.number not in self._reduced:
            self._reduced.add(block.number)
            self._units.reduce_unit(block.rest, out, last=True)

    def _gather(self, number: int, phase: str, out: list[Action[W]]) -> None:
        if 0 <= number < len(self.blocks):
            self._units.slots.gather_unit(self.blocks[number].rest, phase, out)
