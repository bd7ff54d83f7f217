"""Pure: blocks that hold units of their own, and what is left of such a block (WP-1, WP-2).

A unit below a block takes the block's place in the gather queue. What lies in the block and in
none of its units, its *rest*, is gathered when the block is entered and may be overwritten when the
block after the next one is: rests have slots of their own, two by turns (one where no block gathers
ahead).
Its gradients are reduced together when the block's backward is over. A block whose rest is empty or
replicated costs nothing of that.

A recompute of the whole block, around several units, runs their forwards once more before their
backwards: :meth:`GatherQueue.recompute` gathers them, and no turn of theirs begins by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from internsp.wp.queue import GatherQueue
from internsp.wp.schedule import BACKWARD, FORWARD, Action, U, W


@dataclass(frozen=True, eq=False)
class Enclosing(Generic[U]):
    """One such block.

    Attributes:
        number: its place among them, in the order of the forward.
        rest: what none of its units has; its slot is shared by turns.
        first, last: its units' places among the queue's blocks.
        recomputed: activation checkpointing goes around it as a whole.
    """

    name: str
    number: int
    rest: U
    first: int
    last: int
    recomputed: bool = False


class EnclosingBlocks(Generic[U, W]):
    """The enclosing blocks of one chunk, for its gather queue, which passes its events on.

    Attributes:
        blocks: in the order of the forward.
        open: the one whose backward runs.
    """

    def __init__(self, queue: GatherQueue[U, W], blocks: Sequence[Enclosing[U]]) -> None:
        self.queue, self.blocks = queue, blocks
        if blocks:
            queue.enclosing = self
        for block in blocks:
            queue.add(block.rest)
        self.slots = len({block.rest.slot for block in blocks if block.rest.groups})
        self.open: Enclosing[U] | None = None
        self._lowest = len(blocks)  # the one that this backward has come to
        self._again = False  # the open one's units have run once more, in its recompute
        self._reduced: set[int] = set()  # those whose rest was, in the graph that backward is in

    def begin_forward(self, out: list[Action]) -> None:
        """The model is entered: after what else is gathered then."""
        self._gather(0, FORWARD, out)

    def enter(self, block: Enclosing[U]) -> list[Action]:
        """A block's forward begins: gather its rest, and the next one's."""
        out: list[Action] = []
        self._gather(block.number, FORWARD, out)
        if self.slots > 1:
            self._gather(block.number + 1, FORWARD, out)
        return out

    def enter_backward(self, block: Enclosing[U], everywhere: bool) -> list[Action]:
        """The gradient of a block's output has arrived.

        Args:
            everywhere: as in :meth:`GatherQueue.enter_backward`.
        """
        out: list[Action] = []
        if self.open is not block:
            self.come_to(block.last, everywhere, out)
        return out

    def recompute(self, unit: U) -> list[Action]:
        """In backward the forward of a unit begins: that of a recompute around several."""
        self._again = True
        following = unit.block + 1
        alike = following < len(self.queue.blocks) and (
            self.queue.blocks[following].around == unit.around
        )
        return self.queue.recompute(unit, self.queue.blocks[following] if alike else None)

    def end(self, everywhere: bool, lowest: int, out: list[Action]) -> None:
        """Backward is over, or leaves one forward's graph for another's: before the queue's."""
        if everywhere:
            self.come_to(lowest, everywhere, out)
        if self.open is not None:
            self._finish(max(self.open.first, lowest) if everywhere else None, out)
        for block in reversed(self.blocks):  # in one order on all ranks, zeros where there is none
            self._reduce(block, out)
        self.reset()

    def reset(self) -> None:
        """No backward runs."""
        self.open, self._lowest = None, len(self.blocks)
        self._reduced.clear()

    def with_room(self) -> list[U]:
        """Rests that may be gathered before a forward and are still there when it comes to them."""
        return [block.rest for block in self.blocks[: self.slots]]

    def come_to(self, unit: int, everywhere: bool, out: list[Action]) -> None:
        """Backward comes to the queue's ``unit``: blocks above are over, that around it is open."""
        while self._lowest and self.blocks[self._lowest - 1].last >= unit:
            block = self.blocks[self._lowest - 1]
            if everywhere or block.first <= unit:
                self._over(everywhere, out)
                if everywhere:  # units between the two blocks, without a gradient on this rank
                    self.queue.pass_over(block.last, out)
                self._begin(block, everywhere, out)
            self._lowest = block.number
        if self.open is not None and unit < self.open.first:
            self._over(everywhere, out)

    # inside

    def _begin(self, block: Enclosing[U], everywhere: bool, out: list[Action]) -> None:
        self.queue.close(out)
        self.open, self._again = block, False
        self._gather(block.number, BACKWARD, out)
        if self.slots > 1:
            self._gather(block.number - 1, BACKWARD, out)
        if block.recomputed:  # whether its recompute comes before its last unit's gradient or after
            self.queue.come_to(self.queue.blocks[block.last], everywhere, None, out)

    def _over(self, everywhere: bool, out: list[Action]) -> None:
        if self.open is not None:
            self._finish(self.open.first if everywhere else None, out)

    def _finish(self, first: int | None, out: list[Action]) -> None:
        """The open block's backward is over.

        Args:
            first: the first unit of it through which all ranks go; ``None``: they do not.
        """
        block = self.open
        assert block is not None, "the caller has looked"
        if first is not None:
            if block.recomputed and not self._again:
                # Its data send no gradient through it: what its recompute would gather.
                for unit in self.queue.blocks[block.first : block.last + 1]:
                    out += self.recompute(unit)
                    self.queue.leave_recompute(unit)
            self.queue.pass_over(first - 1, out)
        self.queue.close(out)
        self.open = None
        self._reduce(block, out)

    def _reduce(self, block: Enclosing[U], out: list[Action]) -> None:
        if block.number not in self._reduced:
            self._reduced.add(block.number)
            self.queue.reduce_unit(block.rest, out, last=True)

    def _gather(self, number: int, phase: str, out: list[Action]) -> None:
        if 0 <= number < len(self.blocks):
            self.queue.gather(self.blocks[number].rest, phase, out)
