"""Pure: the events of a backward, from the head to the end of its last graph (WP-2, WP-6).

Each block is opened when the gradient of its output arrives, and closed when the backward comes to
the block before it. The open block is gathered, and the next one prefetched; its weights have
their turns (:mod:`internsp.schedule.turns`). Once the block is left, the remaining weights take
their turns with the gradients that they have, or with zeros. The head is reduced when the backward
comes to the blocks, the other units outside of the blocks at the end.

Where every rank acts for every block, a rank whose data have left a block without a gradient
gathers and reduces it in passing, so that all ranks launch the same collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from internsp.schedule.enclosing import Enclosing, EnclosingBlocks
from internsp.schedule.passes import Passes
from internsp.schedule.progress import Phase, Progress
from internsp.schedule.reductions import Reductions
from internsp.schedule.slots import SlotContents
from internsp.schedule.terms import BACKWARD, FORWARD, GO_ON, RECOMPUTE, USE, Action, Unit, W
from internsp.schedule.turns import Turns
from internsp.schedule.uses import Uses


@dataclass
class OpenBlock(Generic[W]):
    """The block whose backward runs.

    Attributes:
        unit: the block; ``None`` while none is open.
        again: its recompute has used weights.
        reaching: its recompute has not come to its prefetch trigger yet.
        ready: of a block that has run several times in a row, weights with a gradient of each run
            whose backward is over.
    """

    unit: Unit[W] | None = None
    again: bool = False
    reaching: bool = False
    ready: list[Sequence[W]] = field(default_factory=list)


class Backward(Generic[W]):
    """The backward of one chunk.

    Attributes:
        open: the block whose backward runs.
        turns: whose reduction is next.
        enclosing: blocks that hold several units.
    """

    def __init__(
        self,
        progress: Progress,
        slots: SlotContents[W],
        passes: Passes[W],
        uses: Uses[W],
        reductions: Reductions[W],
        enclosing: Sequence[Enclosing[W]],
    ) -> None:
        self.progress, self.slots, self.passes = progress, slots, passes
        self.uses, self.reductions = uses, reductions
        self.turns: Turns[W] = Turns(uses)
        self.open: OpenBlock[W] = OpenBlock()
        self.enclosing: EnclosingBlocks[W] = EnclosingBlocks(self, enclosing)
        self._late: set[W] = set()  # weights of the head with a gradient since it was reduced

    def begin_order(self, passes: Passes[W]) -> None:
        """Blocks run in another order from here on."""
        self.passes, self.progress.lowest = passes, len(passes.order.blocks)

    # begin and end

    def root_pre_backward(self, exchanges: bool = False) -> None:
        """The model's pre-backward: a gradient has entered the model from outside.

        Args:
            exchanges: replicas exchange completed gradients while this backward runs.
        """
        self.progress.require("root_pre_backward")
        self.passes.begin(BACKWARD)
        self.reductions.exchanges.begin(exchanges)
        self._come_to_head()

    def prefetch_at_output(self) -> list[Action[W]]:
        """Gather the last block, whose backward is first where a gradient enters at the output."""
        self.progress.require("prefetch_at_output")
        out: list[Action[W]] = []
        order = self.passes.order
        if order.blocks and not order.policy.per_module and self.open.unit is None:
            self.passes.gather_block(len(order.blocks) - 1, out)
        return out

    def begin_earlier_graph(self, all_ranks: bool, lowest: int = 0) -> list[Action[W]]:
        """Backward goes from the graph of one forward to that of an earlier one.

        Where the losses of several forwards were added, autograd runs the whole graph of the last
        forward before that of the one before. The order begins again from the head. Arguments as in
        :meth:`root_post_backward`.
        """
        self.progress.require("begin_earlier_graph")
        out: list[Action[W]] = []
        self.reductions.exchanges.early = False  # every weight gets one more reduction
        self._end_graph(all_ranks, lowest, out)
        self._come_to_head()
        return out

    def root_post_backward(self, all_ranks: bool, lowest: int = 0) -> list[Action[W]]:
        """The end of the outermost backward: reduce what this rank's data have left unused.

        Args:
            all_ranks: as in :meth:`pre_backward`.
            lowest: number of the block at which the backward of every rank ends, since all
                parameters below it are frozen.
        """
        self.progress.require("root_post_backward")
        out: list[Action[W]] = []
        self._end_graph(all_ranks, lowest, out)
        if not self.progress.split:
            for unit in self.passes.order.root:
                self.reduce_unit(unit, out, last=True)
        return out

    def end_pass(self) -> None:
        """A backward is over: release everything; contents stay."""
        self.progress.require("end_pass")
        self.passes.begin(FORWARD)
        self.reductions.exchanges.early = False
        self.progress.to(Phase.REST)

    def reset(self) -> None:
        """After a failure: no backward runs."""
        self.turns.reset()
        self.open = OpenBlock()
        self._late.clear()
        self.enclosing.reset()
        self.progress.split, self.progress.lowest = "", len(self.passes.order.blocks)
        self.progress.to(Phase.REST)

    # a split backward

    def begin_backward_part(self, weights: bool, exchanges: bool = False) -> None:
        """Begin one part of a split backward (input or weight backward, arXiv 2401.10241).

        In the input backward no weight gets a gradient. The weight backward needs no unsharded
        weight; its reductions have one order over all units.

        Args:
            exchanges: as in :meth:`root_pre_backward`.
        """
        self.progress.require("begin_backward_part")
        self.reductions.exchanges.begin(exchanges and weights)
        self.progress.split = "weights" if weights else "inputs"
        if not weights:
            self.turns.declare(())
            return
        self.progress.to(Phase.WEIGHTS)
        order = self.passes.order
        units = [*order.root, *dict.fromkeys(order.blocks)]
        if order.alone is not None:
            units.append(order.alone)
        self.turns.declare(reversed(units))

    def end_backward_part(self) -> list[Action[W]]:
        """End that part: reduce the weights that are left, zeros where they have no gradient."""
        self.progress.require("end_backward_part")
        out: list[Action[W]] = []
        self._reduce(None, False, out)
        self.go_on(out)
        self.progress.split = ""
        return out

    # blocks

    def pre_backward(
        self, unit: Unit[W], all_ranks: bool, run: int | None = None
    ) -> list[Action[W]]:
        """A block's pre-backward: the gradient of its output has arrived, or its recompute begins.

        Args:
            all_ranks: every rank acts for every block, also for blocks that got no gradient on
                this rank, since others may have got one there.
            run: of a recurring block, the number of the run whose output got the gradient;
                ``None``: the one whose backward is open.
        """
        out: list[Action[W]] = []
        if self.enclosing.blocks:
            if all_ranks or unit.around < 0:  # else it may run in another block than its own
                self.enclosing.pre_backward_of_unit(unit.block, all_ranks, out)
            self.enclosing.reduce_again(unit.around)
        self.pre_backward_of_unit(unit, all_ranks, run, out)
        return out

    def end_block(self) -> list[Action[W]]:
        """The backward leaves the open block, before it is known which block comes."""
        out: list[Action[W]] = []
        self.post_backward(out)
        return out

    def use(self, unit: Unit[W], weight: W, record: bool = True) -> list[Action[W]]:
        """The backward of what was computed with a weight is about to run: wait for its gather.

        A block with activation checkpointing waits in its recompute, not here: the same gather
        serves recompute and backward. torch's non-reentrant checkpointing fires the hook of the
        block's last layer before it recomputes, and waiting here would make the first layer of the
        recompute wait for the whole block.

        Args:
            record: as in :meth:`internsp.schedule.queue.GatherQueue.use`.
        """
        out: list[Action[W]] = []
        opened = unit is self.open.unit
        if opened and weight in self.turns.reduced:
            return out  # this output of the module was computed without its weights
        if unit.recomputed:
            if not self.open.again or not opened or self.slots.is_gathered(weight):
                return out
        self.slots.use(unit, weight, BACKWARD, out)
        if record:
            out.append(Action(USE, BACKWARD, unit, (weight,)))
        return out

    def grad_ready(self, unit: Unit[W], weight: W, last: bool = False) -> list[Action[W]]:
        """A gradient of a weight is ready, and was added to the weight's earlier ones.

        Args:
            last: it is the weight's last one in this backward, however often it was used.
        """
        out: list[Action[W]] = []
        split = self.progress.split
        if weight in self.turns.due and (split or unit is self.open.unit):
            self._reduce((weight,), last, out)
        elif unit.block >= 0 or split:
            self.reductions.launch(unit, (weight,), out)
        elif self.progress.phase is Phase.BLOCKS and unit is self.passes.order.alone:
            # The head was used between blocks. Its reduction waits for the end: among the blocks'
            # reductions its position would depend on which of their weights are unused (WP-2).
            self._late.add(weight)
        elif self.enclosing.blocks:
            self.enclosing.grad_ready(unit)
        return out

    def grads_ready(self, unit: Unit[W], weights: Sequence[W]) -> list[Action[W]]:
        """:meth:`grad_ready` for the last gradients of several weights of a block, in one of its
        runs. After several in a row those of all of them are reduced together: a rank may have used
        a weight in some of them only, and has as many reductions as others (WP-2)."""
        out: list[Action[W]] = []
        if self.progress.split or unit is not self.open.unit:
            for weight in weights:
                out += self.grad_ready(unit, weight, last=True)
            return out
        if unit in self.uses.runs:
            self.open.ready.append(weights)
            if len(self.open.ready) < self.uses.runs[unit]:
                return out
            weights = list(dict.fromkeys(weight for run in self.open.ready for weight in run))
        rest = [weight for weight in weights if weight not in self.turns.due]
        self._reduce(weights, True, out)
        for weight in rest:
            self.reductions.launch(unit, (weight,), out)
        return out

    # for blocks that hold units of their own (:mod:`internsp.schedule.enclosing`)

    def pre_backward_of_unit(
        self, unit: Unit[W], all_ranks: bool, run: int | None, out: list[Action[W]]
    ) -> None:
        """:meth:`pre_backward`, after the enclosing block's own."""
        if self.open.unit is unit and run in (None, self.passes.number[unit]):
            return
        number = self.passes.number[unit] if run is None else run
        if all_ranks:
            self.pass_over_blocks(number, out)
        self._enter_block(number, all_ranks, out)

    def pass_over_blocks(self, to: int, out: list[Action[W]]) -> None:
        """Act for the blocks above number ``to``, which got no gradient on this rank."""
        for number in range(self.progress.lowest - 1, to, -1):
            self._enter_block(number, True, out)

    def post_backward(self, out: list[Action[W]]) -> None:
        """The open block's post-backward: reduce what is left of it, and release it."""
        unit = self.open.unit
        if unit is None:
            return
        if self.open.reaching:
            self._prefetch_late(unit, out)
        self.open.unit = None
        if not self.progress.split:
            self._reduce(None, False, out)
            self.go_on(out)
        self.turns.reduced.clear()
        self.passes.end_run(unit, BACKWARD, out)

    def reduce_unit(self, unit: Unit[W], out: list[Action[W]], last: bool) -> None:
        """Reduce the gradients of a unit outside of the blocks, zeros where it has none.

        Args:
            last: the unit has no other reduction in this backward.
        """
        for group in unit.groups:
            weights = [weight for weight in group.weights if weight.trained]
            if weights:
                self.reductions.launch(unit, weights, out, last)
        self.go_on(out)

    def go_on(self, out: list[Action[W]]) -> None:
        """All ranks have launched what this one has: sums of near ranks go on to others."""
        if self.passes.order.policy.two_levels:
            out.append(Action(GO_ON, BACKWARD, None, ()))

    def recompute(self, unit: Unit[W], following: Unit[W] | None) -> list[Action[W]]:
        """The forward of ``unit`` within a recompute of several units: gather it.

        It may take bytes that backward holds for other units, which are gathered again at their
        use.

        Args:
            following: the unit whose forward the recompute runs next; it is gathered if its bytes
                are free.
        """
        out: list[Action[W]] = []
        slots = self.slots
        slots.take_unit(unit, RECOMPUTE, out)
        if following is not None and self.passes.order.policy.depth:
            for group in following.groups:
                slots.gather_group(following, group, RECOMPUTE, out, if_free=True)
        return out

    def leave_recompute(self, unit: Unit[W]) -> None:
        """End that forward of the unit: release the unit, unless its backward is next."""
        if unit is not self.open.unit and self.passes.is_next(unit):
            self.slots.release(unit)

    # inside

    def _come_to_head(self) -> None:
        self.progress.to(Phase.HEAD)
        self.progress.lowest = len(self.passes.order.blocks)

    def _come_to_blocks(self, out: list[Action[W]]) -> None:
        """The head's post-backward: reduce it (WP-2)."""
        self.progress.require("first_block")
        self.progress.to(Phase.BLOCKS)
        order = self.passes.order
        if order.head is not None and not self.progress.split:
            last = order.head is order.alone and not self.uses.head_between
            self.reduce_unit(order.head, out, last)

    def _enter_block(self, number: int, all_ranks: bool, out: list[Action[W]]) -> None:
        """Open the backward of a block, and close the one before it."""
        passes, opened = self.passes, self.open
        unit = passes.order.blocks[number]
        if self.progress.phase is not Phase.BLOCKS:
            if all_ranks and not passes.order.policy.per_module:
                passes.gather_block(number, out)  # before the head, as prefetch_at_output does
            self._come_to_blocks(out)
        self.post_backward(out)
        opened.unit, opened.again, self.progress.lowest = unit, False, number
        opened.ready.clear()
        if not self.progress.split:
            self.turns.declare((unit,))
        passes.enter_backward(number, out)
        opened.reaching = unit.recomputed and unit.trigger_at >= 0
        if not opened.reaching:
            passes.prefetch(unit, BACKWARD, out)

    def _end_graph(self, all_ranks: bool, lowest: int, out: list[Action[W]]) -> None:
        if self.enclosing.blocks:
            self.enclosing.end(all_ranks, lowest, out)
        if all_ranks and self.progress.lowest > 0:
            self.pass_over_blocks(lowest - 1, out)
        if self.progress.phase is not Phase.BLOCKS:  # no block got a gradient
            self._come_to_blocks(out)
        self.post_backward(out)
        alone = self.passes.order.alone
        if alone is not None:
            for group in alone.groups:
                late = [weight for weight in group.weights if weight in self._late]
                if late:
                    self.reductions.launch(alone, late, out, last=True)
        self._late.clear()

    def _prefetch_late(self, unit: Unit[W], out: list[Action[W]]) -> None:
        """Prefetch before the open block's first reduction: its trigger did not fire (WP-2)."""
        self.open.reaching = False
        self.passes.prefetch(unit, BACKWARD, out)

    def _reduce(self, ready: Sequence[W] | None, last: bool, out: list[Action[W]]) -> None:
        """Reduce the groups whose turn it is, and release their bytes.

        Args:
            ready, last: as in :meth:`Turns.take`.
        """
        split, one_order = self.progress.split, self.passes.order.policy.one_order
        if ready is not None and one_order and not split:
            # The block also launches collectives of other groups, whose position among the
            # reductions must be the same on every rank: reduce when the block is left.
            return
        for unit, group, weights in self.turns.take(ready, last):
            if self.open.reaching and self.open.unit is not None and not split:
                self._prefetch_late(self.open.unit, out)
            self.reductions.launch(unit, weights, out, last=True)
            if split:
                continue
            self.turns.reduced.update(group.weights)
            if not one_order and len(weights) == len(group.weights):
                self.slots.held.pop(group, None)
                if self.passes.waiting:
                    self.passes.launch_due(out)
