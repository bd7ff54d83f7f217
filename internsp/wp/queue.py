"""Pure: when every weight is gathered, released and reduced, as actions that events return.

An event is what a hook sees: the model is entered, a block is entered or left, a weight is used,
its gradient is ready. :class:`GatherQueue` answers each with the actions that it brings about, in
order. The communicator performs them, :mod:`internsp.plan.simulate` writes them down: one
interpreter, so that what ``internsp plan`` prints is what runs (WP-2).

A queue holds the places of a pass, ``(unit, group)``. Its head is launched while the *limit* allows
and the bytes of its slot are free. The limit only grows: the trigger of a block raises it "through
the next block", say; with prefetch per module each use raises it by one group; "rolling" has none.
Bytes are released in forward after a group's last use, as earlier forwards have counted, else when
its block is left; in backward when its reduction takes its turn; never in recompute.

How often a weight is used may differ between ranks, for data decide: not at all where an expert is
idle, twice where it serves two modules. Each has exactly one reduction in a backward all the same,
in its *turn*: when those before it have had theirs and all its gradients are ready, as many as this
rank has ever seen it used in one forward. What is left when the unit's backward is over takes its
turn then, with the sum that there is, or with zeros.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic

from internsp.errors import PoolError
from internsp.wp.reductions import Reductions
from internsp.wp.schedule import (
    ALL_GATHER,
    BACKWARD,
    FORWARD,
    FREE,
    NEAR_GATHER,
    NEXT_PASS,
    RECOMPUTE,
    USE,
    WAIT,
    Action,
    Group,
    Policy,
    U,
    W,
    reach,
)

_ABSENT = object()


class Places(Generic[U, W]):
    """The places of one pass in their order.

    Attributes:
        above: where those of each unit before the blocks end.
        starts, ends: where those of each block begin and end, by its place in the order of runs.
    """

    def __init__(
        self, phase: str, blocks: Sequence[U], before: Iterable[U] = (), after: Iterable[U] = ()
    ) -> None:
        self.places: list[tuple[U, Group[W]]] = []
        self.above = [self._add(unit, phase) for unit in before]
        self.starts, self.ends = [0] * len(blocks), [0] * len(blocks)
        numbers = range(len(blocks))
        for number in reversed(numbers) if phase == BACKWARD else numbers:
            self.starts[number] = len(self.places)
            self.ends[number] = self._add(blocks[number], phase)
        for unit in after:
            self._add(unit, phase)

    def _add(self, unit: U, phase: str) -> int:
        for group in Policy.order(unit.groups, phase, unit.recomputed):
            self.places.append((unit, group))
        return len(self.places)


class GatherQueue(Generic[U, W]):
    """A chunk's passes: what is gathered, held, released and reduced, and in which order.

    Args:
        blocks: in the order in which they run: the declared one, or a learned one, in which a block
            may run twice or not at all (:meth:`reorder`).
        root: units beside the blocks that are gathered at the model's entry: embedding and others.
        head: gathered after the last block; may be one of ``root`` (tied).
        overlap: false for the synchronous path, which waits at each launch (WP-12).
        strict: whether blocks must run in the declared order; else one that comes out of turn is
            gathered when it is entered, and prefetches give way.
        limit: bytes of unsharded gradients in flight (WP-6).

    Attributes:
        reductions: those in flight.
        contents: what the slots hold, of each weight; outlives holds, so that what is still there
            is not gathered again (WP-11).
        held: groups that a pass needs, their unit and what for; nothing else takes their bytes.
        flying: gathers that were not waited for; the weights of one launch together.
        reduced: weights whose reduction was launched in the open block's backward, their bytes
            released.
        enclosing: blocks that hold several units (:class:`internsp.wp.enclosing.EnclosingBlocks`);
            ``None``: there are none.
    """

    def __init__(
        self,
        policy: Policy,
        blocks: Sequence[U],
        root: Sequence[U] = (),
        head: U | None = None,
        overlap: bool = True,
        strict: bool = True,
        limit: int = 0,
    ) -> None:
        self.root, self.head = root, head
        self.enclosing: Any = None
        self.overlap, self.strict = overlap, strict
        self.contents: dict[W, Hashable] = {}
        self.sliced: dict[W, Hashable] = {}  # as contents, of what near groups keep slices of
        self.flying: dict[W, Sequence[W]] = {}
        self.reductions: Reductions[W] = Reductions(limit, overlap)
        self._alone = head if head not in root else None  # a head that is not tied
        self._in_slot: dict[int, dict[Group[W], None]] = {}  # whose bytes are whose
        self.held: dict[Group[W], tuple[U, str]] = {}  # needed in this pass
        self._group: dict[W, Group[W]] = {}
        self._index: dict[Group[W], int] = {}  # in its unit
        for unit in (*root, *blocks, *([head] if head is not None else [])):
            self.add(unit)
        self._phase = FORWARD
        self._at = self._limit = 0  # the next place of the pass, and how far it may go
        self._passed = 0  # where the last unit that was left ends
        self._triggered = False  # of the block whose forward runs
        self._uses: dict[W, int] = {}  # in the forward that runs
        self._most: dict[W, int] = {}  # in any, where above one
        self._seen: set[W] = set()  # used in a forward that has left their block
        self.open: U | None = None  # the block whose backward runs
        self._turns: deque[tuple[U, Group[W], list[W]]] = deque()  # of groups; who is trained
        self._due: set[W] = set()  # whose turn is still to come
        self._ready: dict[W, int] = {}  # gradients, of those
        self._again = False  # its weights have been used in its recompute
        self._reaching = False  # its trigger, in the recompute, is still to fire
        self.reduced: set[W] = set()
        self.lowest = len(blocks)  # the block that this backward has come to
        self.in_blocks = False  # what lies above the blocks has had its gradients
        self._late: set[W] = set()  # of the head, ready since backward has come to the blocks
        self._between = False  # the head is used between blocks, in some forward
        self.split: str = ""  # which part of a backward runs, where it is computed in two
        self.reorder(policy, blocks)

    def reorder(self, policy: Policy, blocks: Sequence[U]) -> None:
        """Between two passes: from the next on blocks run in this order.

        Args:
            policy: of that order.
            blocks: one that is not among them does not run in it.
        """
        self.policy, self.blocks = policy, blocks
        self._one_by_one = policy.one_by_one(FORWARD)
        phases = (FORWARD, BACKWARD)
        self._targets = {(p, n): policy.targets(n, p) for n in range(len(blocks)) for p in phases}
        last = [self._alone] if self._alone is not None else []
        self._forward: Places[U, W] = Places(FORWARD, blocks, self.root, last)
        self._backward: Places[U, W] = Places(BACKWARD, blocks)
        self._pass = self._forward
        self._at_block = {unit: number for number, unit in reversed([*enumerate(blocks)])}
        self.recurs = len(self._at_block) < len(blocks)
        self._in_slot.clear()
        self._most.clear()
        self._seen.clear()
        self.lowest, self._between = len(blocks), False
        self._entered = 0  # where recurring ones are told apart: the place of the last one entered
        self._running: U | None = None  # a recurring block whose forward or backward runs
        self.astray = False  # this forward runs in another order: each block is gathered by itself

    def stray(self) -> None:
        """The forward that runs has left the order: nothing is gathered ahead in the rest of it."""
        self.astray = True
        self.held.clear()
        self._limit = self._at

    # forward

    def begin_forward(self, keep: bool, head: bool = False) -> list[Action]:
        """The model is entered: gather what lies beside the blocks, and the first block.

        Args:
            keep: what the slots hold is known to be right.
            head: gather it, too: no rank is known to run the same blocks before it.
        """
        out: list[Action] = []
        self._begin(FORWARD, self._forward)
        if not keep:
            self.forget_contents()
        self._uses.clear()
        for end in self._forward.above:
            self._raise(end, out)
        if self.blocks:
            self._raise(self._entry_limit(0), out)
        if self.policy.rolling:
            self._raise(len(self._forward.places), out)
        if self.enclosing is not None:
            self.enclosing.begin_forward(out)
        if head and self._alone is not None:
            self.gather(self._alone, FORWARD, out)
        return out

    def begin_blocks(self, keep: bool) -> None:
        """Blocks run by themselves, without the model's forward, and a new pass begins.

        What lies beside them stays in its slots for an older backward, in which a rank whose data
        leave it unused would gather nothing (WP-2).
        """
        self._begin(FORWARD, self._forward)
        self._uses.clear()
        if not keep:
            self.lose(w for unit in self.blocks for group in unit.groups for w in group.weights)

    def enter(self, unit: U) -> list[Action]:
        """A block's forward begins."""
        out: list[Action] = []
        self._triggered = False
        if self.astray:
            return self._on_demand(unit)
        if self.recurs:
            self._run_again(unit)
        number = self._at_block[unit]
        self._require(number, self._entry_limit(number), FORWARD, out)
        if self.policy.rolling:
            self._raise(len(self._forward.places), out)
        return out

    def renew(self, unit: U) -> list[Action]:
        """A block's weights are wanted in another dtype than they may have been gathered in."""
        out: list[Action] = []
        for group in unit.groups:
            if any(weight in self.contents for weight in group.weights):  # others: in their turn
                self._launch(unit, group, FORWARD, out)
        return out

    def trigger(self, unit: U, recompute: bool) -> list[Action]:
        """The prefetch trigger of a block fires, in forward or in the recompute."""
        out: list[Action] = []
        if recompute and unit.around >= 0:  # the recompute may go on with the next unit
            return out
        if not recompute:
            self._triggered = True
        elif unit is self.open:
            self._reaching = False
        self._prefetch(unit, BACKWARD if recompute else FORWARD, out)
        return out

    def use(self, unit: U, weight: W, phase: str, told: bool = True) -> list[Action]:
        """A weight is about to be used. Only its own gather is waited for.

        Args:
            phase: recompute or backward where that runs.
            told: whether anything wants to know of the use itself.
        """
        out: list[Action] = []
        group = self._group[weight]
        block = unit.block >= 0
        if block and phase == FORWARD:
            uses = self._uses[weight] = self._uses.get(weight, 0) + 1
            if uses > 1:  # noted at once: after a failure here the next forward is right
                self._most[weight] = max(uses, self._most.get(weight, 1))
        elif phase == RECOMPUTE:
            self._again |= unit is self.open
        elif phase == FORWARD and unit is self._alone and self.blocks:
            self._between |= self._passed < self._forward.ends[-1]
        one_by_one = self._one_by_one and block and phase == FORWARD and not self.astray
        if one_by_one:  # a weight that this rank left unused is gathered first (WP-2)
            number = self._at_block[unit]
            self._require(number, self._place(unit, group) + 1, FORWARD, out)
        if weight.moves:
            if self.contents.get(weight, _ABSENT) != weight.compute_dtype:
                self._gather(unit, group, (weight,), phase, out)
            if weight in self.flying:
                self._wait(weight, unit, phase, out)
        if told:
            out.append(Action(USE, phase, unit, (weight,)))
        if one_by_one:
            self._follow(unit, group, out)
        return out

    def use_all(self, unit: U, phase: str, told: bool) -> list[Action]:
        """All weights of a block are about to be used at once, each once in a pass."""
        out: list[Action] = []
        contents, flying = self.contents, self.flying
        last_first = phase == BACKWARD
        self._again |= phase == RECOMPUTE and unit is self.open
        for group in reversed(unit.groups) if last_first else unit.groups:
            if phase == FORWARD:
                self._uses.update(dict.fromkeys(group.weights, 1))
                self._seen.update(group.weights)
            for weight in reversed(group.weights) if last_first else group.weights:
                if weight.moves and contents.get(weight, _ABSENT) != weight.compute_dtype:
                    self._gather(unit, group, (weight,), phase, out)
                if weight in flying:
                    self._wait(weight, unit, phase, out)
                if told:
                    out.append(Action(USE, phase, unit, (weight,)))
        return out

    def before_backward(self, unit: U, weight: W, told: bool = True) -> list[Action]:
        """What was made with a weight is about to run its backward: :meth:`use`, or nothing.

        A recomputed block waits in its recompute, and only there: one gather serves both. torch's
        non-reentrant form fires the hook of the block's last layer before it recomputes; waiting
        here would hold the recompute's first layer up for the whole block.
        """
        opened = unit is self.open
        if opened and weight in self.reduced:
            return []  # an output of its module that no weight had a part in
        if unit.recomputed and not (self._again and opened and not self.holds(weight)):
            return []
        return self.use(unit, weight, BACKWARD, told)

    def arrive(self, unit: U, weight: W, phase: str) -> list[Action]:
        """Wait for the gather of a weight that is in flight, if it is."""
        out: list[Action] = []
        if weight in self.flying:
            self._wait(weight, unit, phase, out)
        return out

    def release(self, unit: U, weight: W, told: bool = True) -> list[Action]:
        """The layer that used a weight in forward is done with it; ``told``: see :meth:`use`."""
        out = [Action(FREE, FORWARD, unit, (weight,))] if told else []
        if unit.block < 0 or self.policy.one_order:
            return out
        group = self._group[weight]
        if group in self.held and all(
            w in self._seen and self._uses.get(w, 0) == self._most.get(w, 1) for w in group.weights
        ):
            del self.held[group]
            self._advance(out)
        return out

    def leave(self, unit: U) -> list[Action]:
        """A block's forward is over: what its data have left out is done as if they had not."""
        out: list[Action] = []
        for group in unit.groups:
            self._seen.update(self._uses.keys() & group.weights)
        if self.astray:
            self._let_go(unit)
            return out
        end = self._forward.ends[self._at_block[unit]]
        if self._one_by_one and unit.groups:
            self._require(self._at_block[unit], end, FORWARD, out)
            self._follow(unit, unit.groups[-1], out)
        if not self._triggered:  # unused on this rank: others have gathered what it gathers
            self._prefetch(unit, FORWARD, out)
        self._let_go(unit)
        self._passed, self._running = end, None
        self._advance(out)
        return out

    # backward

    def begin_backward(self, exchanges: bool = False) -> None:
        """A gradient has entered the model from outside.

        Args:
            exchanges: replicas exchange what it completes while it runs.
        """
        self._begin(BACKWARD, self._backward)
        self.reductions.exchanges.begin(exchanges)
        self.in_blocks, self.lowest = False, len(self.blocks)

    def at_output(self) -> list[Action]:
        """Backward enters at the model's output: the last block comes first (usually there)."""
        out: list[Action] = []
        if self.blocks and not self.policy.per_module and self.open is None:
            self._gather_block(len(self.blocks) - 1, out)
        return out

    def run_of(self, unit: Any) -> int | None:
        """Which of its runs a recurring block is in, by its place in the order."""
        return self._at_block.get(unit) if self.recurs else None

    def enter_backward(self, unit: U, everywhere: bool, run: int | None = None) -> list[Action]:
        """The gradient of a block's output has arrived, or its recompute begins.

        Args:
            everywhere: all ranks go through all blocks: those that this rank's data send no
                gradient through take their place.
            run: of which of its runs, where it recurs (:meth:`run_of`); ``None``: of the open one.
        """
        out: list[Action] = []
        if self.enclosing is not None:
            self.enclosing.come_to(unit.block, everywhere, out)
        self.come_to(unit, everywhere, run, out)
        return out

    def come_to(self, unit: U, everywhere: bool, run: int | None, out: list[Action]) -> None:
        """:meth:`enter_backward` within whatever block is around it."""
        if self.open is unit and run in (None, self._at_block[unit]):
            return
        number = self._at_block[unit] if run is None else run
        if everywhere:
            self.pass_over(number, out)
        self._enter_backward(number, everywhere, out)

    def pass_over(self, to: int, out: list[Action]) -> None:
        """Data of this rank send no gradient through the runs of blocks above ``to``: take their
        place."""
        for number in range(self.lowest - 1, to, -1):
            self._enter_backward(number, True, out)

    def grad_ready(self, unit: U, weight: W, last: bool = False) -> list[Action]:
        """A gradient of a weight is ready; it has been added to those before it.

        Args:
            last: it has no other in this backward, however often it was used.
        """
        out: list[Action] = []
        if weight in self._due and (self.split or unit is self.open):
            self._gradients_ready((weight,), last, out)
        elif unit.block >= 0 or self.split:
            self.reductions.launch(unit, (weight,), out)
        elif self.in_blocks and unit is self._alone:
            # Of a head that is used between blocks: among the blocks' reductions it would have no
            # place of its own, since data decide what their unused weights keep back (WP-2).
            self._late.add(weight)
        return out

    def grads_ready(self, unit: U, weights: Sequence[W]) -> list[Action]:
        """:meth:`grad_ready` of the last gradients of several weights of a block."""
        out: list[Action] = []
        if self.split or unit is not self.open:
            for weight in weights:
                out += self.grad_ready(unit, weight, last=True)
            return out
        rest = [weight for weight in weights if weight not in self._due]
        self._gradients_ready(weights, True, out)
        for weight in rest:
            self.reductions.launch(unit, (weight,), out)
        return out

    def come_to_earlier(self, everywhere: bool, lowest: int = 0) -> list[Action]:
        """Backward has left the graph of one forward for an earlier one's: through all once more.

        Autograd runs what was recorded last first: of losses that were added up, all of the later
        forward, then the earlier one, from the top. Arguments as in :meth:`end_backward`.
        """
        out: list[Action] = []
        self.reductions.exchanges.early = False  # all weights have one more reduction
        self._end_graph(everywhere, lowest, out)
        self.in_blocks, self.lowest = False, len(self.blocks)
        return out

    def end_backward(self, everywhere: bool, lowest: int = 0) -> list[Action]:
        """The outermost backward returns: what its data have left out takes its place.

        Args:
            everywhere: as in :meth:`enter_backward`.
            lowest: the block at which every rank's backward ends; below it all is frozen.
        """
        out: list[Action] = []
        self._end_graph(everywhere, lowest, out)
        if not self.split:
            for unit in self.root:
                self.reduce_unit(unit, out, last=True)
        return out

    def _end_graph(self, everywhere: bool, lowest: int, out: list[Action]) -> None:
        if self.enclosing is not None:
            self.enclosing.end(everywhere, lowest, out)
        if everywhere and self.lowest > 0:
            self.pass_over(lowest - 1, out)
        if not self.in_blocks:  # in any order of blocks: it may have come to none of them
            self.top(out)
        self.close(out)
        if self._alone is not None:
            for group in self._alone.groups:
                late = [weight for weight in group.weights if weight in self._late]
                if late:
                    self.reductions.launch(self._alone, late, out, last=True)
        self._late.clear()

    def top(self, out: list[Action]) -> None:
        """Backward has come to the blocks: what lies above them has had its gradients (WP-2)."""
        self.in_blocks = True
        if self.head is not None and not self.split:
            self.reduce_unit(self.head, out, self.head is self._alone and not self._between)

    def reduce_unit(self, unit: U, out: list[Action], last: bool) -> None:
        """Reduce what a unit beside the blocks has, zeros where it has nothing.

        Args:
            last: it has no other reduction in this backward.
        """
        for group in unit.groups:
            weights = [weight for weight in group.weights if weight.trained]
            if weights:
                self.reductions.launch(unit, weights, out, last)

    def close(self, out: list[Action]) -> None:
        """The open block's backward is over: weights without a gradient take their place."""
        unit = self.open
        if unit is None:
            return
        self._reach(out)
        self.open = None
        if not self.split:
            while self._turns:
                self._take_turn(out)
        self.reduced.clear()
        self._let_go(unit)
        self._passed, self._running = self._backward.ends[self._at_block[unit]], None
        self._advance(out)

    # for blocks that hold several units (:mod:`internsp.wp.enclosing`)

    def add(self, unit: U) -> None:
        """Take in a unit."""
        for index, group in enumerate(unit.groups):
            self._index[group] = index
            self._group.update(dict.fromkeys(group.weights, group))

    def gather(self, unit: U, phase: str, out: list[Action]) -> None:
        """Gather now what the slot does not hold of a unit."""
        for group in Policy.order(unit.groups, phase, unit.recomputed):
            self._launch(unit, group, phase, out)

    def recompute(self, unit: U, following: U | None) -> list[Action]:
        """A forward of ``unit`` in a recompute that goes around several units.

        What backward holds for others gives way: it is gathered again where it is used.

        Args:
            following: the unit that the recompute enters next; gathered where there is room.
        """
        out: list[Action] = []
        self._insist(unit, RECOMPUTE, out)
        if following is not None and self.policy.depth:
            for group in following.groups:
                if not any(found in self.held for found in self._under(following, group)):
                    self._launch(following, group, RECOMPUTE, out)
        return out

    def leave_recompute(self, unit: U) -> None:
        """It is over; what was gathered for the unit's backward stays."""
        if unit is not self.open and self._backward.starts[self._at_block[unit]] >= self._at:
            self._let_go(unit)

    def begin_part(self, weights: bool, exchanges: bool = False) -> None:
        """One part of a backward that a pipeline computes in two (arXiv 2401.10241).

        The input part gives no weight a gradient. The weight part needs no unsharded weight; its
        reductions have one order, of all units.

        Args:
            exchanges: as in :meth:`begin_backward`.
        """
        self.reductions.exchanges.begin(exchanges and weights)
        self.split = "weights" if weights else "inputs"
        units = [*self.root, *dict.fromkeys(self.blocks)]
        if self.head is not None and self.head not in self.root:
            units.append(self.head)
        order = [(unit, group) for unit in units for group in unit.groups]
        self._declare(reversed(order) if weights else ())

    def end_part(self) -> list[Action]:
        """It is over: weights without a gradient take their place with zeros."""
        out: list[Action] = []
        while self._turns:
            self._take_turn(out)
        self.split = ""
        return out

    def end_pass(self) -> None:
        """A backward is over: no byte is needed any more; contents stay."""
        self._begin(FORWARD, self._forward)
        self.reductions.exchanges.early = self.in_blocks = False

    def reduce(self, unit: U, weight: W) -> list[Action]:
        """Reduce a sum that no backward has reduced since it was accumulated."""
        out: list[Action] = []
        self.reductions.launch(unit, (weight,), out, last=True, sums=True)
        return out

    # at rest

    def expect(self, phase: str) -> list[Action]:
        """A pipeline runs this chunk's forward or backward next: start its first gathers.

        Where their bytes are still in use they start with the pass itself.
        """
        out: list[Action] = []
        for unit in self.root if phase == FORWARD else ():
            self.gather(unit, FORWARD, out)
        if self.blocks:
            unit = self.blocks[0 if phase == FORWARD else -1]
            groups = Policy.order(unit.groups, phase, unit.recomputed)
            held = [g for group in groups for g in self._under(unit, group) if g in self.held]
            if all(self.held[group][0] is unit for group in held):
                for group in groups[:1] if self.policy.per_module else groups:
                    self._launch(unit, group, phase, out)
        return out

    def with_room(self) -> list[U]:
        """Units that may be gathered before a forward and are still there when it comes to them."""
        policy = self.policy
        first = [0, *reach(range(1, policy.blocks), policy.depth, policy.kept), *policy.kept]
        blocks = [self.blocks[block] for block in sorted(set(first))] if self.blocks else []
        head = [self.head] if self.head is not None else []
        rests = self.enclosing.with_room() if self.enclosing is not None else []
        return list(dict.fromkeys([*self.root, *blocks, *head, *rests]))

    def gather_early(self, units: Iterable[U]) -> list[Action]:
        """Gather ``units``, of :meth:`with_room`, before the forward that uses them."""
        out: list[Action] = []
        self._begin(FORWARD, self._forward)
        for unit in units:
            self.gather(unit, FORWARD, out)
        return out

    def forget(self, unit: U) -> list[Action]:
        """What a slot holds of ``unit`` is not used again."""
        out: list[Action] = []
        for group in unit.groups:
            for weight in group.weights:
                if weight in self.flying:
                    self._wait(weight, None, "settle", out)
            self.lose(group.weights)
            self.held.pop(group, None)
        return out

    def lose(self, weights: Iterable[W]) -> None:
        """What slots and slices hold of ``weights`` is not used again."""
        for weight in weights:
            self.contents.pop(weight, None)
            self.sliced.pop(weight, None)

    def forget_contents(self) -> None:
        """No slot and no slice holds what is used again."""
        self.contents.clear()
        self.sliced.clear()

    def learn(self, uses: Mapping[W, int]) -> None:
        """How often one forward has used each weight, as if it had run here."""
        self._seen.update(uses)
        self._most = {weight: count for weight, count in uses.items() if count > 1}

    def settle(self) -> list[Action]:
        """Wait for gathers that were not used: the shards they read are about to be written."""
        out: list[Action] = []
        while self.flying:
            self._wait(next(iter(self.flying)), None, "settle", out)
        return out

    def reset(self) -> None:
        """After a failure, when everything in flight has arrived: nothing is whole, held or due."""
        self.forget_contents()
        self.flying.clear()
        self.reductions.reset()
        self._declare(())
        self.held.clear()
        self._in_slot.clear()
        self._uses.clear()
        self.reduced.clear()
        self._at = self._limit = 0
        self.open, self._reaching, self.split = None, False, ""
        self.in_blocks, self.lowest = False, len(self.blocks)
        self._late.clear()
        if self.enclosing is not None:
            self.enclosing.reset()

    def holds(self, weight: W) -> bool:
        """Whether the slot holds, or is getting, what is wanted of a weight."""
        return not weight.moves or self.contents.get(weight, _ABSENT) == weight.compute_dtype

    # inside: gathers

    def _begin(self, phase: str, places: Places[U, W]) -> None:
        self.held.clear()  # what was gathered ahead for blocks that never came
        self._pass, self._phase, self._at, self._limit, self._passed = places, phase, 0, 0, 0
        self._entered, self._running, self.astray = 0, None, False

    def _entry_limit(self, number: int) -> int:
        """The limit with which a block's forward begins: all of it, or its first group.

        Args:
            number: its place in the order of runs, as everywhere below.
        """
        places = self._forward
        if self._one_by_one:
            return min(places.starts[number] + 1, places.ends[number])
        return places.ends[number]

    def _place(self, unit: U, group: Group[W]) -> int:
        """Of a group in the forward of the block that runs."""
        return self._forward.starts[self._at_block[unit]] + self._index[group]

    def _run_again(self, unit: U) -> None:
        """Of a block that recurs its next run begins, or the last once more: uses count anew."""
        number = self._entered = self.blocks.index(unit, self._entered)
        if number != self._at_block[unit]:
            for group in unit.groups:
                for weight in group.weights:
                    self._uses.pop(weight, None)
        self._at_block[unit], self._running = number, unit

    def _on_demand(self, unit: U) -> list[Action]:
        """A block that comes in no order: what it needs, and no more."""
        out: list[Action] = []
        self.held.clear()
        self.gather(unit, FORWARD, out)
        return out

    def _raise(self, limit: int, out: list[Action]) -> None:
        if limit > self._limit:
            self._limit = limit
        self._advance(out)

    def _advance(self, out: list[Action]) -> None:
        """Launch the head of the queue while the limit allows and its bytes are free."""
        places = self._pass.places
        while self._at < min(self._limit, len(places)):
            unit, group = places[self._at]
            if not self.held.keys().isdisjoint(self._under(unit, group)):
                return
            if unit is self._running and self._at >= self._pass.ends[self._at_block[unit]]:
                return  # of its next run, whose hold would end with this one
            self._at += 1
            self._launch(unit, group, self._phase, out)

    def _require(self, number: int, limit: int, phase: str, out: list[Action]) -> None:
        """What a block needs now, up to ``limit``; where the queue is elsewhere it moves there."""
        places = self._backward if phase == BACKWARD else self._forward
        if self._pass is not places:
            self._begin(phase, places)
        start = places.starts[number]
        if self._at < start or start < self._passed:
            self.held.clear()  # prefetches for blocks that did not come next
            self._at, self._limit, self._passed = start, limit, start
        self._raise(limit, out)
        while self._at < limit:  # bytes are held: an error, or prefetches give way
            owner, group = places.places[self._at]
            self._at += 1
            self._launch(owner, group, phase, out)

    def _under(self, unit: U, group: Group[W]) -> list[Group[W]]:
        """Whose contents lie where ``group``'s would."""
        start, end = group.start, group.end
        return [
            found
            for found in self._in_slot.get(unit.slot, ())
            if found.start < end and start < found.end and found is not group
        ]

    def _launch(self, unit: U, group: Group[W], phase: str, out: list[Action]) -> None:
        """Gather what the slot does not hold of ``group``."""
        missing = [
            w for w in group.weights if w.moves and self.contents.get(w, _ABSENT) != w.compute_dtype
        ]
        if missing:
            if phase == BACKWARD and not unit.recomputed:
                missing.reverse()
            self._gather(unit, group, missing, phase, out)
        elif any(w.moves for w in group.weights):
            self._take(unit, group, phase)

    def _gather(
        self, unit: U, group: Group[W], weights: Sequence[W], phase: str, out: list[Action]
    ) -> None:
        evicted = self._take(unit, group, phase)
        for weight in (*evicted, *weights) if self.flying else ():
            if weight in self.flying:  # an older gather still writes there
                self._wait(weight, unit, "settle", out)
        for weight in evicted:
            self.contents.pop(weight, None)
        for weight in weights:
            self.contents[weight] = weight.compute_dtype
        if not weights[0].slices:
            self._send(ALL_GATHER, unit, weights, evicted, phase, out)
            return
        near = [w for w in weights if self.sliced.get(w, _ABSENT) == w.compute_dtype]
        far = [w for w in weights if w not in near]
        self.sliced.update((w, w.compute_dtype) for w in far)
        for kind, part in (NEAR_GATHER, near), (ALL_GATHER, far):
            if part:
                self._send(kind, unit, part, evicted, phase, out)
                evicted = []

    def _send(
        self, kind: str, unit: U, weights: Sequence[W], evicted: Sequence[W], phase: str,
        out: list[Action],
    ) -> None:  # fmt: skip
        out.append(Action(kind, phase, unit, weights, evicted))
        if weights[0].travels:
            self.flying.update(dict.fromkeys(weights, weights))
            if not self.overlap:
                self._wait(weights[0], unit, phase, out)

    def _take(self, unit: U, group: Group[W], purpose: str) -> list[W]:
        """Hold the group's bytes (WP-4).

        Returns:
            Whose contents are lost by it.

        Raises:
            PoolError: a part of them is held, naming both.
        """
        lying, under = self._in_slot.setdefault(unit.slot, {}), self._under(unit, group)
        for found in under:
            if found in self.held:
                holder, why = self.held[found]
                remedy = "unexpected_order = 'gather'"
                if self.policy.rolling:
                    remedy = 'trigger = "out_proj"'
                if self.strict or holder is unit:
                    raise PoolError(
                        f"slot {unit.slot}: the bytes of {group.name} asked for by {unit.name} "
                        f"({purpose}) while they are held by {holder.name} for {found.name} "
                        f"({why}); blocks must run in the declared order and use each weight as "
                        f"often as in their first forward, or set weight_parallel.{remedy}"
                    )
                del self.held[found]
            del lying[found]
        lying[group] = None
        if unit.block >= 0:  # slots beside the blocks are not shared
            self.held[group] = unit, purpose
        return [w for found in under for w in found.weights]

    def _let_go(self, unit: U) -> None:
        for group in unit.groups:
            self.held.pop(group, None)

    def _wait(self, weight: W, unit: U | None, phase: str, out: list[Action]) -> None:
        launched = self.flying[weight]
        for other in launched:
            self.flying.pop(other, None)
        out.append(Action(WAIT, phase, unit, (weight,), launched))

    def _prefetch(self, unit: U, phase: str, out: list[Action]) -> None:
        """``unit``'s trigger: raise the limit."""
        if self.astray:
            return
        policy, places, number = self.policy, self._pass, self._at_block[unit]
        order = self._forward if phase == FORWARD else self._backward
        last = number == (len(self.blocks) - 1 if phase == FORWARD else 0)
        if places is order:
            targets = self._targets[phase, number]
            if targets:
                self._raise(self._through(targets[-1], order), out)
            elif policy.per_module and not policy.one_by_one(phase) and not last:
                coming = number + (1 if phase == FORWARD else -1)
                self._raise(min(order.starts[coming] + 1, order.ends[coming]), out)
            elif policy.per_module and not policy.one_by_one(phase) and phase == FORWARD:
                self._raise(len(order.places), out)
        if last and not policy.one_by_one(phase):
            out.append(Action(NEXT_PASS, phase, unit, ()))

    def _through(self, number: int, places: Places[U, W]) -> int:
        return len(places.places) if number == len(self.blocks) else places.ends[number]

    def _follow(self, unit: U, group: Group[W], out: list[Action]) -> None:
        """With prefetch per module: the group after ``group``, or what follows the last."""
        places, number, at = self._forward, self._at_block[unit], self._place(unit, group)
        last = number == len(self.blocks) - 1 and at + 1 == places.ends[number]
        self._raise(len(places.places) if last else at + 2, out)
        if last:
            out.append(Action(NEXT_PASS, FORWARD, unit, ()))

    # inside: reductions

    def _enter_backward(self, number: int, everywhere: bool, out: list[Action]) -> None:
        """A block's backward begins, and that of whatever was before it is over."""
        unit = self.blocks[number]
        if not self.in_blocks:
            if everywhere and not self.policy.per_module:
                self._gather_block(number, out)  # before the top, as where a gradient came by it
            self.top(out)
        self.close(out)
        self.open, self.lowest, self._again = unit, number, False
        if self.recurs:
            self._at_block[unit], self._running = number, unit
        if not self.split:
            self._declare([(unit, group) for group in reversed(unit.groups)])
        self._gather_block(number, out)
        self._reaching = unit.recomputed and unit.has_trigger
        if not self._reaching:
            self._prefetch(unit, BACKWARD, out)

    def _insist(self, unit: U, phase: str, out: list[Action]) -> None:
        """Gather what is missing of a unit, though its bytes are held for another."""
        for group in Policy.order(unit.groups, phase, unit.recomputed):
            for found in self._under(unit, group):
                self.held.pop(found, None)
            self._launch(unit, group, phase, out)

    def _gather_block(self, number: int, out: list[Action]) -> None:
        self._require(number, self._backward.ends[number], BACKWARD, out)
        unit = self.blocks[number]
        if unit.around >= 0:  # a recompute may have taken what was gathered ahead
            self._insist(unit, BACKWARD, out)
        if self.policy.rolling:
            self._raise(len(self._backward.places), out)

    def _reach(self, out: list[Action]) -> None:
        """What the trigger gathers comes before the block's reductions, did it not fire (WP-2)."""
        if self._reaching and self.open is not None:
            self._reaching = False
            self._prefetch(self.open, BACKWARD, out)

    def _declare(self, order: Iterable[tuple[U, Group[W]]]) -> None:
        """The turns of the backward, or the block, that begins; the last used first."""
        trained = [(u, g, [w for w in reversed(g.weights) if w.trained]) for u, g in order]
        self._turns = deque([turn for turn in trained if turn[2]])
        self._due = {weight for _, _, weights in self._turns for weight in weights}
        self._ready.clear()

    def _gradients_ready(self, weights: Sequence[W], last: bool, out: list[Action]) -> None:
        """One more gradient of each of ``weights`` is ready: take the turns that come by it."""
        ready, most = self._ready, self._most
        for weight in weights:
            ready[weight] = ready.get(weight, 0) + (most.get(weight, 1) if last else 1)
        if self.policy.one_order and not self.split:
            # The block's passes hold exchanges of other groups, whose place among the reductions
            # must be the same on every rank: no turn before the block is left.
            return
        while self._turns:
            for weight in self._turns[0][2]:
                if ready.get(weight, 0) < most.get(weight, 1):
                    return
            self._take_turn(out)

    def _take_turn(self, out: list[Action]) -> None:
        """A group has all its gradients, or will have none: reduce it and release its bytes."""
        unit, group, weights = self._turns.popleft()
        self._due.difference_update(weights)
        if not self.split:
            self._reach(out)
        self.reductions.launch(unit, weights, out, last=True)
        if self.split:
            return
        self.reduced.update(group.weights)
        if not self.policy.one_order and len(weights) == len(group.weights):
            self.held.pop(group, None)
            if self._at < self._limit:
                self._advance(out)
