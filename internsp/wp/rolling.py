"""The trigger "rolling", performed: leases by weight, not by block (DESIGN 4.1).

What comes when is decided in :mod:`internsp.wp.line`; here are the moments at which a weight is no
longer needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from internsp.mesh import ParallelMesh
from internsp.wp.communicator import ChunkState, in_backward
from internsp.wp.isp import ISPCommunicator
from internsp.wp.line import Rolling, launches
from internsp.wp.pool import Slot, Unit
from internsp.wp.replicated import SmallParameters
from internsp.wp.schedule import BACKWARD, FORWARD
from internsp.wp.shard import ShardedWeight, Tag


class RollingCommunicator(ISPCommunicator):
    """An :class:`ISPCommunicator` whose gathers follow one another weight by weight.

    A weight that its block uses once in a forward is let go after that use, and in backward when
    its gradient is sent: the nodes that read it are those through which its gradient came. Others
    are let go with their block: weights used several times, frozen ones, and in the first forward
    all, because only then the uses have been counted.

    Attributes:
        rolling: the line of gathers, and the places that they take.
    """

    by_block = False

    def __init__(
        self,
        state: ChunkState,
        mesh: ParallelMesh,
        blocks: list[Unit],
        small: SmallParameters,
        strict_order: bool = True,
        mean: bool = False,
    ) -> None:
        super().__init__(state, mesh, blocks, small, strict_order, mean)
        self.rolling = Rolling(
            blocks, state.policy.onward, self._launches, Unit.extent, self.fetch, self._end
        )
        self._uses: dict[ShardedWeight, int] = {}  # in the forward that runs
        self._most: dict[ShardedWeight, int] = {}  # in any
        self._gone: set[ShardedWeight] = set()  # born in the block whose backward runs

    # when a weight is no longer needed

    def weight_hook(self, unit: Unit, weight: ShardedWeight) -> Tensor:
        """See :meth:`WPCommunicator.weight_hook`."""
        if not in_backward():
            uses = self._uses[weight] = self._uses.get(weight, 0) + 1
            if uses > 1:  # noted at once: after a failure here the next forward is right
                self._most[weight] = max(uses, self._most.get(weight, 0))
        return super().weight_hook(unit, weight)

    def release_hook(self, unit: Unit, weight: ShardedWeight) -> None:
        """See :meth:`WPCommunicator.release_hook`."""
        super().release_hook(unit, weight)
        if not in_backward() and self._most.get(weight) == 1:
            self.rolling.let_go(unit, weight)

    def leave_block(self, unit: Unit) -> None:
        """See :meth:`ISPCommunicator.leave_block`."""
        for weight in unit.weights:
            if uses := self._uses.pop(weight, 0):
                self._most[weight] = max(uses, self._most.get(weight, 0))
        super().leave_block(unit)

    def reduce_in_turn(
        self, unit: Unit, weight: ShardedWeight, gradient: Tensor | None
    ) -> None:
        """See :meth:`ISPCommunicator.reduce_in_turn`; gathers take turns with reductions (WP-2)."""
        super().reduce_in_turn(unit, weight, gradient)
        if self._most.get(weight, 1) == 1:
            self._gone.add(weight)
            self.rolling.let_go(unit, weight)

    def backward_hook(self, unit: Unit, weight: ShardedWeight, tag: Tag) -> None:
        """See :meth:`WPCommunicator.backward_hook`."""
        if unit is self._open and weight in self._gone:
            self.restore(weight, tag)  # an output of its module that no weight had a part in
        else:
            super().backward_hook(unit, weight, tag)

    def nodes_hook(self, unit: Unit, weight: ShardedWeight, tag: Tag) -> None:
        """See :meth:`UnitCommunicator.nodes_hook`."""
        if unit is self._open and weight in self._gone:
            self.restore(weight, tag)
        else:
            super().nodes_hook(unit, weight, tag)

    def _close(self) -> None:
        super()._close()
        self._gone.clear()

    # the line

    def fetch_first(self, unit: Unit, phase: str) -> None:
        """At a unit's entry: the line has brought it, or begins with it."""
        self.rolling.enter(unit, FORWARD if phase == FORWARD else BACKWARD)

    def give_back(self, unit: Unit) -> None:
        """A block has been left: none of its places is needed."""
        self.rolling.give_back(unit)

    def make_way(self, unit: Unit) -> None:
        """Whether the line has brought the block that comes is found at its entry."""

    def release_all(self) -> None:
        """A pass begins or is over: nobody holds a place, nothing is to come."""
        super().release_all()
        self.rolling.release_all()

    def forget_slots(self) -> None:
        """See :meth:`ISPCommunicator.forget_slots`."""
        super().forget_slots()
        self.rolling.release_all()
        self._uses.clear()
        self._gone.clear()

    def expect(self, phase: str) -> None:
        """See :meth:`BlockGathers.expect`: the first block, if no other is in its slot."""
        if phase == FORWARD:
            for outer in self.outer():
                outer.prefetch()
        if self.blocks:
            first = self.blocks[0 if phase == FORWARD else -1]
            if self.rolling.alone(first):
                order = self.state.policy.order(first.weights, phase, first.recomputed)
                self.fetch(first, order, phase)

    def verified(self, unit: Unit, weight: ShardedWeight) -> bool:
        """See :meth:`BlockGathers.verified`: compared when its place was taken."""
        if not self.rolling.holds(unit, weight):
            return False
        tag = self.state.pool.slots[unit.slot].tags.get(weight)
        return tag is not None and (not weight.autocasts or tag[1] == weight.compute_dtype)

    def _lease(self, unit: Unit, weights: Sequence[ShardedWeight], purpose: str) -> Slot:
        """Each weight takes its own place (WP-4)."""
        slot = self.state.pool.slots[unit.slot]
        for weight in weights:
            for owner, other in self.rolling.under(unit, weight):
                self.await_gather(owner, other, "settle")
            gone = self.rolling.take(unit, weight, purpose)
            slot.occupy(unit, weight, [other for _, other in gone], self.state.pool.poison)
        return slot

    def _launches(self, unit: Unit, phase: str) -> list[list[ShardedWeight]]:
        policy = self.state.policy
        order = policy.order(unit.weights, phase, unit.recomputed)
        return launches(
            [w for w in order if not w.resident],
            lambda w: w.layout.size > 1 and policy.small(w.slot_nbytes),
        )

    def _end(self, phase: str) -> None:
        if phase == FORWARD and self.head is not None:
            self.head.prefetch()
