"""How a block's weights travel: the communicator of a chunk's transformer blocks.

It owns the chunk's state from forward's entry to the end of backward. *When* its methods are
called is :mod:`internsp.wp.prefetch`'s business; *what* is gathered then is
:mod:`internsp.wp.gathers`', by :class:`internsp.wp.schedule.Policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import nn

from internsp.errors import OrderError
from internsp.mesh import ParallelMesh
from internsp.wp.backward import BlockBackward
from internsp.wp.collect import collect
from internsp.wp.communicator import ChunkState, in_backward
from internsp.wp.contents import Contents
from internsp.wp.last_words import EndOfBackward
from internsp.wp.pool import Unit
from internsp.wp.recovery import Recovery
from internsp.wp.replicated import ReplicatedParameter, SmallParameters
from internsp.wp.schedule import BACKWARD, FORWARD, RECOMPUTE, ChunkPlan
from internsp.wp.shard import ShardedWeight
from internsp.wp.turns import Turns
from internsp.wp.unfinished import UnfinishedGradients, discard_sums, with_sums


class ISPCommunicator(BlockBackward):
    """Weights of a chunk's transformer blocks, and the end of its backward.

    Attributes:
        small: replicated parameters.
        recovery: what happens after an exception.
        contents: whether what is in the slots may be used again.
        places: which parameter each module holds under which name.
        unfinished: gradients whose sums wait for a later backward, in a plain loop.
    """

    by_block = True  # a block's weights come and go together

    def __init__(
        self,
        state: ChunkState,
        mesh: ParallelMesh,
        blocks: list[Unit],
        small: SmallParameters,
        strict_order: bool = True,
        mean: bool = False,
    ) -> None:
        super().__init__(state, blocks, small, strict_order)
        self.mesh = mesh
        self.mean = mean
        self.prefetcher: object | None = None
        self.plan: ChunkPlan | None = None
        self.places: dict[tuple[nn.Module, str], ShardedWeight | ReplicatedParameter] = {}
        self.collects_itself = True  # false once a ZeroOptimizer drains instead (WP-9)
        self.more_to_come = False  # micro-batches whose sums replicas exchange together
        self.after_backward: list[Callable[[], None]] = []
        self.after_rest: list[Callable[[], None]] = []  # who holds sums of its own forgets them
        self.recovery = Recovery(mesh, state.collectives.ledger)
        self.unfinished = UnfinishedGradients(partial(discard_sums, state, small), mesh.rank)
        self.contents = Contents(state, self.units, small.everyone, mesh.rank)
        state.began = small.began = self._ensure_callback
        self._next = 0  # the block that a forward must run next
        self._anchor_fired = False  # of the block whose forward runs
        self._forward_open = False

    # forward

    def begin_forward(self) -> None:
        """The model is entered: recover from a failed pass, launch the first gathers."""
        self.recover()
        self._forward_open = True
        self._next = 0
        self._uses.clear()
        self.release_all()  # what was prefetched for blocks that never came
        self.contents.begin_pass()
        for unit in self.outer():
            unit.prefetch()
        if self.blocks:
            self.fetch_first(self.blocks[0], FORWARD)

    def recover(self) -> None:
        """No effect unless a pass has failed: then rest, or raise the first cause (WP-10)."""
        self.recovery.check()
        failed = bool(self.state.collectives.ledger.failure)
        if failed or self._forward_open or self._backward_task >= 0:
            self.recovery.agree()
            self.rest()

    def end_forward(self) -> None:
        """The model's forward is over."""
        if self.strict_order and self.blocks and self._next != len(self.blocks):
            raise OrderError(  # the forward stays open: all ranks recover together
                f"only {self._next} of {len(self.blocks)} blocks ran in this forward on rank "
                f"{self.mesh.rank}: the next in order was {self.blocks[self._next].name}. "
                "Set weight_parallel.unexpected_order = 'gather' for models that skip blocks"
            )
        self._forward_open = False

    def enter_block(self, unit: Unit) -> None:
        """A block's forward or recompute begins."""
        if in_backward():
            self.enter_backward(unit)
            self.fetch_first(unit, RECOMPUTE)
        else:
            self._check_order(unit)
            self._anchor_fired = False
            self.fetch_first(unit, FORWARD)

    def leave_block(self, unit: Unit) -> None:
        """A block's forward is over: its slot may be overwritten. Not called in recompute."""
        self.complete(unit, FORWARD)
        if not self._anchor_fired:  # data left it idle: others have gathered what it gathers
            self.ahead(unit.block, FORWARD)
        self.give_back(unit)

    def reach_anchor(self, unit: Unit) -> None:
        """The trigger inside a block fires: gather what comes next."""
        if in_backward():
            self._reaching = self._reaching and unit is not self._open
        else:
            self._anchor_fired = True
        self.ahead(unit.block, RECOMPUTE if in_backward() else FORWARD)

    # backward

    def begin_backward(self) -> None:
        """A gradient entered the model from outside; idempotent within one backward.

        Queues the end-of-backward callback, from the outermost graph task (WP-9).
        """
        task = torch._C._current_graph_task_id()
        if task == self._backward_task or self._weight_part():
            return
        self.recovery.check()
        if self._backward_task >= 0 and not self._nested:  # the one before this never ended
            self.recovery.agree()
            self.rest()
        self._backward_task = task
        self._nested = self.state.in_blocks = False
        self._lowest = len(self.blocks)
        self.unfinished.look()
        self.release_all()  # what forward prefetched for blocks that never came
        self.contents.check()
        self._queue_end()

    def expect_last_block(self) -> None:
        """Backward enters at the model's output: the last block comes first (usually there)."""
        if self._weight_part():
            return
        if self.blocks and not self.state.policy.per_module and self._open is None:
            self.fetch_first(self.blocks[-1], BACKWARD)

    def end_backward(self) -> None:
        """The outermost backward returns: everything born is launched; drain it (WP-9)."""
        if self._everywhere() and self._lowest > 0:
            self._pass_over(self._last_trained() - 1)
        if not self.state.in_blocks:  # in any order of blocks: it may have come to none of them
            self._close_top()
        self._close()
        if self.state.split is not None:  # an input part: nothing was born
            self.release_all()
            self._backward_task, self.state.in_blocks = -1, False
            return
        for outer in self.outer():
            outer.flush()
        self.finish_backward()

    def finish_backward(self) -> None:
        """Everything is born: launch the rest; complete ``.grad``, unless an optimizer does."""
        pending = self.state.pending
        if not pending.accumulating:
            pending.launch_accumulated()  # of what this backward has passed over
        pending.flush()
        self.release_all()
        if self.collects_itself and (pending.accumulating or self.more_to_come):
            self.unfinished.show(with_sums(self.state, self.small))
        elif self.collects_itself:
            self.unfinished.take()
            collect(self.state, self.small, self.mesh, self.mean)
        self._backward_task, self.state.in_blocks = -1, False
        for callback in self.after_backward:
            callback()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Full accumulation: backwards inside sum whole gradients on this rank and send nothing.

        The first backward outside takes the sums along, so that a loop over micro-batches reduces
        once: put all but the last inside (as with torch's DDP). ``.grad`` is complete again after
        that one, or drained by a ZeroOptimizer's next step, which takes what is left; in between,
        reading it raises, and `zero_grad()` and `.grad = None` drop the sums. Costs the memory of
        every whole gradient in fp32 or wider.
        """
        pending = self.state.pending
        before, pending.accumulating = pending.accumulating, True
        try:
            yield
        finally:
            pending.accumulating = before

    @contextmanager
    def no_replica_sync(self) -> Iterator[None]:
        """Sharded accumulation: backwards inside reduce within the weight group only.

        Sums stay on this rank, of the size of a shard. The first backward outside takes them along
        and exchanges them with the replicas and, for small parameters, with all ranks, once; until
        then ``.grad`` is as in :meth:`no_sync` (WP-9). A ZeroOptimizer does so by itself.
        """
        before, self.more_to_come = self.more_to_come, True
        try:
            yield
        finally:
            self.more_to_come = before

    def unchanged(self) -> AbstractContextManager[None]:
        """A promise that nothing writes weights inside: see :meth:`Contents.unchanged`."""
        return self.contents.unchanged()

    # at rest

    def invalidate(self) -> None:
        """Weights were written where nothing can see it: gather them anew (WP-11).

        Between two passes this is not needed. Between a forward and its backward it makes the
        backward an error.
        """
        for member in self.small.everyone():
            member.invalidate()

    def publish(self) -> None:
        """Wait until every shard is what the optimizer made of it (WP-3)."""
        for member in self.small.everyone():
            if member.ready is not None:
                ready, member.ready = member.ready, None
                ready.wait()

    def settle_gathers(self) -> None:
        """Let gathers that nobody used arrive: the shards they read are about to be written."""
        for weight, handle in list(self.state.handles.items()):
            self.state.collectives.wait(handle, "", weight.name, "settle")
            self.state.arrived(weight)
        self.state.handles.clear()

    def forget_slots(self) -> None:
        """Let gathers in flight arrive; nothing that is whole now will be reused."""
        self.settle_gathers()
        self.state.pool.forget()

    def rest(self) -> None:
        """Let everything in flight arrive and forget it: no lease, no partial gradient."""
        self.forget_slots()
        self.state.pending.discard()
        self.state.touched.clear()
        self.state.split, self.small.apart = None, False
        for weight in self.small.sharded:
            weight.drop_partial()
        self.small.reset()
        self.unfinished.take()  # now that there is no sum left
        for outer in (*self.outer(), *((self.head,) if self.head is not None else ())):
            outer.forget()
        self._forward_open, self._backward_task, self._nested = False, -1, False
        self._open, self._recomputed, self._reaching = None, False, False
        self.state.in_blocks = False
        self._turns = Turns((), self._most_uses, torch.add)
        for callback in self.after_rest:
            callback()

    # inside

    def _check_order(self, unit: Unit) -> None:
        if not self._forward_open:  # blocks run by themselves, without the model's forward
            self.release_all()  # a lease may be older than an optimizer step
            self._next %= len(self.blocks)
            if unit.block < self._next or not self._next:
                self.contents.begin_pass()
        if self.strict_order and unit.block != self._next:
            expected = self.blocks[self._next].name if self._next < len(self.blocks) else "the end"
            raise OrderError(
                f"block {unit.name} ran on rank {self.mesh.rank} where {expected} was expected: "
                "the prefetch order would be wrong. Declare the blocks in the order in which they "
                "run (weight_parallel.blocks), or set weight_parallel.unexpected_order = 'gather'"
            )
        if not self.strict_order:
            slot = self.state.pool.slots[unit.slot]
            if slot.holder is not None and slot.holder is not unit:
                slot.release(slot.holder)  # a prefetch for a block that did not come next
        self._next = unit.block + 1

    def _ensure_callback(self) -> None:
        """A gradient was born though no output of the model was hooked: drain at this task's end.

        Under reentrant checkpointing that task is an inner one: early, but complete.
        """
        if self._backward_task < 0 and self.state.split is None:
            self._backward_task = torch._C._current_graph_task_id()
            self._nested = True
            self.unfinished.look()
            self._queue_end()

    def _queue_end(self) -> None:
        end = EndOfBackward(self.end_backward, self.recovery.backward_failed)
        torch.autograd.Variable._execution_engine.queue_callback(end)
