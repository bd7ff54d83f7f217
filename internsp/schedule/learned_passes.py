"""Pure: passes along a learned order (``unexpected_order = "learn"``, :mod:`.learned`).

A block may run several times in a pass, or not at all. Each of its runs has places of its own, and
``number`` says which run is the present one. A forward that no backward follows may leave the
order: each block is gathered by itself then.
"""

from __future__ import annotations

from internsp.schedule.passes import Order, Passes
from internsp.schedule.slots import SlotContents
from internsp.schedule.terms import FORWARD, Action, Unit, W
from internsp.schedule.uses import Uses


class LearnedPasses(Passes[W]):
    """Follows one pass after another along a learned order.

    Attributes:
        out_of_order: the forward that runs has left the order.
    """

    def __init__(self, order: Order[W], slots: SlotContents[W], uses: Uses[W]) -> None:
        super().__init__(order, slots)
        self.number: dict[Unit[W], int] = dict(order.numbers)
        self.out_of_order = False
        self._uses = uses
        self._entered = 0  # number of the last run that was entered, where blocks recur

    def leave_order(self) -> None:
        """Prefetch nothing in the rest of this forward, which runs blocks in another order."""
        self.out_of_order, self.one_by_one = True, False
        self.slots.held.clear()
        self._limit = self._at

    def begin(self, phase: str) -> None:
        """See :meth:`Passes.begin`."""
        super().begin(phase)
        self._entered, self.out_of_order = 0, False
        self.one_by_one = self.order.policy.one_by_one(FORWARD)

    def enter(self, unit: Unit[W], out: list[Action[W]]) -> None:
        """See :meth:`Passes.enter`."""
        if self.out_of_order:
            self.slots.held.clear()
            self.slots.gather_unit(unit, FORWARD, out)
            return
        if self.order.recurs:
            number = self._entered = self.order.blocks.index(unit, self._entered)
            if number != self.number[unit]:  # its next run begins, not its last one again
                self._uses.begin_run(unit)
            self.number[unit], self._running = number, unit
        super().enter(unit, out)

    def prefetch(self, unit: Unit[W], phase: str, out: list[Action[W]]) -> None:
        """See :meth:`Passes.prefetch`."""
        if not self.out_of_order:
            super().prefetch(unit, phase, out)

    def leave(self, unit: Unit[W], triggered: bool, out: list[Action[W]]) -> None:
        """See :meth:`Passes.leave`."""
        if self.out_of_order:
            self.slots.release(unit)
        else:
            super().leave(unit, triggered, out)

    def end_run(self, unit: Unit[W], phase: str, out: list[Action[W]]) -> None:
        """See :meth:`Passes.end_run`."""
        self._running = None
        super().end_run(unit, phase, out)

    def enter_backward(self, number: int, out: list[Action[W]]) -> None:
        """See :meth:`Passes.enter_backward`."""
        if self.order.recurs:
            self._running = self.order.blocks[number]
            self.number[self._running] = number
        super().enter_backward(number, out)
