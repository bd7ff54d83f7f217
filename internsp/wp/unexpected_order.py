"""The order in which blocks run, where it is not the declared one (``unexpected_order``).

``"gather"``: blocks are gathered as they come, and the ranks of a weight group agree on each block
(:class:`OrderAgreement`).

``"learn"``: in the first step each block is gathered when it runs. Before each block, and before
any collective, the ranks compare by the store which block comes: if it differs, all of them raise,
instead of waiting for each other. The learned order is that of the forward whose backward ended
first. It replaces the declared order at the first forward after an optimizer step: no autograd
graph whose tensors alias a slot can be used any more then, so that blocks may change slots. From
then on the learned order is required as strictly as a declared one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import takewhile

import torch
import torch.distributed as dist

from internsp.errors import CollectiveError, OrderError
from internsp.failure.consensus import Consensus
from internsp.failure.guard import FailureGuard
from internsp.failure.recovery import StageRecovery
from internsp.schedule.chunk import ChunkLayout
from internsp.schedule.learned import with_run_order
from internsp.schedule.learned_passes import LearnedPasses
from internsp.schedule.terms import Parcel
from internsp.wp.contents import Contents
from internsp.wp.parameter import Member, ShardedParameter
from internsp.wp.perform import Chunk
from internsp.wp.slots import Unit

_IN_ORDER = "all blocks in the declared order"
_AT_END = 0.25  # an answer at the end of a forward comes after those at its head
_REMEMBERED = 1000
REMEDY = (
    "run the same blocks on all of them; on a rank that has no data for a block, run it with other "
    "data and add its output times zero. Only replicas of a shard may run different blocks, with "
    "weight_parallel.unexpected_order = 'gather'"
)
"""For an error: what to do where data decide which blocks a rank runs."""


class OrderAgreement:
    """The ranks that share shards run the same blocks in the same order, or all raise.

    A gather needs all ranks of its weight group. While blocks run in the declared order, nothing is
    compared. A rank whose next block is another one asks the others, by the store, for their next
    block before it launches anything, and so for every block that follows in this forward, and in
    its backward. A rank that has run all blocks in the declared order leaves this as its answer
    when it comes to the head or to the end of the model's forward, not before: a program may run
    the blocks a second time. So no rank ever takes another block's message for its own.

    Args:
        groups: the ranks of each weight group that has several.
        guard: that of the chunk.
        rank: for errors.
        learns: several runs of a block in a row count as one.
    """

    def __init__(
        self, groups: Sequence[Consensus], guard: FailureGuard, rank: int, learns: bool
    ) -> None:
        self._groups, self._guard, self._rank = list(groups), guard, rank
        self._learns = learns
        self._number = 0  # of the forward that runs
        self._departed = False  # the forward that runs has left the order
        self._before = ""  # the block before, in that forward
        # The last forwards that ran in the declared order to their end; older ones are compared.
        self._in_order: deque[int] = deque(maxlen=_REMEMBERED)

    def begin_forward(self, number: int) -> None:
        """Forward ``number`` begins, in the declared order."""
        self._number, self._departed, self._before = number, False, ""

    def pre_forward(self, name: str, expected: bool) -> None:
        """Called before a block's forward, before it is gathered.

        Blocks until all ranks have come, once a block was not the expected one.

        Args:
            name: the block.
            expected: it is the next one in the order.

        Raises:
            OrderError: the ranks run different blocks; raised on all ranks.
        """
        before, number = self._before, self._number
        if self._learns and name == before:
            return
        self._before = name
        behind = number in self._in_order  # one block more, behind the head
        if not expected:
            self._departed = True
            if behind:
                self._in_order.remove(number)
        if self._departed:
            # Another rank's answer at the head says nothing of what it runs behind the head.
            moment = number + _AT_END if behind else number
            self._agree(moment, f"{name} after {before}" if before else name)

    def post_blocks(self, name: str, complete: bool) -> None:
        """Called as the head is used, and again at the end of the model's forward.

        Blocks until all ranks have come, unless all blocks ran in the declared order.

        Args:
            name: ``"the head"`` or ``"the end"``.
            complete: no block of the order is missing.

        Raises:
            OrderError: other ranks run more blocks; raised on all ranks.
        """
        number, at_end = self._number, name == "the end"
        self._departed |= not complete
        if self._departed:
            before = self._before
            self._agree(number, f"{name} after {before}" if before else name)
            return
        if number not in self._in_order:
            self._in_order.append(number)
        elif not at_end:
            return
        for group in self._groups:
            moment = number + _AT_END if at_end else number
            group.answer(self._topic, f"forward {moment}: {_IN_ORDER}")

    def was_in_order(self, forward: int) -> bool:
        """Whether that forward ran all blocks in the declared order, on all ranks."""
        return forward in self._in_order

    def pre_backward(self, name: str, forward: int) -> None:
        """Called before a block's backward, before anything is launched for it.

        Raises:
            OrderError: the ranks run the backward of different blocks; raised on all ranks.
        """
        if not self.was_in_order(forward):
            # Behind the answers to the last forward, before those to the next.
            self._agree(self._number + 0.5, f"backward of {name}")

    @property
    def _topic(self) -> str:
        # After a failure, ranks may have made different numbers of calls.
        return f"run order {self._guard.epoch}"

    def _agree(self, number: float, what: str) -> None:
        def counts(text: str) -> bool:
            return not text.endswith(_IN_ORDER) or float(text.split(maxsplit=2)[1][:-1]) >= number

        value = f"forward {int(number)}: {what}, in another order than expected"
        for group in self._groups:
            try:
                found = group.gather(self._topic, value, counts)
            except CollectiveError as error:  # another rank waits for a block that is not run here
                raise CollectiveError(
                    f"{error}. If the ranks run different blocks: {REMEDY}"
                ) from error
            if len(set(found.values())) > 1:
                others = "; ".join(f"rank {rank} has {text}" for rank, text in found.items())
                raise OrderError(
                    f"the ranks run different blocks, as rank {self._rank} "
                    f"found: {others}. Each block's weights are gathered from all ranks of "
                    f"a weight group: {REMEDY}"
                )


def make_agreement(
    recovery: StageRecovery, weights: Sequence[ShardedParameter], rank: int, learns: bool
) -> OrderAgreement | None:
    """The agreement over the weight groups of ``weights``; ``None`` if each is of one rank."""
    groups = []
    for axis in dict.fromkeys(weight.axis for weight in weights):
        ranks = dist.get_process_group_ranks(axis.weight_group)
        if len(ranks) > 1:
            groups.append(recovery.among(f"{recovery.name}/{axis.name}/{ranks[0]}", ranks))
    return OrderAgreement(groups, recovery.guard, rank, learns) if groups else None


class OrderLearner:
    """Records the order in which one chunk's blocks run, until its first optimizer step.

    Args:
        members: all parameters of the chunk.
        consensus: of the ranks of the stage, which compare.
        rank: for errors.
    """

    def __init__(
        self,
        chunk: Chunk,
        members: Sequence[Member],
        contents: Contents,
        consensus: Consensus,
        rank: int,
    ) -> None:
        self._chunk, self._members, self._contents = chunk, members, contents
        self._consensus, self._rank = consensus, rank
        self._forward: list[Unit] = []  # the order of the forward that runs
        self._last_with_grad: list[Unit] = []  # the order of the last forward with gradients
        self._order: list[Unit] = []  # the order of the forward whose backward ended first
        self._versions: list[int] = []  # of all parameters, when that backward ended

    def root_pre_forward(
        self, layout: ChunkLayout
    ) -> tuple[ChunkLayout, LearnedPasses[ShardedParameter]] | None:
        """Called before the model's forward: use the learned order if a step has been made.

        Blocks until all ranks have come, once an order is learned.

        Args:
            layout: the chunk's, in the declared order.

        Returns:
            The layout in the learned order, and the passes along it; ``None`` if not yet.
        """
        self._forward = []
        if not self._order:
            return None
        changed = "with" if self._versions != self._current_versions() else "without"
        found = self._consensus.gather(
            "order", f"a forward {changed} new weights"
        )
        if all("without" not in text for text in found.values()):
            return self._apply_order(layout)
        return None

    def pre_forward(self, unit: Unit | None) -> None:
        """Called before a block's forward, and with ``None`` at the end of the model's forward.

        Blocks until all ranks have come.

        Raises:
            OrderError: the ranks run different blocks; raised on all ranks.
        """
        if unit is not None and self._forward and self._forward[-1] is unit:
            return  # runs in a row count once, however often each rank runs the block
        name = "the end" if unit is None else unit.name
        found = self._consensus.gather("order", name)
        if len(set(found.values())) > 1:
            before, rank = len(self._forward), self._rank
            others = ", ".join(f"rank {other} {block}" for other, block in found.items())
            raise OrderError(
                f"the ranks run blocks in different orders, as rank {rank} found in the first "
                f"step: after {before} blocks come {others}. An order can be learned only if it is "
                f"the same on all ranks: {REMEDY}"
            )
        if unit is not None:
            self._forward.append(unit)
        elif torch.is_grad_enabled():
            self._last_with_grad = self._forward

    def backward_ended(self) -> None:
        """Called after each backward."""
        if not self._order and self._last_with_grad:
            self._order, self._versions = self._last_with_grad, self._current_versions()

    def _current_versions(self) -> list[int]:
        return [member.version() for member in self._members]

    def _apply_order(
        self, layout: ChunkLayout
    ) -> tuple[ChunkLayout, LearnedPasses[ShardedParameter]]:
        """Assign slots, prefetches and the order of collectives by the learned order."""
        chunk, queue = self._chunk, self._chunk.queue
        chunk.finish_reductions()  # those in flight were declared in the old order
        chunk.invalidate_slots()
        layout = with_run_order(layout, [unit.block for unit in self._order])
        for unit, planned in zip(chunk.units.blocks, layout.blocks, strict=True):
            if unit.slot != planned.slot:
                chunk.pool.slots[unit.slot].free(unit)
                unit.slot = planned.slot
                for weight in unit.weights:
                    weight.invalidate()  # an earlier graph is refused: it aliases the old slot
        passes = queue.reorder(layout.run_policy, self._order)
        exchanges = queue.reductions.exchanges
        exchanges.reorder(completion_order(exchanges.parcels, self._order))
        self._contents.renew()
        return layout, passes


def completion_order(
    parcels: Sequence[Parcel[ShardedParameter]], order: Sequence[Unit]
) -> list[Parcel[ShardedParameter]]:
    """The parcels of replica exchanges in the order in which backward completes them.

    Blocks that do not run are complete only at the end of a step, so they come last.

    Args:
        parcels: the parcels in the declared order.
        order: the blocks in the order of the forward.
    """
    first = {unit: index for index, unit in reversed([*enumerate(order)])}
    above = [*takewhile(lambda parcel: parcel.weights[0].unit.block < 0, parcels)]
    rest = parcels[len(above) :]
    root = [parcel for parcel in rest if parcel.weights[0].unit.block < 0]
    blocks = [parcel for parcel in rest if parcel.weights[0].unit.block >= 0]
    run = [parcel for parcel in blocks if parcel.weights[0].unit in first]
    run.sort(key=lambda parcel: -first[parcel.weights[0].unit])
    return [*above, *run, *root, *(parcel for parcel in blocks if parcel not in run)]
