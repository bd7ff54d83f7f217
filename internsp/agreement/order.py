"""The order in which blocks run, learned in the first step (``unexpected_order = "learn"``).

Until then blocks are gathered as they come (``"gather"``), and at each the ranks meet by the store,
before any message: a rank that comes to another block than the others is an error on all of them,
not a wait in vain. The order of the forward whose backward ended first replaces the declared one
when the next forward after an optimizer step begins: no graph whose tensors alias a slot is of use
then, so that blocks may change slots. From then on it is kept as strictly as a declared one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from internsp.errors import OrderError
from internsp.plan.learned import in_order
from internsp.wp.slots import Unit

if TYPE_CHECKING:
    from internsp.wp.communicator import ISPCommunicator


class OrderLearner:
    """Records the runs of one chunk's blocks until its first optimizer step.

    Args:
        communicator: of the blocks; its ``meeting`` is where the ranks compare.
    """

    def __init__(self, communicator: ISPCommunicator) -> None:
        self._communicator = communicator
        self._runs: list[Unit] = []  # of the forward that runs
        self._trained: list[Unit] = []  # of the last one that can have a backward
        self._order: list[Unit] = []  # of the one whose backward ended first
        self._versions: list[int] = []  # of all parameters, then
        communicator.after_backward.append(self._backward_ended)

    def begin_forward(self) -> None:
        """The model is entered. Blocks until all ranks have come; takes the order over after a
        step."""
        self._runs = []
        if not self._order:
            return
        changed = "with" if self._versions != self._versions_now() else "without"
        said = self._communicator.meeting.meet("order", f"a forward {changed} new weights")
        if all("without" not in word for word in said.values()):
            self._take_over()

    def come_to(self, unit: Unit | None) -> None:
        """A block's forward begins; ``None``: the model's is over. Blocks until all have come.

        Raises:
            OrderError: on all ranks, if they come to different blocks.
        """
        if unit is not None and self._runs and self._runs[-1] is unit:
            return  # several times in a row are one place, however often each rank runs it
        name = "the end" if unit is None else unit.name
        said = self._communicator.meeting.meet("order", name)
        if len(set(said.values())) > 1:
            place, rank = len(self._runs), self._communicator.mesh.rank
            others = ", ".join(f"rank {other} {word}" for other, word in said.items())
            raise OrderError(
                f"the ranks run blocks in different orders, as rank {rank} found in the first "
                f"step: after {place} blocks come {others}. An order can be learned only if it is "
                "the same on all ranks: give them data of one shape, or set "
                "weight_parallel.unexpected_order = 'gather'"
            )
        if unit is not None:
            self._runs.append(unit)
        elif torch.is_grad_enabled():
            self._trained = self._runs

    def _backward_ended(self) -> None:
        if not self._order and self._trained:
            self._order, self._versions = self._trained, self._versions_now()

    def _versions_now(self) -> list[int]:
        return [member.version() for member in self._communicator.replicated.everyone()]

    def _take_over(self) -> None:
        """Slots, prefetches and the order of collectives follow the learned order from now on."""
        communicator, state = self._communicator, self._communicator.state
        plan, queue = communicator.plan, state.queue
        assert plan is not None, "parallelize() has made it"
        state.finish_reductions()  # what is in flight was declared otherwise
        communicator.forget_slots()
        plan = in_order(plan, [unit.block for unit in self._order])
        for unit, planned in zip(communicator.blocks, plan.blocks, strict=True):
            if unit.slot != planned.slot:
                state.pool.slots[unit.slot].free(unit)
                unit.slot = planned.slot
                for weight in unit.weights:
                    weight.invalidate()  # a graph of before is refused: it aliases the old slot
        queue.reorder(plan.run_policy, self._order)
        exchanges = queue.reductions.exchanges
        exchanges.reorder(completed(exchanges.parcels, self._order))
        communicator.contents.renew()
        communicator.plan, queue.strict, communicator.learned = plan, True, True
        communicator.learning = None
        communicator.after_backward.remove(self._backward_ended)


def completed(parcels: Sequence[Any], order: Sequence[Unit]) -> list[Any]:
    """What replicas exchange, in the order in which a backward through ``order`` completes it.

    Blocks that do not run are never complete before the end of a step: they come last.
    """
    first = {unit: place for place, unit in reversed([*enumerate(order)])}
    above = [*takewhile(lambda parcel: parcel.weights[0].unit.block < 0, parcels)]
    rest = parcels[len(above) :]
    beside = [parcel for parcel in rest if parcel.weights[0].unit.block < 0]
    blocks = [parcel for parcel in rest if parcel.weights[0].unit.block >= 0]
    run = [parcel for parcel in blocks if parcel.weights[0].unit in first]
    run.sort(key=lambda parcel: -first[parcel.weights[0].unit])
    return [*above, *run, *beside, *(parcel for parcel in blocks if parcel not in run)]
