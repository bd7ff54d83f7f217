"""Which block a forward must run next (WP-2), and what happens where another one runs.

Gathers are prefetched, and all ranks of a weight group launch them, in one order of blocks: the
declared one. ``unexpected_order`` allows others: :mod:`internsp.wp.unexpected_order` has how ranks
agree on each block then, and how an order is learned. Few models load that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from internsp.errors import OrderError
from internsp.schedule import terms as schedule
from internsp.schedule.chunk import ChunkLayout
from internsp.schedule.enclosing import Enclosing
from internsp.wp.parameter import ShardedParameter
from internsp.wp.perform import Chunk
from internsp.wp.slots import Unit

if TYPE_CHECKING:
    from internsp.schedule.learned_passes import LearnedPasses
    from internsp.wp.unexpected_order import OrderAgreement, OrderLearner


class RunOrder:
    """Follows the forwards of one chunk along the order of its blocks.

    Args:
        rank: for errors.
        agreement: the ranks of each weight group agree on blocks that run out of the order;
            ``None`` if the order never changes, or no weight group has several ranks.
        learner: records the order of the first step (``unexpected_order = "learn"``); ``None`` if
            no order is learned.

    Attributes:
        layout: the layout of the chunk, in the learned order once there is one.
        learning: the learner, until its order is in force.
        learned: the passes along that order; ``None`` before.
        running: blocks whose forward has begun and not ended.
    """

    def __init__(
        self,
        chunk: Chunk,
        layout: ChunkLayout,
        rank: int,
        agreement: OrderAgreement | None = None,
        learner: OrderLearner | None = None,
    ) -> None:
        self._queue, self.layout, self._rank = chunk.queue, layout, rank
        self._agreement, self.learning = agreement, learner
        self.learned: LearnedPasses[ShardedParameter] | None = None
        self.running: set[Unit] = set()
        self._next = 0  # position of the block that the forward must run next
        self._entered = False  # an enclosing block that the program calls itself came last

    # forward

    def root_pre_forward(self) -> None:
        """The model's pre-forward: use the learned order once there is one."""
        self._next, self._entered = 0, False
        if self.learning is not None:
            found = self.learning.root_pre_forward(self.layout)
            if found is not None:
                self.layout, self.learned = found
                self.learning = None

    def begin_forward(self, number: int) -> None:
        """Forward ``number`` begins, of the model or of blocks that the program calls itself."""
        self.running.clear()
        if self._agreement is not None:
            self._agreement.begin_forward(number)

    def begins_again(self, unit: Unit, enclosing: bool) -> bool:
        """Whether a block that the program calls itself begins a new forward.

        Args:
            unit: the block, or the first unit of one that is ``enclosing``.
        """
        entered, self._entered = self._entered and not enclosing, enclosing
        if entered:  # it is the first unit that runs in such a block
            return False
        order = self._queue.passes.order.blocks
        self._next %= len(order)
        return unit not in order[self._next :] or not self._next

    def pre_forward(self, unit: Unit, inside: bool) -> None:
        """Check at a block's pre-forward that it is the next one.

        Args:
            inside: the model's forward runs.

        Raises:
            OrderError: it is not, or other ranks run another block.
        """
        self.running.add(unit)
        if self.learning is not None and inside:
            self.learning.pre_forward(unit)
        order = self._queue.passes.order.blocks
        expected = order[self._next] if self._next < len(order) else None
        if expected is unit:
            self._next += 1
        elif self._queue.slots.strict:
            self._out_of_order(unit, expected)
        else:
            self._next = unit.block + 1
        if self._agreement is not None:
            self._agreement.pre_forward(unit.name, expected is unit)

    def pre_forward_of_enclosing(self, block: Enclosing[ShardedParameter]) -> None:
        """A block that holds units of its own comes: its first unit is the next one."""
        if self._agreement is not None:
            first = self._queue.passes.order.blocks[block.first].name
            self._agreement.pre_forward(first, self._next == block.first)

    def before_head(self, gathered: bool) -> None:
        """The head is about to be used: agree with the other ranks that it comes next, unless it is
        on its way (``gathered``) in the middle of the blocks."""
        if self._agreement is not None:
            complete = self._next == len(self._queue.passes.order.blocks)
            if complete or not gathered:
                self._agreement.post_blocks("the head", complete)

    def root_post_forward(self) -> None:
        """The model's post-forward: check that all blocks ran.

        Raises:
            OrderError: some did not, or other ranks run more.
        """
        order = self._queue.passes.order.blocks
        if self.learning is not None:
            self.learning.pre_forward(None)
        if self._queue.slots.strict and self._next < len(order) and not self._may_differ():
            learn = "'learn' for models that always skip the same blocks, "
            raise OrderError(  # the forward stays open: all ranks recover together
                f"only {self._next} of {len(order)} blocks ran in this forward on rank "
                f"{self._rank}: the next in order was {order[self._next].name}. "
                f"Set weight_parallel.unexpected_order = {'' if self.learned else learn}'gather' "
                "for those that skip others from step to step, on all ranks alike"
            )
        if self._agreement is not None:
            self._agreement.post_blocks("the end", self._next == len(order))

    def _may_differ(self) -> bool:
        """Whether this forward may run another order than the learned one: it has no backward."""
        return self.learned is not None and not torch.is_grad_enabled()

    def _out_of_order(self, unit: Unit, expected: schedule.Unit[ShardedParameter] | None) -> None:
        """A block runs that is not the next one in the order."""
        before = self._queue.passes.order.blocks[self._next - 1] if self._next else None
        if self.learned is not None:
            if self.learned.out_of_order or unit is before:
                return  # several runs in a row count as one
            if self._may_differ():
                self.learned.leave_order()
                return
        which, learn = "as declared", "'learn' for an order that never changes, "
        if self.learned:
            which, learn = "which the first step has shown", ""
        raise OrderError(
            f"block {unit.name} ran on rank {self._rank} where "
            f"{expected.name if expected is not None else 'the end'} was expected, {which}: the "
            "prefetch order would be wrong. Declare the blocks in the order in which they run "
            f"(weight_parallel.blocks), or set weight_parallel.unexpected_order = {learn}'gather' "
            "for one that changes on all ranks alike"
        )

    # backward

    def compares(self, forward: int) -> bool:
        """Whether ranks compare their blocks in the backward of that forward."""
        agreement = None if self._queue.slots.strict else self._agreement
        return agreement is not None and not agreement.was_in_order(forward)

    def pre_backward(self, unit: schedule.Unit[ShardedParameter] | None, forward: int) -> bool:
        """In the backward of a forward in another order: agree with the other ranks on the block
        that comes next; ``None``: the end.

        Returns:
            Whether all ranks ran the blocks of that forward in the order.
        """
        if self._queue.slots.strict or self._agreement is None:
            return self._queue.slots.strict
        if unit is None or unit is not self._queue.backward.open.unit:
            self._agreement.pre_backward(unit.name if unit is not None else "the end", forward)
        return self._agreement.was_in_order(forward)

    def backward_ended(self) -> None:
        """All gradients of a backward are ready."""
        if self.learning is not None:
            self.learning.backward_ended()

    def reset(self) -> None:
        """A pass has failed: the next forward begins with the first block."""
        self.running.clear()
        self._next, self._entered = 0, False
