"""The blocks' part of a backward: one reduction a weight, in one order on all ranks (WP-2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from internsp.errors import StaleWeightError
from internsp.wp.communicator import ChunkState, in_backward
from internsp.wp.gathers import BlockGathers
from internsp.wp.pool import Unit
from internsp.wp.replicated import SmallParameters
from internsp.wp.schedule import BACKWARD, RECOMPUTE
from internsp.wp.shard import ShardedWeight, Tag
from internsp.wp.turns import Turns


class BlockBackward(BlockGathers):
    """Follows a backward through the blocks, those included that a rank's data pass over.

    Attributes:
        small: replicated parameters.
    """

    def __init__(
        self,
        state: ChunkState,
        blocks: list[Unit],
        small: SmallParameters,
        strict_order: bool,
    ) -> None:
        super().__init__(state, blocks, strict_order)
        self.small = small
        self._backward_task = -1
        self._nested = False  # that task may be an inner one
        self._open: Unit | None = None  # the block whose backward runs
        self._turns = Turns[ShardedWeight, Tensor]((), self._most_uses, torch.add)
        self._reaching = False  # its anchor, which gathers what comes next, is still to fire
        self._lowest = len(blocks)  # the block that this backward has come to
        self._uses: dict[ShardedWeight, int] = {}  # in the forward that runs
        self._most: dict[ShardedWeight, int] = {}  # in any, where above one
        self._recomputed = False  # whether it has recomputed in this backward

    def enter_backward(self, unit: Unit) -> None:
        """The gradient of a block's output has arrived (or its recompute begins)."""
        if self._open is unit or self._weight_part():
            return
        if self._everywhere():
            self._pass_over(unit.block)
        self._enter(unit)

    def _everywhere(self) -> bool:
        """Whether all ranks go through all blocks, those whose data skip some as if they did."""
        return self.strict_order and not self._nested and self.state.split is None

    def _pass_over(self, to: int) -> None:
        """Data of this rank send no gradient through blocks above ``to``: take their place."""
        for block in range(self._lowest - 1, to, -1):
            self._enter(self.blocks[block])

    def _enter(self, unit: Unit) -> None:
        """``unit``'s backward begins, and that of whatever was before it is over."""
        if not self.state.in_blocks:
            self._close_top()
        self._close()
        self.make_way(unit)
        self._open, self._lowest = unit, unit.block
        order = [w for w in reversed(unit.weights) if w.requires_grad]
        at_close = self.state.policy.one_order
        self._turns = Turns(order, self._most_uses, torch.add, at_close)
        self._reaching = unit.recomputed and unit.anchored
        self.fetch_first(unit, BACKWARD)
        if not self._reaching:
            self.ahead(unit.block, RECOMPUTE if unit.recomputed else BACKWARD)

    def _close_top(self) -> None:
        """Backward has come to the blocks: what lies above them has had its gradients (WP-2)."""
        self.state.in_blocks = True
        tied = self.embedding is not None and self.embedding.tied
        top = self.embedding if tied else self.head
        if top is not None and self.state.split is None:
            top.flush()

    def backward_hook(self, unit: Unit, weight: ShardedWeight, tag: Tag) -> None:
        """A recomputed block waits in its recompute, and only there: one gather serves both.

        torch's non-reentrant form fires the hook of the block's last layer before it recomputes;
        waiting here would hold the recompute's first layer up for the whole block.
        """
        self.restore(weight, tag)
        if not unit.recomputed:
            self._present(unit, weight, BACKWARD)
        elif self._recomputed and unit is self._open and not weight.resident:
            if self.state.pool.slots[unit.slot].tags.get(weight) != tag:
                self._present(unit, weight, BACKWARD)

    def nodes_hook(self, unit: Unit, weight: ShardedWeight, tag: Tag) -> None:
        """See :meth:`UnitCommunicator.nodes_hook`: a function that keeps a weight by itself.

        torch's non-reentrant form would recompute only when it is asked for a saved tensor, and
        such a function may ask for none.
        """
        self.backward_hook(unit, weight, tag)
        if not unit.recomputed or weight.resident:
            return
        slot = self.state.pool.slots[unit.slot]
        if slot.tags.get(weight) != tag:
            self._present(unit, weight, BACKWARD)
        elif weight in self.state.handles:  # the gather is the recompute's, which uses it next
            self.await_gather(unit, weight, RECOMPUTE)
        slot.streams.read(weight)

    def at_hand(self, unit: Unit, weight: ShardedWeight) -> bool:
        """See :meth:`UnitCommunicator.at_hand`: in the block whose backward runs."""
        return unit is self._open

    def weight_hook(self, unit: Unit, weight: ShardedWeight) -> Tensor:
        """See :meth:`WPCommunicator.weight_hook`."""
        if in_backward():
            self.recomputes(unit)
        else:
            uses = self._uses[weight] = self._uses.get(weight, 0) + 1
            if uses > 1:  # noted at once: after a failure here the next forward is right
                self._most[weight] = max(uses, self._most.get(weight, 1))
        return super().weight_hook(unit, weight)

    def _most_uses(self, weight: ShardedWeight) -> int:
        return self._most.get(weight, 1)

    def recomputes(self, unit: Unit) -> None:
        """A weight is used in backward: the recompute of its block has begun."""
        if unit is self._open and unit.recomputed:
            self._recomputed = True

    def gradients_hook(self, unit: Unit, born: Sequence[tuple[ShardedWeight, Tensor]]) -> None:
        """:meth:`gradient_hook` for weights of a block that are born together, in that order."""
        if unit is self._open and self._turns.all_at_once([w for w, _ in born]):
            self.state.began()
            self._reach()
            self.reduce_all(unit, born)
            return
        total: dict[ShardedWeight, Tensor] = {}
        for weight, gradient in born:
            total[weight] = total[weight] + gradient if weight in total else gradient
        for weight, gradient in total.items():
            self.gradient_hook(unit, weight, gradient, last=True)

    def gradient_hook(
        self, unit: Unit, weight: ShardedWeight, gradient: Tensor, last: bool = False
    ) -> None:
        """Launch reductions in the declared order, each when its turn comes (WP-2).

        Args:
            last: ``weight`` will have no other gradient from this pass through its block.
        """
        self.state.began()
        if unit.at_entry and unit is not self._open:
            raise StaleWeightError(
                f"backward entered block {unit.name} on rank {self.small.rank} through a tensor "
                "that left it by another way than its output, so that its weights may not have "
                "been whole: return that tensor from the block, or set "
                "weight_parallel.together_bytes = 0 and compile = false"
            )
        if unit is not self._open or weight not in self._turns:
            self.reduce(unit, weight, gradient)
            return
        for first, total in self._turns.ready(weight, gradient, last):
            self._reach()
            self.reduce_in_turn(unit, first, total)

    def _reach(self) -> None:
        """What the anchor gathers comes before the block's reductions, did it not fire (WP-2)."""
        if self._reaching and self._open is not None:
            self._reaching = False
            self.ahead(self._open.block, RECOMPUTE)

    def reduce_in_turn(
        self, unit: Unit, weight: ShardedWeight, gradient: Tensor | None
    ) -> None:
        """A weight of the open block has had all its births, or will have none."""
        self.reduce(unit, weight, gradient)

    def used(self, unit: Unit) -> None:
        """Blocks give their slot back as a whole, in ``leave_block`` or ``_close``."""

    # inside

    def _close(self) -> None:
        """The open block's backward is over: weights without a gradient take their place."""
        unit = self._open
        if unit is None:
            self.state.pending.flush()
            return
        self._reach()
        self._open, self._recomputed = None, False
        if self.state.split is None:
            for weight, total in self._turns.close():
                self.reduce_in_turn(unit, weight, total)
        self.state.pending.flush()
        self.give_back(unit)

    def _last_trained(self) -> int:
        """The block at which every rank's backward ends: a frozen one below is nowhere entered."""
        if any(w.requires_grad for outer in self.outer() for w in outer.unit.weights):
            return 0
        names = [m.name for m in self.small.members if m.requires_grad]
        for unit in self.blocks:
            small = any(name.startswith(f"{unit.name}.") for name in names)
            if small or any(weight.requires_grad for weight in unit.weights):
                return unit.block
        return len(self.blocks)

    def _weight_part(self) -> bool:
        return self.state.split is not None and self.state.split.weights
