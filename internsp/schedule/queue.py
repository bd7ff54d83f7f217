"""Pure: when each weight is all-gathered, released and reduce-scattered.

A hook reports an event: pre-forward and post-forward of the model or of a block, the use of a
weight, pre-backward of a block, a ready gradient. The chunk's queue returns the actions that follow
from the event, in order. The communicator performs them and :mod:`internsp.schedule.simulate` lists
them, so that ``internsp plan`` prints what runs (WP-2).

Whoever reports an event names the part that it concerns; for any event, what changes is:

===================================  ==============================================================
:mod:`internsp.schedule.slots`       which bytes are taken, by whom, and what lies there
:mod:`internsp.schedule.passes`      which gather comes next, and how far ahead
:mod:`internsp.schedule.uses`        how often this rank uses a weight in a forward
:mod:`internsp.schedule.turns`       whose reduction is next
:mod:`internsp.schedule.reductions`  which reductions and exchanges are in flight
:mod:`internsp.schedule.progress`    the phase, and which event may come in it
:mod:`internsp.schedule.backward`    the events of a backward
this module                          the events of a forward, and between two passes
===================================  ==============================================================

Releases. In forward the bytes of a group are released after its last use, as counted in earlier
forwards, or when its block is left; in backward when its reduction is launched; in a recompute
never.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Generic

from internsp.schedule.backward import Backward
from internsp.schedule.enclosing import Enclosing
from internsp.schedule.passes import Order, Passes
from internsp.schedule.progress import Phase, Progress
from internsp.schedule.reductions import Reductions
from internsp.schedule.slots import SlotContents
from internsp.schedule.terms import BACKWARD, FORWARD, FREE, RECOMPUTE, USE, Action, Policy, Unit, W
from internsp.schedule.uses import Uses

if TYPE_CHECKING:
    from internsp.schedule.learned_passes import LearnedPasses


class GatherQueue(Generic[W]):
    """Decides, for the passes of one chunk, what is gathered, held, released and reduced.

    Args:
        blocks: in the declared order.
        root, head: units outside of the blocks (:class:`internsp.schedule.passes.Order`).
        enclosing: blocks that hold several of the units.
        overlap: false for the synchronous path, which waits at each launch (WP-12).
        strict: blocks must run in the declared order. Otherwise a block that runs out of order is
            gathered at its pre-forward, and what was prefetched for other blocks is given up.
        limit: bytes of unsharded gradients in flight (WP-6).
    """

    def __init__(
        self,
        policy: Policy,
        blocks: Sequence[Unit[W]],
        root: Sequence[Unit[W]] = (),
        head: Unit[W] | None = None,
        enclosing: Sequence[Enclosing[W]] = (),
        overlap: bool = True,
        strict: bool = True,
        limit: int = 0,
    ) -> None:
        order = Order.of(policy, blocks, root, head)
        self.slots: SlotContents[W] = SlotContents(overlap)
        self.slots.begin_order(strict, _remedy(policy))
        for unit in (*root, *blocks, *([head] if head is not None else [])):
            self.slots.add(unit)
        self.passes: Passes[W] = Passes(order, self.slots)
        self.uses: Uses[W] = Uses()
        self.reductions: Reductions[W] = Reductions(limit, overlap)
        self.progress = Progress(len(blocks))
        self.backward: Backward[W] = Backward(
            self.progress, self.slots, self.passes, self.uses, self.reductions, enclosing
        )
        self._triggered = False  # the trigger of the block whose forward runs has fired

    def reorder(self, policy: Policy, blocks: Sequence[Unit[W]]) -> LearnedPasses[W]:
        """Run blocks in a learned order from here on, strictly. Called between two passes.

        Args:
            policy: the limits for that order.
            blocks: in that order; a block of the chunk that is missing here does not run.
        """
        from internsp.schedule.learned_passes import LearnedPasses  # few models learn an order

        self.progress.require("reorder")
        before = self.passes.order
        order = Order.of(policy, blocks, before.root, before.head)
        self.slots.begin_order(True, _remedy(policy))
        self.uses.begin_order()
        learned = LearnedPasses(order, self.slots, self.uses)
        self.passes = learned
        self.backward.begin_order(learned)
        return learned

    # the model's forward

    def root_pre_forward(self, keep: bool, head: bool = False) -> list[Action[W]]:
        """The model's pre-forward: gather the units outside of the blocks, and the first block.

        Args:
            keep: the contents of slots are known to equal the shards, and are reused.
            head: gather the head now, because the blocks before it may differ between ranks.
        """
        self._begin_forward("root_pre_forward")
        out: list[Action[W]] = []
        if not keep:
            self.slots.invalidate_contents()
        self.passes.gather_first(out)
        self.backward.enclosing.root_pre_forward(out)
        alone = self.passes.order.alone
        if head and alone is not None:
            self.slots.gather_unit(alone, FORWARD, out)
        return out

    def begin_blocks(self, keep: bool) -> None:
        """Begin a forward in which the program calls blocks itself, without the model's forward.

        Contents of the slots outside of the blocks are kept for the backward of an earlier forward:
        if they were dropped here, the ranks that use such a weight there would gather it again, and
        the others would not (WP-2).

        Args:
            keep: as in :meth:`root_pre_forward`.
        """
        self._begin_forward("begin_blocks")
        if not keep:
            for unit in self.passes.order.blocks:
                self.slots.invalidate(unit.weights)

    def _begin_forward(self, event: str) -> None:
        self.progress.require(event)
        self.progress.to(Phase.FORWARD)
        self.passes.begin(FORWARD)
        self.uses.begin_forward()

    # a block's forward

    def pre_forward(self, unit: Unit[W]) -> list[Action[W]]:
        """A block's pre-forward: gather the block, or its first group."""
        out: list[Action[W]] = []
        self._triggered = False
        self.passes.enter(unit, out)
        return out

    def trigger(self, unit: Unit[W], recompute: bool) -> list[Action[W]]:
        """The prefetch trigger of a block fires, in forward or in a recompute: prefetch."""
        out: list[Action[W]] = []
        if recompute and unit.around >= 0:  # the recompute may run the next unit, too
            return out
        if not recompute:
            self._triggered = True
        elif unit is self.backward.open.unit:
            self.backward.open.reaching = False
        self.passes.prefetch(unit, BACKWARD if recompute else FORWARD, out)
        return out

    def post_forward(self, unit: Unit[W]) -> list[Action[W]]:
        """A block's post-forward: release it, and launch what its unused weights or trigger would
        have launched."""
        out: list[Action[W]] = []
        self.uses.leave(unit)
        self.passes.leave(unit, self._triggered, out)
        return out

    # a weight

    def use(self, unit: Unit[W], weight: W, phase: str, record: bool = True) -> list[Action[W]]:
        """A weight is about to be used: wait for its gather, and for no other.

        Args:
            phase: the phase of the use.
            record: return a ``USE``, too, which the trace and the slot's streams need.
        """
        out: list[Action[W]] = []
        one_by_one = False
        if phase == FORWARD:
            if unit.block >= 0:
                now = self.uses.now[weight] = self.uses.now.get(weight, 0) + 1
                if now > 1:
                    self.uses.again(weight, now)
                one_by_one = self.passes.one_by_one
            elif unit is self.passes.order.alone:
                self.uses.head_between |= self.passes.among_blocks
        elif phase == RECOMPUTE and unit is self.backward.open.unit:
            self.backward.open.again = True
        if one_by_one:
            self.passes.gather_through(unit, self.slots.group_of[weight], out)
        self.slots.use(unit, weight, phase, out)
        if record:
            out.append(Action(USE, phase, unit, (weight,)))
        if one_by_one:
            self.passes.prefetch_after(unit, self.slots.group_of[weight], out)
        return out

    def use_all(self, unit: Unit[W], phase: str, record: bool) -> list[Action[W]]:
        """:meth:`use` of all weights of a block at once; each is used once in a pass."""
        out: list[Action[W]] = []
        if phase == FORWARD:
            self.uses.count_once(unit)
        elif phase == RECOMPUTE and unit is self.backward.open.unit:
            self.backward.open.again = True
        self.slots.use_all(unit, phase, record, out)
        return out

    def release(self, unit: Unit[W], weight: W, record: bool = True) -> list[Action[W]]:
        """Release a weight after the forward of the layer that used it.

        Its group's bytes become free here only if each weight of the group has had its last use.

        Args:
            record: return a ``FREE``, too, which the trace needs.
        """
        out = [Action(FREE, FORWARD, unit, (weight,))] if record else []
        if unit.block < 0 or self.passes.order.policy.one_order:
            return out
        group = self.slots.group_of[weight]
        if group in self.slots.held and self.uses.are_over(group):
            del self.slots.held[group]
            if self.passes.waiting:
                self.passes.launch_due(out)
        return out

    # between two passes

    def prefetch_pass(self, phase: str) -> list[Action[W]]:
        """Start the first gathers of a forward or backward that a pipeline runs next.

        Where their bytes are still in use, the pass itself starts them.
        """
        out: list[Action[W]] = []
        for unit in self.passes.order.root if phase == FORWARD else ():
            self.slots.gather_unit(unit, FORWARD, out)
        self.passes.prefetch_pass(phase, out)
        return out

    def prefetchable(self) -> list[Unit[W]]:
        """Units that can be gathered before a forward and stay there until it uses them."""
        order = self.passes.order
        head = [order.head] if order.head is not None else []
        rests = self.backward.enclosing.prefetchable()
        return list(dict.fromkeys([*order.root, *self.passes.prefetchable(), *head, *rests]))

    def prefetch(self, units: Iterable[Unit[W]]) -> list[Action[W]]:
        """Gather ``units`` (of :meth:`prefetchable`) before the forward that uses them."""
        self.progress.require("prefetch")
        out: list[Action[W]] = []
        self.passes.begin(FORWARD)
        for unit in units:
            self.slots.gather_unit(unit, FORWARD, out)
        return out

    def reshard(self, unit: Unit[W]) -> list[Action[W]]:
        """Drop the contents of ``unit``'s slot: its next use gathers it again."""
        self.progress.require("reshard")
        return self.slots.drop(unit)

    def reduce(self, unit: Unit[W], weight: W) -> list[Action[W]]:
        """Reduce a sum of gradients that was accumulated and that no backward has reduced."""
        out: list[Action[W]] = []
        self.reductions.launch(unit, (weight,), out, last=True, sums=True)
        self.backward.go_on(out)
        return out

    def reset(self) -> None:
        """After a failure, once everything in flight has arrived: drop all state of passes.

        The counts of uses in earlier forwards stay.
        """
        self.progress.require("reset")
        self.slots.reset()
        self.passes.begin(FORWARD)
        self.uses.begin_forward()
        self.reductions.reset()
        self.backward.reset()


def _remedy(policy: Policy) -> str:
    """What to set where blocks or weights are used in another order than ``policy`` allows for."""
    return 'gather_before = "out_proj"' if policy.rolling else "unexpected_order = 'gather'"
