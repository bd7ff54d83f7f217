"""The gather queue as one class, as it was before its parts were divided: the oracle of
``tests/unit/test_wp_queue.py``, which compares every action. Kept as it was; not to be read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from internsp.errors import PoolError
from internsp.schedule.reductions import Reductions
from internsp.schedule.terms import (
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
    Unit,
    W,
    prefetch_targets,
)

U = TypeVar("U", bound=Unit[Any])
_ABSENT = object()


class Places(Generic[U, W]):
    """The places ``(unit, group)`` of one pass, in the order of their gathers.

    Attributes:
        above: for each unit before the blocks, the position behind its last place.
        starts, ends: positions of the first place of each block and behind its last one, by the
            block's number in the order of runs.
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
    """Decides, for the passes of one chunk, what is gathered, held, released and reduced.

    Args:
        blocks: in the order in which they run: the declared order, or a learned one, in which a
            block may run twice or not at all (:meth:`reorder`).
        root: units outside of the blocks that are gathered at the model's pre-forward: the
            embedding and others.
        head: gathered after the last block; one of ``root`` where it is tied to the embedding.
        overlap: false for the synchronous path, which waits at each launch (WP-12).
        strict: blocks must run in the declared order. Otherwise a block that runs out of order is
            gathered at its pre-forward, and what was prefetched for other blocks is given up.
        limit: bytes of unsharded gradients in flight (WP-6).

    Attributes:
        reductions: the reductions in flight.
        contents: for each weight that is in its slot, or on its way there, the dtype there.
            Contents outlive holds, so that what is still in a slot is not gathered again (WP-11).
        sliced: as ``contents``, for this rank's slices within near groups.
        held: groups whose bytes the pass needs, with their unit and the phase.
        flying: weights whose gather was launched and not waited for, each with all weights of
            that launch.
        reduced: weights of the open block whose reduction was launched in this backward.
        open: the block whose backward runs.
        lowest: the number of the last block that this backward has come to.
        in_blocks: whether this backward has passed the head.
        split: ``"inputs"`` or ``"weights"`` while that part of a split backward runs; else empty.
        recurs: whether some block runs several times in a pass.
        out_of_order: whether this forward runs blocks in another order than the learned one, so
            that each block is gathered by itself.
        enclosing: blocks that hold several units; ``None`` if there are none.
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
        self.sliced: dict[W, Hashable] = {}
        self.flying: dict[W, Sequence[W]] = {}
        self.reductions: Reductions[W] = Reductions(limit, overlap)
        self._alone = head if head not in root else None  # the head, unless it is tied
        self._in_slot: dict[int, dict[Group[W], None]] = {}  # the groups that lie in each slot
        self.held: dict[Group[W], tuple[U, str]] = {}
        self._group: dict[W, Group[W]] = {}
        self._index: dict[Group[W], int] = {}  # of a group in its unit
        for unit in (*root, *blocks, *([head] if head is not None else [])):
            self.add(unit)
        self._phase = FORWARD
        self._at = self._limit = 0  # position of the next gather in the pass, and its limit
        self._passed = 0  # position behind the last unit that was left
        self._triggered = False  # the trigger of the block whose forward runs has fired
        self._uses: dict[W, int] = {}  # uses of a weight in the forward that runs
        self._most: dict[W, int] = {}  # the most uses in any forward, where more than one
        self._seen: set[W] = set()  # weights used in a forward that has left their block
        self.open: U | None = None
        # Reductions still to be launched, in order; of each group the trained weights.
        self._turns: deque[tuple[U, Group[W], list[W]]] = deque()
        self._due: set[W] = set()  # the weights in _turns
        self._ready: dict[W, int] = {}  # number of ready gradients of each of them
        self._again = False  # the open block's recompute has used weights
        self._reaching = False  # the open block's recompute has not come to its trigger yet
        self.reduced: set[W] = set()
        self.lowest = len(blocks)
        self.in_blocks = False
        self._late: set[W] = set()  # weights of the head with a gradient since ``in_blocks``
        self._between = False  # some forward has used the head between two blocks
        self.split = ""
        self.reorder(policy, blocks)

    def reorder(self, policy: Policy, blocks: Sequence[U]) -> None:
        """Set the order of blocks for the passes that follow. Called between two passes.

        Args:
            policy: the limits for that order.
            blocks: in that order; a block of the chunk that is missing here does not run.
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
        self._entered = 0  # number of the last run that was entered, where blocks recur
        self._running: U | None = None  # the recurring block whose forward or backward runs
        self.out_of_order = False

    def leave_order(self) -> None:
        """Prefetch nothing in the rest of this forward, which runs blocks in another order."""
        self.out_of_order = True
        self.held.clear()
        self._limit = self._at

    # forward

    def root_pre_forward(self, keep: bool, head: bool = False) -> list[Action]:
        """The model's pre-forward: gather the units outside of the blocks, and the first block.

        Args:
            keep: the contents of slots are known to equal the shards, and are reused.
            head: gather the head now, because the blocks before it may differ between ranks.
        """
        out: list[Action] = []
        self._begin_pass(FORWARD, self._forward)
        if not keep:
            self.invalidate_contents()
        self._uses.clear()
        for end in self._forward.above:
            self._raise_limit(end, out)
        if self.blocks:
            self._raise_limit(self._entry_limit(0), out)
        if self.policy.rolling:
            self._raise_limit(len(self._forward.places), out)
        if self.enclosing is not None:
            self.enclosing.root_pre_forward(out)
        if head and self._alone is not None:
            self.gather(self._alone, FORWARD, out)
        return out

    def begin_blocks(self, keep: bool) -> None:
        """Begin a forward in which the program calls blocks itself, without the model's forward.

        Contents of the slots outside of the blocks are kept for the backward of an earlier forward:
        if they were dropped here, the ranks that use such a weight there would gather it again, and
        the others would not (WP-2).

        Args:
            keep: as in :meth:`root_pre_forward`.
        """
        self._begin_pass(FORWARD, self._forward)
        self._uses.clear()
        if not keep:
            self.invalidate(
                w for unit in self.blocks for group in unit.groups for w in group.weights
            )

    def pre_forward(self, unit: U) -> list[Action]:
        """A block's pre-forward: gather the block, or its first group."""
        out: list[Action] = []
        self._triggered = False
        if self.out_of_order:
            return self._gather_on_demand(unit)
        if self.recurs:
            self._begin_next_run(unit)
        number = self._at_block[unit]
        self._demand(number, self._entry_limit(number), FORWARD, out)
        if self.policy.rolling:
            self._raise_limit(len(self._forward.places), out)
        return out

    def gather_again(self, unit: U) -> list[Action]:
        """Gather again what is in the slot in another dtype than autocast now asks for."""
        out: list[Action] = []
        for group in unit.groups:
            # Groups that are not gathered yet come in their order.
            if any(weight in self.contents for weight in group.weights):
                self._gather_missing(unit, group, FORWARD, out)
        return out

    def trigger(self, unit: U, recompute: bool) -> list[Action]:
        """The prefetch trigger of a block fires, in forward or in a recompute: prefetch."""
        out: list[Action] = []
        if recompute and unit.around >= 0:  # the recompute may run the next unit, too
            return out
        if not recompute:
            self._triggered = True
        elif unit is self.open:
            self._reaching = False
        self._prefetch_from(unit, BACKWARD if recompute else FORWARD, out)
        return out

    def use(self, unit: U, weight: W, phase: str, record: bool = True) -> list[Action]:
        """A weight is about to be used: wait for its gather, and for no other.

        Args:
            phase: the phase of the use.
            record: return a ``USE``, too, which the trace and the slot's streams need.
        """
        out: list[Action] = []
        group = self._group[weight]
        block = unit.block >= 0
        if block and phase == FORWARD:
            uses = self._uses[weight] = self._uses.get(weight, 0) + 1
            if uses > 1:  # at once, so that the next forward is right even if this one fails
                self._most[weight] = max(uses, self._most.get(weight, 1))
        elif phase == RECOMPUTE:
            self._again |= unit is self.open
        elif phase == FORWARD and unit is self._alone and self.blocks:
            self._between |= self._passed < self._forward.ends[-1]
        one_by_one = self._one_by_one and block and phase == FORWARD and not self.out_of_order
        if one_by_one:  # gather the weights before it that this rank left unused (WP-2)
            number = self._at_block[unit]
            self._demand(number, self._position(unit, group) + 1, FORWARD, out)
        if weight.needs_gather:
            if self.contents.get(weight, _ABSENT) != weight.compute_dtype:
                self._gather(unit, group, (weight,), phase, out)
            if weight in self.flying:
                self._wait(weight, unit, phase, out)
        if record:
            out.append(Action(USE, phase, unit, (weight,)))
        if one_by_one:
            self._raise_to_next(unit, group, out)
        return out

    def use_all(self, unit: U, phase: str, record: bool) -> list[Action]:
        """:meth:`use` of all weights of a block at once; each is used once in a pass."""
        out: list[Action] = []
        contents, flying = self.contents, self.flying
        last_first = phase == BACKWARD
        self._again |= phase == RECOMPUTE and unit is self.open
        for group in reversed(unit.groups) if last_first else unit.groups:
            if phase == FORWARD:
                self._uses.update(dict.fromkeys(group.weights, 1))
                self._seen.update(group.weights)
            for weight in reversed(group.weights) if last_first else group.weights:
                if weight.needs_gather and contents.get(weight, _ABSENT) != weight.compute_dtype:
                    self._gather(unit, group, (weight,), phase, out)
                if weight in flying:
                    self._wait(weight, unit, phase, out)
                if record:
                    out.append(Action(USE, phase, unit, (weight,)))
        return out

    def use_in_backward(self, unit: U, weight: W, record: bool = True) -> list[Action]:
        """:meth:`use` before the backward of what was computed with a weight, where needed.

        A block with activation checkpointing waits for the gather in its recompute, not here: the
        same gather serves recompute and backward. torch's non-reentrant checkpointing fires the
        hook of the block's last layer before it recomputes, and waiting here would make the first
        layer of the recompute wait for the whole block.
        """
        opened = unit is self.open
        if opened and weight in self.reduced:
            return []  # this output of the module was computed without its weights
        if unit.recomputed and not (self._again and opened and not self.is_gathered(weight)):
            return []
        return self.use(unit, weight, BACKWARD, record)

    def wait_for(self, unit: U, weight: W, phase: str) -> list[Action]:
        """Wait for the gather of a weight, if it is in flight."""
        out: list[Action] = []
        if weight in self.flying:
            self._wait(weight, unit, phase, out)
        return out

    def release(self, unit: U, weight: W, record: bool = True) -> list[Action]:
        """Release a weight after the forward of the layer that used it.

        Its group's bytes become free here only if each weight of the group has had its last use.

        Args:
            record: return a ``FREE``, too, which the trace needs.
        """
        out = [Action(FREE, FORWARD, unit, (weight,))] if record else []
        if unit.block < 0 or self.policy.one_order:
            return out
        group = self._group[weight]
        if group in self.held and all(
            w in self._seen and self._uses.get(w, 0) == self._most.get(w, 1) for w in group.weights
        ):
            del self.held[group]
            self._launch_due(out)
        return out

    def post_forward(self, unit: U) -> list[Action]:
        """A block's post-forward: release it, and launch what its unused weights or trigger would
        have launched."""
        out: list[Action] = []
        for group in unit.groups:
            self._seen.update(self._uses.keys() & group.weights)
        if self.out_of_order:
            self._release(unit)
            return out
        end = self._forward.ends[self._at_block[unit]]
        if self._one_by_one and unit.groups:
            self._demand(self._at_block[unit], end, FORWARD, out)
            self._raise_to_next(unit, unit.groups[-1], out)
        if not self._triggered:  # the trigger did not run on this rank; on others it may have
            self._prefetch_from(unit, FORWARD, out)
        self._release(unit)
        self._passed, self._running = end, None
        self._launch_due(out)
        return out

    # backward

    def root_pre_backward(self, exchanges: bool = False) -> None:
        """The model's pre-backward: a gradient has entered the model from outside.

        Args:
            exchanges: replicas exchange completed gradients while this backward runs.
        """
        self._begin_pass(BACKWARD, self._backward)
        self.reductions.exchanges.begin(exchanges)
        self.in_blocks, self.lowest = False, len(self.blocks)

    def prefetch_at_output(self) -> list[Action]:
        """Gather the last block, whose backward is first where a gradient enters at the output."""
        out: list[Action] = []
        if self.blocks and not self.policy.per_module and self.open is None:
            self._demand_block(len(self.blocks) - 1, out)
        return out

    def run_of(self, unit: Any) -> int | None:
        """The number of a recurring block's present run in the order; else ``None``."""
        return self._at_block.get(unit) if self.recurs else None

    def pre_backward(self, unit: U, all_ranks: bool, run: int | None = None) -> list[Action]:
        """A block's pre-backward: the gradient of its output has arrived, or its recompute begins.

        Args:
            all_ranks: every rank acts for every block, also for blocks that got no gradient on
                this rank, since others may have got one there.
            run: of a recurring block, the run whose output got the gradient (:meth:`run_of`);
                ``None``: the one whose backward is open.
        """
        out: list[Action] = []
        if self.enclosing is not None:
            self.enclosing.pre_backward_of_unit(unit.block, all_ranks, out)
        self.pre_backward_of_unit(unit, all_ranks, run, out)
        return out

    def pre_backward_of_unit(
        self, unit: U, all_ranks: bool, run: int | None, out: list[Action]
    ) -> None:
        """:meth:`pre_backward`, after the enclosing block's own."""
        if self.open is unit and run in (None, self._at_block[unit]):
            return
        number = self._at_block[unit] if run is None else run
        if all_ranks:
            self.pass_over_blocks(number, out)
        self._enter_backward(number, all_ranks, out)

    def pass_over_blocks(self, to: int, out: list[Action]) -> None:
        """Act for the blocks above number ``to``, which got no gradient on this rank."""
        for number in range(self.lowest - 1, to, -1):
            self._enter_backward(number, True, out)

    def grad_ready(self, unit: U, weight: W, last: bool = False) -> list[Action]:
        """A gradient of a weight is ready, and was added to the weight's earlier ones.

        Args:
            last: it is the weight's last one in this backward, however often it was used.
        """
        out: list[Action] = []
        if weight in self._due and (self.split or unit is self.open):
            self._gradients_ready((weight,), last, out)
        elif unit.block >= 0 or self.split:
            self.reductions.launch(unit, (weight,), out)
        elif self.in_blocks and unit is self._alone:
            # The head was used between blocks. Its reduction waits for the end: among the blocks'
            # reductions its position would depend on which of their weights are unused (WP-2).
            self._late.add(weight)
        return out

    def grads_ready(self, unit: U, weights: Sequence[W]) -> list[Action]:
        """:meth:`grad_ready` for the last gradients of several weights of a block."""
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

    def begin_earlier_graph(self, all_ranks: bool, lowest: int = 0) -> list[Action]:
        """Backward goes from the graph of one forward to that of an earlier one.

        Where the losses of several forwards were added, autograd runs the whole graph of the last
        forward before that of the one before. The order begins again from the head. Arguments as in
        :meth:`root_post_backward`.
        """
        out: list[Action] = []
        self.reductions.exchanges.early = False  # every weight gets one more reduction
        self._end_graph(all_ranks, lowest, out)
        self.in_blocks, self.lowest = False, len(self.blocks)
        return out

    def root_post_backward(self, all_ranks: bool, lowest: int = 0) -> list[Action]:
        """The end of the outermost backward: reduce what this rank's data have left unused.

        Args:
            all_ranks: as in :meth:`pre_backward`.
            lowest: number of the block at which the backward of every rank ends, since all
                parameters below it are frozen.
        """
        out: list[Action] = []
        self._end_graph(all_ranks, lowest, out)
        if not self.split:
            for unit in self.root:
                self.reduce_unit(unit, out, last=True)
        return out

    def _end_graph(self, all_ranks: bool, lowest: int, out: list[Action]) -> None:
        if self.enclosing is not None:
            self.enclosing.end(all_ranks, lowest, out)
        if all_ranks and self.lowest > 0:
            self.pass_over_blocks(lowest - 1, out)
        if not self.in_blocks:  # no block got a gradient
            self.head_post_backward(out)
        self.post_backward(out)
        if self._alone is not None:
            for group in self._alone.groups:
                late = [weight for weight in group.weights if weight in self._late]
                if late:
                    self.reductions.launch(self._alone, late, out, last=True)
        self._late.clear()

    def head_post_backward(self, out: list[Action]) -> None:
        """The head's post-backward: backward has come to the blocks, so reduce the head (WP-2)."""
        self.in_blocks = True
        if self.head is not None and not self.split:
            self.reduce_unit(self.head, out, self.head is self._alone and not self._between)

    def reduce_unit(self, unit: U, out: list[Action], last: bool) -> None:
        """Reduce the gradients of a unit outside of the blocks, zeros where it has none.

        Args:
            last: the unit has no other reduction in this backward.
        """
        for group in unit.groups:
            weights = [weight for weight in group.weights if weight.trained]
            if weights:
                self.reductions.launch(unit, weights, out, last)

    def post_backward(self, out: list[Action]) -> None:
        """The open block's post-backward: reduce what is left of it, and release it."""
        unit = self.open
        if unit is None:
            return
        self._prefetch_if_due(out)
        self.open = None
        if not self.split:
            while self._turns:
                self._reduce_next(out)
        self.reduced.clear()
        self._release(unit)
        self._passed, self._running = self._backward.ends[self._at_block[unit]], None
        self._launch_due(out)

    # for blocks that hold units of their own (:mod:`internsp.schedule.enclosing`)

    def add(self, unit: U) -> None:
        """Register the groups of a unit."""
        for index, group in enumerate(unit.groups):
            self._index[group] = index
            self._group.update(dict.fromkeys(group.weights, group))

    def gather(self, unit: U, phase: str, out: list[Action]) -> None:
        """Gather now those weights of a unit that are not in its slot."""
        for group in Policy.order(unit.groups, phase, unit.recomputed):
            self._gather_missing(unit, group, phase, out)

    def recompute(self, unit: U, following: U | None) -> list[Action]:
        """The forward of ``unit`` within a recompute of several units: gather it.

        It may take bytes that backward holds for other units, which are gathered again at their
        use.

        Args:
            following: the unit whose forward the recompute runs next; it is gathered if its bytes
                are free.
        """
        out: list[Action] = []
        self._demand_unit(unit, RECOMPUTE, out)
        if following is not None and self.policy.depth:
            for group in following.groups:
                if not any(found in self.held for found in self._overlapping(following, group)):
                    self._gather_missing(following, group, RECOMPUTE, out)
        return out

    def leave_recompute(self, unit: U) -> None:
        """End that forward of the unit: release the unit, unless its backward is next."""
        if unit is not self.open and self._backward.starts[self._at_block[unit]] >= self._at:
            self._release(unit)

    # a split backward, and the end of any

    def begin_backward_part(self, weights: bool, exchanges: bool = False) -> None:
        """Begin one part of a split backward (input or weight backward, arXiv 2401.10241).

        In the input backward no weight gets a gradient. The weight backward needs no unsharded
        weight; its reductions have one order over all units.

        Args:
            exchanges: as in :meth:`root_pre_backward`.
        """
        self.reductions.exchanges.begin(exchanges and weights)
        self.split = "weights" if weights else "inputs"
        units = [*self.root, *dict.fromkeys(self.blocks)]
        if self.head is not None and self.head not in self.root:
            units.append(self.head)
        order = [(unit, group) for unit in units for group in unit.groups]
        self._declare_reductions(reversed(order) if weights else ())

    def end_backward_part(self) -> list[Action]:
        """End that part: reduce the weights that are left, zeros where they have no gradient."""
        out: list[Action] = []
        while self._turns:
            self._reduce_next(out)
        self.split = ""
        return out

    def end_pass(self) -> None:
        """A backward is over: release everything; contents stay."""
        self._begin_pass(FORWARD, self._forward)
        self.reductions.exchanges.early = self.in_blocks = False

    def reduce(self, unit: U, weight: W) -> list[Action]:
        """Reduce a sum of gradients that was accumulated and that no backward has reduced."""
        out: list[Action] = []
        self.reductions.launch(unit, (weight,), out, last=True, sums=True)
        return out

    # between two passes

    def prefetch_pass(self, phase: str) -> list[Action]:
        """Start the first gathers of a forward or backward that a pipeline runs next.

        Where their bytes are still in use, the pass itself starts them.
        """
        out: list[Action] = []
        for unit in self.root if phase == FORWARD else ():
            self.gather(unit, FORWARD, out)
        if self.blocks:
            unit = self.blocks[0 if phase == FORWARD else -1]
            groups = Policy.order(unit.groups, phase, unit.recomputed)
            held = [g for group in groups for g in self._overlapping(unit, group) if g in self.held]
            if all(self.held[group][0] is unit for group in held):
                for group in groups[:1] if self.policy.per_module else groups:
                    self._gather_missing(unit, group, phase, out)
        return out

    def prefetchable(self) -> list[U]:
        """Units that can be gathered before a forward and stay there until it uses them."""
        policy = self.policy
        first = [
            0,
            *prefetch_targets(range(1, policy.blocks), policy.depth, policy.kept),
            *policy.kept,
        ]
        blocks = [self.blocks[block] for block in sorted(set(first))] if self.blocks else []
        head = [self.head] if self.head is not None else []
        rests = self.enclosing.prefetchable() if self.enclosing is not None else []
        return list(dict.fromkeys([*self.root, *blocks, *head, *rests]))

    def prefetch(self, units: Iterable[U]) -> list[Action]:
        """Gather ``units`` (of :meth:`prefetchable`) before the forward that uses them."""
        out: list[Action] = []
        self._begin_pass(FORWARD, self._forward)
        for unit in units:
            self.gather(unit, FORWARD, out)
        return out

    def reshard(self, unit: U) -> list[Action]:
        """Drop the contents of ``unit``'s slot: its next use gathers it again."""
        out: list[Action] = []
        for group in unit.groups:
            for weight in group.weights:
                if weight in self.flying:
                    self._wait(weight, None, "settle", out)
            self.invalidate(group.weights)
            self.held.pop(group, None)
        return out

    def invalidate(self, weights: Iterable[W]) -> None:
        """Drop the contents of slots and slices for ``weights``."""
        for weight in weights:
            self.contents.pop(weight, None)
            self.sliced.pop(weight, None)

    def invalidate_contents(self) -> None:
        """Drop the contents of all slots and slices."""
        self.contents.clear()
        self.sliced.clear()

    def set_uses(self, uses: Mapping[W, int]) -> None:
        """Count ``uses`` of each weight, as if a forward with them had run here."""
        self._seen.update(uses)
        self._most = {weight: count for weight, count in uses.items() if count > 1}

    def wait_for_gathers(self) -> list[Action]:
        """Wait for all gathers in flight: the shards that they read are about to be written."""
        out: list[Action] = []
        while self.flying:
            self._wait(next(iter(self.flying)), None, "settle", out)
        return out

    def reset(self) -> None:
        """After a failure, once everything in flight has arrived: drop all state of passes.

        The counts of uses stay.
        """
        self.invalidate_contents()
        self.flying.clear()
        self.reductions.reset()
        self._declare_reductions(())
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

    def is_gathered(self, weight: W) -> bool:
        """Whether a weight is in its slot, or on its way there, in the dtype that is wanted now."""
        return not weight.needs_gather or self.contents.get(weight, _ABSENT) == weight.compute_dtype

    # inside: gathers

    def _begin_pass(self, phase: str, places: Places[U, W]) -> None:
        self.held.clear()  # what is still held was prefetched for blocks that did not run
        self._pass, self._phase, self._at, self._limit, self._passed = places, phase, 0, 0, 0
        self._entered, self._running, self.out_of_order = 0, None, False

    def _entry_limit(self, number: int) -> int:
        """The limit at a block's pre-forward: behind its last group, or behind its first.

        Args:
            number: the block's number in the order of runs, here and below.
        """
        places = self._forward
        if self._one_by_one:
            return min(places.starts[number] + 1, places.ends[number])
        return places.ends[number]

    def _position(self, unit: U, group: Group[W]) -> int:
        """The position of a group in the forward, within the present run of its block."""
        return self._forward.starts[self._at_block[unit]] + self._index[group]

    def _begin_next_run(self, unit: U) -> None:
        """A recurring block's next run begins, or its last one again: count its uses anew."""
        number = self._entered = self.blocks.index(unit, self._entered)
        if number != self._at_block[unit]:
            for group in unit.groups:
                for weight in group.weights:
                    self._uses.pop(weight, None)
        self._at_block[unit], self._running = number, unit

    def _gather_on_demand(self, unit: U) -> list[Action]:
        """Gather a block that runs out of order, and nothing else."""
        out: list[Action] = []
        self.held.clear()
        self.gather(unit, FORWARD, out)
        return out

    def _raise_limit(self, limit: int, out: list[Action]) -> None:
        if limit > self._limit:
            self._limit = limit
        self._launch_due(out)

    def _launch_due(self, out: list[Action]) -> None:
        """Launch the next gathers while the limit allows it and their bytes are free."""
        places = self._pass.places
        while self._at < min(self._limit, len(places)):
            unit, group = places[self._at]
            if not self.held.keys().isdisjoint(self._overlapping(unit, group)):
                return
            if unit is self._running and self._at >= self._pass.ends[self._at_block[unit]]:
                return  # the group is the next run's, and would be released with this run
            self._at += 1
            self._gather_missing(unit, group, self._phase, out)

    def _demand(self, number: int, limit: int, phase: str, out: list[Action]) -> None:
        """Gather what a block needs now, up to ``limit``, wherever in the pass the queue is."""
        places = self._backward if phase == BACKWARD else self._forward
        if self._pass is not places:
            self._begin_pass(phase, places)
        start = places.starts[number]
        if self._at < start or start < self._passed:
            self.held.clear()  # what is held was prefetched for blocks that did not run next
            self._at, self._limit, self._passed = start, limit, start
        self._raise_limit(limit, out)
        while self._at < limit:  # bytes are held: _acquire raises, or gives prefetches up
            owner, group = places.places[self._at]
            self._at += 1
            self._gather_missing(owner, group, phase, out)

    def _overlapping(self, unit: U, group: Group[W]) -> list[Group[W]]:
        """Other groups that lie in bytes that ``group`` needs."""
        start, end = group.start, group.end
        return [
            found
            for found in self._in_slot.get(unit.slot, ())
            if found.start < end and start < found.end and found is not group
        ]

    def _gather_missing(self, unit: U, group: Group[W], phase: str, out: list[Action]) -> None:
        """Gather those weights of ``group`` that are not in the slot; hold its bytes."""
        missing = [
            w
            for w in group.weights
            if w.needs_gather and self.contents.get(w, _ABSENT) != w.compute_dtype
        ]
        if missing:
            if phase == BACKWARD and not unit.recomputed:
                missing.reverse()
            self._gather(unit, group, missing, phase, out)
        elif any(w.needs_gather for w in group.weights):
            self._acquire(unit, group, phase)

    def _gather(
        self, unit: U, group: Group[W], weights: Sequence[W], phase: str, out: list[Action]
    ) -> None:
        evicted = self._acquire(unit, group, phase)
        for weight in (*evicted, *weights) if self.flying else ():
            if weight in self.flying:  # an earlier gather still writes these bytes
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
        if weights[0].needs_wait:
            self.flying.update(dict.fromkeys(weights, weights))
            if not self.overlap:
                self._wait(weights[0], unit, phase, out)

    def _acquire(self, unit: U, group: Group[W], purpose: str) -> list[W]:
        """Acquire the bytes of a group (WP-4).

        Returns:
            The weights whose contents are overwritten.

        Raises:
            PoolError: some of the bytes are held by another group; names both.
        """
        lying, under = self._in_slot.setdefault(unit.slot, {}), self._overlapping(unit, group)
        for found in under:
            if found in self.held:
                holder, why = self.held[found]
                remedy = "unexpected_order = 'gather'"
                if self.policy.rolling:
                    remedy = 'gather_before = "out_proj"'
                if self.strict or holder is unit:
                    raise PoolError(
                        f"slot {unit.slot}: the bytes of {group.name} asked for by {unit.name} "
                        f"({purpose}) while they are held by {holder.name} for {found.name} "
                        f"({why}); blocks must run in the declared order and use a weight no more "
                        f"often than in a forward before, or set weight_parallel.{remedy}"
                    )
                del self.held[found]
            del lying[found]
        lying[group] = None
        if unit.block >= 0:  # the slots of units outside of the blocks are not held
            self.held[group] = unit, purpose
        return [w for found in under for w in found.weights]

    def _release(self, unit: U) -> None:
        for group in unit.groups:
            self.held.pop(group, None)

    def _wait(self, weight: W, unit: U | None, phase: str, out: list[Action]) -> None:
        launched = self.flying[weight]
        for other in launched:
            self.flying.pop(other, None)
        out.append(Action(WAIT, phase, unit, (weight,), launched))

    def _prefetch_from(self, unit: U, phase: str, out: list[Action]) -> None:
        """Raise the limit as ``unit``'s prefetch trigger says."""
        if self.out_of_order:
            return
        policy, places, number = self.policy, self._pass, self._at_block[unit]
        order = self._forward if phase == FORWARD else self._backward
        last = number == (len(self.blocks) - 1 if phase == FORWARD else 0)
        if places is order:
            targets = self._targets[phase, number]
            if targets:
                self._raise_limit(self._limit_through(targets[-1], order), out)
            elif policy.per_module and not policy.one_by_one(phase) and not last:
                coming = number + (1 if phase == FORWARD else -1)
                self._raise_limit(min(order.starts[coming] + 1, order.ends[coming]), out)
            elif policy.per_module and not policy.one_by_one(phase) and phase == FORWARD:
                self._raise_limit(len(order.places), out)
        if last and not policy.one_by_one(phase):
            out.append(Action(NEXT_PASS, phase, unit, ()))

    def _limit_through(self, number: int, places: Places[U, W]) -> int:
        return len(places.places) if number == len(self.blocks) else places.ends[number]

    def _raise_to_next(self, unit: U, group: Group[W], out: list[Action]) -> None:
        """With prefetch per module: raise the limit to behind the group after ``group``."""
        places, number, at = self._forward, self._at_block[unit], self._position(unit, group)
        last = number == len(self.blocks) - 1 and at + 1 == places.ends[number]
        self._raise_limit(len(places.places) if last else at + 2, out)
        if last:
            out.append(Action(NEXT_PASS, FORWARD, unit, ()))

    # inside: reductions

    def _enter_backward(self, number: int, all_ranks: bool, out: list[Action]) -> None:
        """Open the backward of a block, and close the one before it."""
        unit = self.blocks[number]
        if not self.in_blocks:
            if all_ranks and not self.policy.per_module:
                self._demand_block(number, out)  # before the head, as prefetch_at_output does
            self.head_post_backward(out)
        self.post_backward(out)
        self.open, self.lowest, self._again = unit, number, False
        if self.recurs:
            self._at_block[unit], self._running = number, unit
        if not self.split:
            self._declare_reductions([(unit, group) for group in reversed(unit.groups)])
        self._demand_block(number, out)
        self._reaching = unit.recomputed and unit.trigger_at >= 0
        if not self._reaching:
            self._prefetch_from(unit, BACKWARD, out)

    def _demand_unit(self, unit: U, phase: str, out: list[Action]) -> None:
        """Gather what is missing of a unit, taking bytes that are held for another one."""
        for group in Policy.order(unit.groups, phase, unit.recomputed):
            for found in self._overlapping(unit, group):
                self.held.pop(found, None)
            self._gather_missing(unit, group, phase, out)

    def _demand_block(self, number: int, out: list[Action]) -> None:
        self._demand(number, self._backward.ends[number], BACKWARD, out)
        unit = self.blocks[number]
        if unit.around >= 0:  # a recompute may have overwritten what was prefetched
            self._demand_unit(unit, BACKWARD, out)
        if self.policy.rolling:
            self._raise_limit(len(self._backward.places), out)

    def _prefetch_if_due(self, out: list[Action]) -> None:
        """Prefetch before the block's first reduction if its trigger did not fire (WP-2)."""
        if self._reaching and self.open is not None:
            self._reaching = False
            self._prefetch_from(self.open, BACKWARD, out)

    def _declare_reductions(self, order: Iterable[tuple[U, Group[W]]]) -> None:
        """Declare the order of reductions of a block, or of a weight backward: last used first."""
        trained = [(u, g, [w for w in reversed(g.weights) if w.trained]) for u, g in order]
        self._turns = deque([turn for turn in trained if turn[2]])
        self._due = {weight for _, _, weights in self._turns for weight in weights}
        self._ready.clear()

    def _gradients_ready(self, weights: Sequence[W], last: bool, out: list[Action]) -> None:
        """Count one more gradient of each of ``weights``; launch the reductions that may go."""
        ready, most = self._ready, self._most
        for weight in weights:
            ready[weight] = ready.get(weight, 0) + (most.get(weight, 1) if last else 1)
        if self.policy.one_order and not self.split:
            # The block also launches collectives of other groups, whose position among the
            # reductions must be the same on every rank: reduce when the block is left.
            return
        while self._turns:
            for weight in self._turns[0][2]:
                if ready.get(weight, 0) < most.get(weight, 1):
                    return
            self._reduce_next(out)

    def _reduce_next(self, out: list[Action]) -> None:
        """Reduce the group whose turn it is, and release its bytes."""
        unit, group, weights = self._turns.popleft()
        self._due.difference_update(weights)
        if not self.split:
            self._prefetch_if_due(out)
        self.reductions.launch(unit, weights, out, last=True)
        if self.split:
            return
        self.reduced.update(group.weights)
        if not self.policy.one_order and len(weights) == len(group.weights):
            self.held.pop(group, None)
            if self._at < self._limit:
                self._launch_due(out)


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
