"""What the blocks of a chunk gather, and how far ahead: the policy, performed (WP-1, WP-2)."""

from __future__ import annotations

from collections.abc import Callable

from internsp.wp.communicator import ChunkState, OuterCommunicator, UnitCommunicator
from internsp.wp.embedding import EmbeddingWeightParallelCommunicator
from internsp.wp.head import HeadWeightParallelCommunicator
from internsp.wp.pool import Unit
from internsp.wp.schedule import BACKWARD, FORWARD
from internsp.wp.shard import ShardedWeight


class BlockGathers(UnitCommunicator):
    """Launches the gathers of a chunk's blocks and of what lies beside them.

    Attributes:
        blocks: units in the declared order.
        strict_order: whether blocks must run in it.
        head, embedding: communicators beside this one, or ``None``.
        others: communicators of large weights that belong to none of these.
        at_boundary: called when a pass has nothing left to gather: a pipeline prefetches for the
            next.
    """

    def __init__(self, state: ChunkState, blocks: list[Unit], strict_order: bool) -> None:
        super().__init__(state)
        self.blocks = blocks
        self.strict_order = strict_order
        self.head: HeadWeightParallelCommunicator | None = None
        self.embedding: EmbeddingWeightParallelCommunicator | None = None
        self.others: list[OuterCommunicator] = []
        self.at_boundary: Callable[[], None] = lambda: None

    def outer(self) -> list[OuterCommunicator]:
        """Those of the units beside blocks and head."""
        return [*([self.embedding] if self.embedding is not None else []), *self.others]

    def units(self) -> list[Unit]:
        """All of the chunk: blocks, embedding, others, head."""
        beside = [communicator.unit for communicator in self.outer()]
        head = [self.head.unit] if self.head is not None else []
        return [*self.blocks, *beside, *(unit for unit in head if unit not in beside)]

    def _present(self, unit: Unit, weight: ShardedWeight, phase: str) -> None:
        """With prefetch per module, a weight that this rank left idle is gathered first (WP-2)."""
        policy = self.state.policy
        if policy.per_module and not (phase == BACKWARD and unit.recomputed):
            order = policy.order(unit.weights, phase, unit.recomputed)
            self.fetch(unit, order[: order.index(weight) + 1], phase)
        super()._present(unit, weight, phase)

    def verified(self, unit: Unit, weight: ShardedWeight) -> bool:
        """Every weight was compared at the block's entry, unless they come one by one.

        What is written within a block is found by its backward: the view carries the slot's tag.
        """
        if self.state.policy.per_module:
            return super().verified(unit, weight)
        slot = self.state.pool.slots[unit.slot]
        tag = slot.tags.get(weight)
        if tag is None or slot.holder is not unit:
            return False
        return not weight.autocasts or tag[1] == weight.compute_dtype

    def follow(self, unit: Unit, weight: ShardedWeight, phase: str) -> None:
        """With prefetch per module: launch what comes after ``weight``."""
        if self.state.policy.per_module:
            order = self.state.policy.order(unit.weights, phase, unit.recomputed)
            self._follow(unit, order, order.index(weight), phase)

    def _follow(
        self, unit: Unit, order: list[ShardedWeight], position: int, phase: str
    ) -> None:
        policy, count = self.state.policy, len(order)
        step = policy.follow(position, count, unit.block, phase, unit.recomputed)
        if step is not None:
            self._launch(unit, order, step, phase)
        if policy.exhausted(position, count, unit.block, phase, unit.recomputed):
            self.at_boundary()

    def _launch(
        self, unit: Unit, order: list[ShardedWeight], step: tuple[str, int], phase: str
    ) -> None:
        kind, index = step
        if kind == "weight":
            self.fetch(unit, (order[index],), phase)
        elif index == len(self.blocks):
            if self.head is not None:
                self.head.prefetch()
        elif self._may_lease(self.blocks[index]):
            self.fetch_first(self.blocks[index], FORWARD if phase == FORWARD else BACKWARD)

    def complete(self, unit: Unit, phase: str) -> None:
        """With prefetch per module: what the weights that stayed idle at the end kept back."""
        policy = self.state.policy
        if policy.per_module:
            order = policy.order(unit.weights, phase, unit.recomputed)
            self.fetch(unit, order, phase)
            self._follow(unit, order, len(order) - 1, phase)

    def fetch_first(self, unit: Unit, phase: str) -> None:
        """At a unit's entry: all of it, or its first weight with prefetch per module.

        A lease lasts no longer than a pass, so what is leased was compared in this one.
        """
        if self.state.pool.slots[unit.slot].holder is unit and not self.state.policy.per_module:
            return
        order = self.state.policy.order(unit.weights, phase, unit.recomputed)
        self.fetch(unit, order[:1] if self.state.policy.per_module else order, phase)

    def give_back(self, unit: Unit) -> None:
        """A block has been left: its slot may be overwritten."""
        self.state.pool.slots[unit.slot].release(unit)

    def make_way(self, unit: Unit) -> None:
        """In backward the graph says that ``unit`` comes next: a prefetch for another gives way."""
        self.state.pool.release_all(but=unit)

    def release_all(self) -> None:
        """A pass begins or is over: nobody holds a slot."""
        self.state.pool.release_all()

    def expect(self, phase: str) -> None:
        """A schedule runs this chunk's forward or backward next: start its first gathers.

        Where their slot is still in use they start with the pass itself.
        """
        if phase == FORWARD:
            for unit in self.outer():
                unit.prefetch()
        if self.blocks:
            first = self.blocks[0 if phase == FORWARD else -1]
            if self.state.pool.slots[first.slot].holder in (None, first):
                self.fetch_first(first, phase)

    def ahead(self, block: int, phase: str) -> None:
        """``block``'s trigger has fired: launch what is to be in flight from now on."""
        for target in self.state.policy.ahead(block, phase):
            if target == len(self.blocks):
                if self.head is not None:
                    self.head.prefetch()
            elif self._may_lease(self.blocks[target]):
                unit, then = self.blocks[target], FORWARD if phase == FORWARD else BACKWARD
                order = self.state.policy.order(unit.weights, then, unit.recomputed)
                self.fetch(unit, order, then)
        policy = self.state.policy
        if not policy.per_module and policy.at_boundary(block, phase):
            self.at_boundary()

    def _may_lease(self, unit: Unit) -> bool:
        """Where another order is allowed, a prefetch gives way instead of failing (WP-2)."""
        holder = self.state.pool.slots[unit.slot].holder
        return self.strict_order or holder is None or holder is unit
