"""The order in which blocks run, learned in the first step (``unexpected_order = "learn"``).

In that step each block is gathered when it runs (``"gather"``). Before each block, and before any
collective, the ranks compare by the store which block comes: if it differs, all of them raise,
instead of waiting for each other. The learned order is that of the forward whose backward ended
first. It replaces the declared order at the first forward after an optimizer step: no autograd
graph whose tensors alias a slot can be used any more then, so that blocks may change slots. From
then on the learned order is required as strictly as a declared one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from internsp.errors import OrderError
from internsp.schedule.learned import with_run_order
from internsp.wp.slots import Unit

if TYPE_CHECKING:
    from internsp.wp.communicator import ISPCommunicator


class OrderLearner:
    """Records the order in which one chunk's blocks run, until its first optimizer step.

    Args:
        communicator: the communicator of the blocks; ranks compare by its ``store_group``.
    """

    def __init__(self, communicator: ISPCommunicator) -> None:
        self._communicator = communicator
        self._forward: list[Unit] = []  # the order of the forward that runs
        self._last_with_grad: list[Unit] = []  # the order of the last forward with gradients
        self._order: list[Unit] = []  # the order of the forward whose backward ended first
        self._versions: list[int] = []  # of all parameters, when that backward ended
        communicator.after_backward.append(self._backward_ended)

    def root_pre_forward(self) -> None:
        """Called before the model's forward: use the learned order if a step has been made.

        Blocks until all ranks have come, once an order is learned.
        """
        self._forward = []
        if not self._order:
            return
        changed = "with" if self._versions != self._current_versions() else "without"
        found = self._communicator.store_group.all_gather_text(
            "order", f"a forward {changed} new weights"
        )
        if all("without" not in text for text in found.values()):
            self._apply_order()

    def pre_forward(self, unit: Unit | None) -> None:
        """Called before a block's forward, and with ``None`` at the end of the model's forward.

        Blocks until all ranks have come.

        Raises:
            OrderError: the ranks run different blocks; raised on all ranks.
        """
        if unit is not None and self._forward and self._forward[-1] is unit:
            return  # runs in a row count once, however often each rank runs the block
        name = "the end" if unit is None else unit.name
        found = self._communicator.store_group.all_gather_text("order", name)
        if len(set(found.values())) > 1:
            before, rank = len(self._forward), self._communicator.mesh.rank
            others = ", ".join(f"rank {other} {block}" for other, block in found.items())
            raise OrderError(
                f"the ranks run blocks in different orders, as rank {rank} found in the first "
                f"step: after {before} blocks come {others}. An order can be learned only if it is "
                "the same on all ranks: give them data of one shape, or set "
                "weight_parallel.unexpected_order = 'gather'"
            )
        if unit is not None:
            self._forward.append(unit)
        elif torch.is_grad_enabled():
            self._last_with_grad = self._forward

    def _backward_ended(self) -> None:
        if not self._order and self._last_with_grad:
            self._order, self._versions = self._last_with_grad, self._current_versions()

    def _current_versions(self) -> list[int]:
        return [member.version() for member in self._communicator.replicated.all_parameters()]

    def _apply_order(self) -> None:
        """Assign slots, prefetches and the order of collectives by the learned order."""
        communicator, state = self._communicator, self._communicator.state
        plan, queue = communicator.plan, state.queue
        assert plan is not None, "parallelize() has made it"
        state.finish_reductions()  # those in flight were declared in the old order
        communicator.invalidate_slots()
        plan = with_run_order(plan, [unit.block for unit in self._order])
        for unit, planned in zip(communicator.blocks, plan.blocks, strict=True):
            if unit.slot != planned.slot:
                state.pool.slots[unit.slot].free(unit)
                unit.slot = planned.slot
                for weight in unit.weights:
                    weight.invalidate()  # an earlier graph is refused: it aliases the old slot
        queue.reorder(plan.run_policy, self._order)
        exchanges = queue.reductions.exchanges
        exchanges.reorder(completion_order(exchanges.parcels, self._order))
        communicator.contents.renew()
        communicator.plan, queue.strict, communicator.learned = plan, True, True
        communicator.learning = None
        communicator.after_backward.remove(self._backward_ended)


def completion_order(parcels: Sequence[Any], order: Sequence[Unit]) -> list[Any]:
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
