"""Pure: which gather comes next, and how far ahead (WP-1, WP-2).

A pass (one forward, or one backward) is a list of places ``(unit, group)``. The next place is
gathered while its position is below the *limit* and its bytes in the slot are free. The limit only
grows: a block's prefetch trigger raises it to the end of the next block; with prefetch per module
each use raises it by one group; with "rolling" it is the end of the pass. The places, and the
blocks that each trigger prefetches, are those of an :class:`Order`, which stays the same from one
optimizer step to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from internsp.schedule.slots import SlotContents
from internsp.schedule.terms import (
    BACKWARD,
    FORWARD,
    NEXT_PASS,
    Action,
    Group,
    Policy,
    Unit,
    W,
    prefetch_targets,
)


class Places(Generic[W]):
    """The places ``(unit, group)`` of one pass, in the order of their gathers.

    Attributes:
        above: for each unit before the blocks, the position behind its last place.
        starts, ends: positions of the first place of each block and behind its last one, by the
            block's number in the order of runs.
    """

    def __init__(
        self,
        phase: str,
        blocks: Sequence[Unit[W]],
        before: Iterable[Unit[W]] = (),
        after: Iterable[Unit[W]] = (),
    ) -> None:
        self.phase = phase
        self.places: list[tuple[Unit[W], Group[W]]] = []
        self.above = [self._add(unit) for unit in before]
        self.starts, self.ends = [0] * len(blocks), [0] * len(blocks)
        numbers = range(len(blocks))
        for number in reversed(numbers) if phase == BACKWARD else numbers:
            self.starts[number] = len(self.places)
            self.ends[number] = self._add(blocks[number])
        for unit in after:
            self._add(unit)

    def _add(self, unit: Unit[W]) -> int:
        for group in Policy.order(unit.groups, self.phase, unit.recomputed):
            self.places.append((unit, group))
        return len(self.places)


@dataclass(frozen=True, eq=False)
class Order(Generic[W]):
    """The order in which the units of a chunk run. Immutable.

    Attributes:
        policy: the limits for that order.
        blocks: in the order in which they run: the declared order, or a learned one, in which a
            block may run twice or not at all.
        root: units outside of the blocks that are gathered at the model's pre-forward: the
            embedding and others.
        head: gathered after the last block; one of ``root`` where it is tied to the embedding.
        alone: the head, unless it is tied.
        forward, backward: the places of these passes.
        numbers: for each block, the number of its first run in the order.
        targets: for each phase and number, the numbers of the blocks that its trigger prefetches.
        index: of a block's group in the block.
        recurs: some block runs several times in a pass.
        shares: a gather may ask for bytes of the block that runs. Not so where a trigger prefetches
            whole blocks, if those have other slots.
    """

    policy: Policy
    blocks: Sequence[Unit[W]]
    root: Sequence[Unit[W]]
    head: Unit[W] | None
    alone: Unit[W] | None
    forward: Places[W]
    backward: Places[W]
    numbers: Mapping[Unit[W], int]
    targets: Mapping[tuple[str, int], Sequence[int]]
    index: Mapping[Group[W], int]
    recurs: bool
    shares: bool

    @classmethod
    def of(
        cls,
        policy: Policy,
        blocks: Sequence[Unit[W]],
        root: Sequence[Unit[W]] = (),
        head: Unit[W] | None = None,
    ) -> Order[W]:
        """The order of ``blocks``, with the units outside of them."""
        alone = head if head not in root else None
        every = range(len(blocks))
        targets = {(p, n): policy.targets(n, p) for n in every for p in (FORWARD, BACKWARD)}
        by_group = policy.rolling or policy.per_module or not policy.depth
        recurs = len(set(blocks)) < len(blocks)
        crowded = bool(policy.named) or any(
            blocks[coming].slot == blocks[n].slot
            for n in every
            for coming in targets[FORWARD, n]
            if coming < len(blocks)
        )
        return cls(
            policy,
            blocks,
            root,
            head,
            alone,
            forward=Places(FORWARD, blocks, root, [alone] if alone is not None else []),
            backward=Places(BACKWARD, blocks),
            numbers={blocks[number]: number for number in reversed(every)},
            targets=targets,
            index={group: i for unit in blocks for i, group in enumerate(unit.groups)},
            recurs=recurs,
            shares=by_group or recurs or crowded,
        )


class Passes(Generic[W]):
    """Follows one pass after another along an order.

    Attributes:
        number: for each block, the number of its present run in the order.
        one_by_one: forward gathers each group of a block at the use of the group before it.
        waiting: the limit allows the next gather, which waits for its bytes.
    """

    def __init__(self, order: Order[W], slots: SlotContents[W]) -> None:
        self.order, self.slots = order, slots
        self.number: Mapping[Unit[W], int] = order.numbers
        self.one_by_one = order.policy.one_by_one(FORWARD)
        self._pass = order.forward
        self._at = self._limit = 0  # position of the next gather in the pass, and its limit
        self._passed = 0  # position behind the last unit that was left
        self._running: Unit[W] | None = None  # a recurring block whose run has begun
        self.waiting = False

    def begin(self, phase: str) -> None:
        """A pass begins: release what is held; it was prefetched for blocks that did not run."""
        self.slots.held.clear()
        self._pass = self._places(phase)
        self._at = self._limit = self._passed = 0
        self.waiting, self._running = False, None

    # forward

    def gather_first(self, out: list[Action[W]]) -> None:
        """The model's pre-forward: gather the units outside of the blocks, and the first block."""
        order = self.order
        for end in order.forward.above:
            self._raise_limit(end, out)
        if order.blocks:
            self._raise_limit(self._entry_limit(0), out)
        if order.policy.rolling:
            self._raise_limit(len(order.forward.places), out)

    def enter(self, unit: Unit[W], out: list[Action[W]]) -> None:
        """A block's pre-forward: gather the block, or its first group."""
        number = self.number[unit]
        self._demand(number, self._entry_limit(number), FORWARD, out)
        if self.order.policy.rolling:
            self._raise_limit(len(self.order.forward.places), out)

    def gather_through(self, unit: Unit[W], group: Group[W], out: list[Action[W]]) -> None:
        """``group`` is about to be used: gather it, and the groups before it that this rank left
        unused (WP-2). With prefetch per module only."""
        self._demand(self.number[unit], self._position(unit, group) + 1, FORWARD, out)

    def prefetch_after(self, unit: Unit[W], group: Group[W], out: list[Action[W]]) -> None:
        """``group`` is used: gather the next one, too. With prefetch per module only."""
        places, at = self.order.forward, self._position(unit, group)
        number = self.number[unit]
        last = number == len(self.order.blocks) - 1 and at + 1 == places.ends[number]
        self._raise_limit(len(places.places) if last else at + 2, out)
        if last:
            out.append(Action(NEXT_PASS, FORWARD, unit, ()))

    def leave(self, unit: Unit[W], triggered: bool, out: list[Action[W]]) -> None:
        """A block's post-forward: release it, and launch what its unused weights or trigger would
        have launched.

        Args:
            triggered: the block's trigger has fired.
        """
        number = self.number[unit]
        end = self.order.forward.ends[number]
        if self.one_by_one and unit.groups:
            self._demand(number, end, FORWARD, out)
            self.prefetch_after(unit, unit.groups[-1], out)
        if not triggered:  # the trigger did not run on this rank; on others it may have
            self.prefetch(unit, FORWARD, out)
        self.end_run(unit, FORWARD, out)

    @property
    def among_blocks(self) -> bool:
        """Whether the forward has not left the last block yet."""
        return bool(self.order.blocks) and self._passed < self.order.forward.ends[-1]

    # forward and backward

    def prefetch(self, unit: Unit[W], phase: str, out: list[Action[W]]) -> None:
        """Raise the limit as ``unit``'s prefetch trigger says."""
        order, number = self.order, self.number[unit]
        policy, places = order.policy, self._places(phase)
        last = number == (len(order.blocks) - 1 if phase == FORWARD else 0)
        if self._pass is places:
            targets = order.targets[phase, number]
            if targets:
                behind = targets[-1] == len(order.blocks)  # the head
                self._raise_limit(len(places.places) if behind else places.ends[targets[-1]], out)
            elif policy.per_module and not policy.one_by_one(phase) and not last:
                coming = number + (1 if phase == FORWARD else -1)
                self._raise_limit(min(places.starts[coming] + 1, places.ends[coming]), out)
            elif policy.per_module and not policy.one_by_one(phase) and phase == FORWARD:
                self._raise_limit(len(places.places), out)
        if last and not policy.one_by_one(phase):
            out.append(Action(NEXT_PASS, phase, unit, ()))

    def end_run(self, unit: Unit[W], phase: str, out: list[Action[W]]) -> None:
        """A block's forward or backward is over: release it, and launch what its bytes allow."""
        self._passed = self._places(phase).ends[self.number[unit]]
        self.slots.release(unit)
        if self.waiting:
            self.launch_due(out)

    def launch_due(self, out: list[Action[W]]) -> None:
        """Launch the next gathers while the limit allows it and their bytes are free."""
        places, slots, phase = self._pass.places, self.slots, self._pass.phase
        self.waiting = False
        while self._at < min(self._limit, len(places)):
            unit, group = places[self._at]
            if unit is self._running and self._at >= self._pass.ends[self.number[unit]]:
                self.waiting = True  # its next run's group would be released with this run
                return
            if not slots.gather_group(unit, group, phase, out, if_free=True):
                self.waiting = True
                return
            self._at += 1

    # backward

    def enter_backward(self, number: int, out: list[Action[W]]) -> None:
        """The pre-backward of the block with this number in the order: gather the block."""
        self.gather_block(number, out)

    def gather_block(self, number: int, out: list[Action[W]]) -> None:
        """Gather what the backward of a block needs."""
        self._demand(number, self.order.backward.ends[number], BACKWARD, out)
        unit = self.order.blocks[number]
        if unit.around >= 0:  # a recompute may have overwritten what was prefetched
            self.slots.take_unit(unit, BACKWARD, out)
        if self.order.policy.rolling:
            self._raise_limit(len(self.order.backward.places), out)

    def is_next(self, unit: Unit[W]) -> bool:
        """Whether this backward has not gathered the unit yet, or is in the midst of it."""
        return self.order.backward.starts[self.number[unit]] >= self._at

    # between two passes

    def prefetch_pass(self, phase: str, out: list[Action[W]]) -> None:
        """Start the first gathers of the blocks of a coming pass, if their bytes are free."""
        order, slots = self.order, self.slots
        if not order.blocks:
            return
        unit = order.blocks[0 if phase == FORWARD else -1]
        groups = Policy.order(unit.groups, phase, unit.recomputed)
        under = [found for group in groups for found in slots.overlapping(unit, group)]
        if all(slots.held[found][0] is unit for found in under if found in slots.held):
            for group in groups[:1] if order.policy.per_module else groups:
                slots.gather_group(unit, group, phase, out)

    def prefetchable(self) -> list[Unit[W]]:
        """Blocks that can be gathered before a forward and stay there until it uses them."""
        policy, blocks = self.order.policy, self.order.blocks
        first = [
            0,
            *prefetch_targets(range(1, policy.blocks), policy.depth, policy.kept),
            *policy.kept,
        ]
        return [blocks[number] for number in sorted(set(first))] if blocks else []

    # inside

    def _places(self, phase: str) -> Places[W]:
        return self.order.forward if phase == FORWARD else self.order.backward

    def _entry_limit(self, number: int) -> int:
        """The limit at a block's pre-forward: behind its last group, or behind its first."""
        places = self.order.forward
        if self.one_by_one:
            return min(places.starts[number] + 1, places.ends[number])
        return places.ends[number]

    def _position(self, unit: Unit[W], group: Group[W]) -> int:
        """The position of a group in the forward, within the present run of its block."""
        return self.order.forward.starts[self.number[unit]] + self.order.index[group]

    def _raise_limit(self, limit: int, out: list[Action[W]]) -> None:
        if limit > self._limit:
            self._limit = limit
        self.launch_due(out)

    def _demand(self, number: int, limit: int, phase: str, out: list[Action[W]]) -> None:
        """Gather what a block needs now, up to ``limit``, wherever in the pass the queue is."""
        places = self._places(phase)
        if self._pass is not places:
            self.begin(phase)
        start = places.starts[number]
        if self._at < start or start < self._passed:
            self.slots.held.clear()  # it was prefetched for blocks that did not run next
            self._at, self._limit, self._passed = start, limit, start
        self._raise_limit(limit, out)
        while self._at < limit:  # bytes are held: the slots raise, or give prefetches up
            owner, group = places.places[self._at]
            self._at += 1
            self.slots.gather_group(owner, group, phase, out)
