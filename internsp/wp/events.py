"""Where a program is in its forwards and backwards: every event of a chunk's passes.

Hooks report an event; it is checked, the gather queue answers with actions, and the chunk performs
them. No hook knows more than :class:`Events`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from internsp.base.autograd import NO_TASK, graph_task
from internsp.errors import OrderError
from internsp.failure.detection import PostBackwardCallback
from internsp.failure.recovery import StageRecovery
from internsp.mesh import ParallelMesh
from internsp.schedule import terms
from internsp.schedule.enclosing import Enclosing
from internsp.wp.autocast import Autocast
from internsp.wp.checks import RootCheck
from internsp.wp.contents import Contents
from internsp.wp.parameter import ShardedParameter, trained
from internsp.wp.perform import Chunk
from internsp.wp.replicated import ReplicatedParameters
from internsp.wp.run_order import RunOrder
from internsp.wp.slots import Unit

Block = Unit | Enclosing[ShardedParameter]


class Events:
    """Follows the passes of one chunk from begin to end.

    Args:
        replicated: the replicated parameters, and the flags of all.
        checks: what is checked at each forward, in order.

    Attributes:
        recovery: what happens after an exception (WP-10).
        order: which block a forward must run next.
        contents: decides whether a pass may reuse the contents of slots (WP-11).
        forwards: number of forwards that have begun; the hooks on outputs note it.
        inside: whether the model's forward runs. Where a block or weight is used while it does not,
            the program calls a part of the model itself.
        full_params_in: name of the context that holds parameters unsharded outside of training
            (:mod:`internsp.values.whole`), during which no pass may begin; empty if none does.
        backward: the graph task of the backward that is known to run, or -1.
    """

    def __init__(
        self,
        chunk: Chunk,
        mesh: ParallelMesh,
        replicated: ReplicatedParameters,
        recovery: StageRecovery,
        contents: Contents,
        order: RunOrder,
        checks: RootCheck,
    ) -> None:
        self._chunk, self._mesh, self._replicated = chunk, mesh, replicated
        self.recovery, self.contents, self.order = recovery, contents, order
        self._checks = checks
        self._autocast = Autocast(replicated.sharded, chunk.units.blocks, mesh.device.type)
        self.forwards = 0
        self.inside = False
        self.full_params_in = ""
        self.backward = -1
        self._graphs = 0  # graphs made by forwards since the last backward ended
        self._forward: int | None = None  # the forward whose graph the backward is in, if known
        self._forward_open = False  # a forward has begun and not reached its end
        self._nested = False  # the graph task of the backward that runs may be an inner one

    # what runs

    @property
    def busy(self) -> str:
        """What runs now, in words for errors; empty between two passes."""
        if self.full_params_in:
            return f"inside {self.full_params_in}"
        if self.inside:
            return "in the model's forward"
        if graph_task() != NO_TASK:
            return "in a backward"
        return "within unchanged(), which a step opens" if self.contents.promised else ""

    @property
    def unfinished(self) -> bool:
        """Whether a pass has begun and not come to its end: it runs, or has failed."""
        return self._forward_open or self.backward >= 0

    @property
    def weight_part(self) -> bool:
        """See :attr:`internsp.wp.communicator.WPCommunicator.weight_part`."""
        return self._chunk.queue.progress.split == "weights"

    def moment(self, block: Block) -> tuple[int | None, int | None]:
        """What the hooks on a block's output note for :meth:`pre_backward`.

        Returns:
            The forward that runs, and which run of the block this is, where blocks recur. ``None``
            in a recompute: the inner graph of a reentrant one must not queue the final callback.
        """
        if graph_task() != NO_TASK:
            return None, None
        passes = self._chunk.queue.passes
        recurs = passes.order.recurs and isinstance(block, Unit)
        return self.forwards, passes.number.get(block) if recurs else None  # type: ignore[arg-type]

    # forward

    def root_pre_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model's pre-forward: recover from a failed pass, check, launch the first gathers."""
        self.recover()
        self._checks.check(args, kwargs)
        self._chunk.consumer.pass_begins()
        self.recovery.guard.begin_pass()
        self.order.root_pre_forward()
        self._forward_open = self.inside = True
        self._begin_forward()
        self._autocast.enter_model()
        keep, queue = self.contents.begin_pass(), self._chunk.queue
        self._chunk.perform(queue.root_pre_forward(keep, head=self.order.learning is not None))

    def root_post_forward(self, error: BaseException | None) -> None:
        """The model's post-forward: check that all blocks ran.

        Args:
            error: what the forward has raised. The ranks that wait for this one are told (WP-10).
        """
        self.inside = False
        if error is not None:
            self.order.reset()
            if self._forward_open:
                self.recovery.report_failure(f"{type(error).__name__} in forward: {error}")
            else:
                self.recovery.report_refusal(error)
            self.recovery.add_cause_note(error)
            return
        self.order.root_post_forward()
        self._forward_open = False
        self.contents.hand_over()

    def pre_forward(self, block: Block) -> None:
        """A block's pre-forward, in forward or in a recompute."""
        chunk, enclosing = self._chunk, self._chunk.queue.backward.enclosing
        recomputes = graph_task() != NO_TASK
        if isinstance(block, Enclosing):
            if not recomputes:
                if not self.inside:
                    self._enter_alone(chunk.units.blocks[block.first], block.rest)
                self.order.pre_forward_of_enclosing(block)
                chunk.perform(enclosing.pre_forward(block))
        elif recomputes:
            if block in self.order.running:  # by an autograd.grad in its forward, past a checkpoint
                return
            if block.around >= 0:  # the recompute may be that of the enclosing block
                chunk.perform(enclosing.recompute(block))
            else:
                self.pre_backward(block, None)
        else:
            if not self.inside:
                self._enter_alone(block)
            self.order.pre_forward(block, self.inside)
            changed = self._autocast.pre_forward(block)
            if actions := chunk.queue.pre_forward(block):
                chunk.perform(actions)
            if changed:
                chunk.perform(chunk.queue.slots.gather_again(block))

    def _enter_alone(self, unit: Unit, *rest: terms.Unit[ShardedParameter]) -> None:
        """A block's pre-forward where the program calls blocks without the model's forward."""
        chunk = self._chunk
        self.recover()
        if self.order.begins_again(unit, bool(rest)):
            chunk.consumer.pass_begins()
            self.recovery.guard.begin_pass()
            self._begin_forward()
            chunk.queue.begin_blocks(self.contents.begin_pass())
        for each in (unit, *rest, *chunk.units.root):  # these hold the weights that blocks share
            chunk.invalidate_older(each)

    def _begin_forward(self) -> None:
        """A forward begins: note which weights are trained in it."""
        self.forwards += 1
        self.order.begin_forward(self.forwards)
        self._graphs += torch.is_grad_enabled()
        weights = self._replicated.sharded
        for weight, now in zip(weights, trained(weights), strict=True):
            weight.trained = now

    def trigger(self, unit: Unit) -> None:
        """The prefetch trigger of a block fires."""
        self._chunk.perform(self._chunk.queue.trigger(unit, graph_task() != NO_TASK))

    def post_forward(self, block: Block) -> tuple[int | None, int | None]:
        """A block's post-forward, in forward or in a recompute. Returns its :meth:`moment`."""
        if isinstance(block, Unit):
            if graph_task() == NO_TASK:
                self.order.running.discard(block)
                if actions := self._chunk.queue.post_forward(block):
                    self._chunk.perform(actions)
            elif block.around >= 0 and block not in self.order.running:
                self._chunk.queue.backward.leave_recompute(block)
        return self.moment(block)

    # backward

    def root_pre_backward(self, forward: int, at_output: bool = False) -> None:
        """The model's pre-backward: a gradient has arrived at an output of the model or of a block.

        Called for each such gradient; the first one of a backward begins it, and queues the
        callback for its end from the outermost graph task (WP-9).

        Args:
            forward: number of the forward that made the output (``forwards`` at that time).
            at_output: it is the model's output.
        """
        if self.weight_part:
            return
        task = torch._C._current_graph_task_id()
        # Another task within a backward that has not failed: a function or a hook runs a backward.
        inner = self.backward >= 0 and not self._nested and not self.recovery.cause
        if task == self.backward or inner:
            self._enter_graph(forward)
        else:
            self._begin_backward(task, forward)
        if at_output:
            self._chunk.perform(self._chunk.queue.backward.prefetch_at_output())

    def _begin_backward(self, task: int, forward: int) -> None:
        self.recovery.check()
        if self.backward >= 0 and not self._nested:
            # The backward before this one never ended.
            self.recovery.reach_consensus()
            self.reset()
        self.backward, self._forward = task, forward
        self._nested = False
        self._note_trained()
        self._autocast.root_pre_backward()
        self._chunk.queue.backward.root_pre_backward(self._exchanges_early())
        self.contents.check()
        self._queue_post_backward_callback()

    def _enter_graph(self, forward: int) -> None:
        """Backward is in the graph of ``forward`` now; if it was in another one, that has ended."""
        if self._forward not in (None, forward):
            backward, all_ranks = self._chunk.queue.backward, self._comes_to(None)
            self._chunk.perform(backward.begin_earlier_graph(all_ranks, self._last_trained()))
        self._forward = forward

    def pre_backward(self, block: Block, forward: int | None, run: int | None = None) -> None:
        """A block's pre-backward: the gradient of its output has arrived, or its recompute begins.

        Args:
            forward, run: what :meth:`moment` gave when the output was made.
        """
        if forward is not None:
            self.root_pre_backward(forward)
        if self.weight_part:
            return
        queue = self._chunk.queue
        if isinstance(block, Unit):
            actions = queue.backward.pre_backward(block, self._comes_to(block), run)
        else:
            all_ranks = self._comes_to(queue.passes.order.blocks[block.last])
            actions = queue.backward.enclosing.pre_backward(block, all_ranks)
        self._chunk.perform(actions)

    def begin_at_gradient(self) -> None:
        """A gradient is ready, and no output's hook has seen the backward begin: it begins here.

        Under reentrant checkpointing the graph task is an inner one; the callback then comes early,
        but every gradient of that task is complete.
        """
        if not self._chunk.queue.progress.split:
            self.backward = torch._C._current_graph_task_id()
            self._nested, self._forward = True, None
            self._note_trained()
            self._queue_post_backward_callback()

    def root_post_backward(self) -> None:
        """The end of the outermost backward: launch the last reductions, finish them (WP-9)."""
        self._checks.confirm()
        queue, all_ranks = self._chunk.queue, self._comes_to(None)
        self._chunk.perform(queue.backward.root_post_backward(all_ranks, self._last_trained()))
        if queue.progress.split:  # an input backward: no weight has a gradient
            queue.backward.end_pass()
            self.backward = -1
            return
        self._gradients_complete()

    def _gradients_complete(self) -> None:
        """All gradients are ready: reduce what was accumulated; the consumer completes the rest."""
        chunk = self._chunk
        if chunk.streams:
            chunk.reducer.take_turn()
        if not chunk.queue.reductions.accumulating:
            chunk.reduce_accumulated()  # sums that this backward has not reduced
        chunk.queue.backward.end_pass()
        chunk.consumer.backward_ended(chunk.accumulation.goes_on)
        self.backward, self._graphs = -1, 0
        self.contents.hand_over()
        self.order.backward_ended()
        try:
            chunk.consumer.call_hooks()
        finally:
            chunk.queue.backward.end_pass()  # a hook may have run blocks, as a recompute does

    def begin_backward_part(self, weights: bool) -> None:
        """Begin one part of a split backward.

        Args:
            weights: the weight backward; else the input backward.
        """
        self.recovery.check()
        self._chunk.queue.backward.begin_backward_part(weights, self._exchanges_early())

    def end_backward_part(self) -> None:
        """End that part; after the weight backward, gradients are as after any backward."""
        weights = self.weight_part
        self._chunk.perform(self._chunk.queue.backward.end_backward_part())
        if weights:
            self._gradients_complete()

    def _queue_post_backward_callback(self) -> None:
        end = PostBackwardCallback(self.root_post_backward, self.recovery.report_backward_failure)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _note_trained(self) -> None:
        """Note at the begin of a backward which parameters are trained.

        Those that are frozen get no gradient, as under autograd. Others may get one, also where the
        last forward found them frozen: it may be of an earlier graph.
        """
        members = self._replicated.all_parameters()
        for member, now in zip(members, trained(members), strict=True):
            member.frozen = not now
            if now:
                self._replicated.trained.add(member)
        for weight in self._replicated.sharded:
            weight.trained |= not weight.frozen
        self._chunk.consumer.backward_begins()

    def _exchanges_early(self) -> bool:
        """Whether replicas exchange gradients while the backward that begins still runs.

        It must be the last backward before the exchange, the queue must know which reduction of
        each weight is the last, and all ranks must have the same queue.
        """
        chunk, accumulation = self._chunk, self._chunk.accumulation
        if accumulation.goes_on or not chunk.queue.slots.strict:
            return False
        if all(axis.replicas == 1 for axis in chunk.gathers):
            return False
        if chunk.queue.passes.order.recurs:  # reduced twice; the last is not known
            return False
        if not all(weight.trained for _, weight in chunk.reducer.unsharded_sums):
            return False  # sums of frozen weights are reduced at the end of backward
        if accumulation.more_to_come is None:  # a loss may be a sum over several forwards
            return self._graphs == 1 and chunk.consumer.expects_exchange()
        return True

    def _comes_to(self, unit: terms.Unit[ShardedParameter] | None) -> bool:
        """Backward comes to a block, or to the end of a graph (``None``).

        Where ranks compare which block comes, the block before it is ended first: another rank may
        wait for one of its reductions, and would not come to compare.

        Returns:
            Whether every rank acts for every block, also for blocks without a gradient there.
        """
        # The last forward, if it is not known in whose graph backward is.
        forward, backward = self._forward or self.forwards, self._chunk.queue.backward
        if backward.open.unit is not unit and self.order.compares(forward):
            self._chunk.perform(backward.end_block())
        same = self.order.pre_backward(unit, forward)
        return same and not self._nested and not self._chunk.queue.progress.split

    def _last_trained(self) -> int:
        """Number of the block at which every rank's backward ends: all blocks below are frozen."""
        queue, units = self._chunk.queue, self._chunk.units
        if not queue.progress.lowest:
            return 0
        if any(weight.trained for unit in units.root for weight in unit.weights):
            return 0
        names = [m.name for m in self._replicated.members if m.requires_grad]
        for number, unit in enumerate(queue.passes.order.blocks):
            small = any(name.startswith(units.blocks[unit.block].within) for name in names)
            if small or any(weight.trained for weight in unit.weights):
                return number
        return len(queue.passes.order.blocks)

    # between two passes

    def hold_full_params(self, context: str) -> None:
        """Let parameters be plain tensors within ``context``; empty: they are sharded again."""
        self.full_params_in = context

    def require_shards(self) -> None:
        """Check before a pass or a step that parameters are sharded.

        Raises:
            MeshError: the mesh was closed.
            OrderError: a context such as ``full_params`` holds them unsharded.
        """
        if self._mesh.is_closed:
            raise self._mesh.users.refusal("this model")
        if self.full_params_in:
            raise OrderError(
                f"a forward, a step or zero_grad() of this model was called on rank "
                f"{self._mesh.rank} inside {self.full_params_in}, where its parameters are whole "
                "plain tensors without communication: leave the context first"
            )

    def recover(self) -> None:
        """After a failed pass: reset, or raise the first cause (WP-10). Otherwise no effect."""
        self.require_shards()
        self.recovery.check()
        lost = self._chunk.collectives.comm_context.failure or self.recovery.guard.fatal_cause
        if lost or self.unfinished:
            self.recovery.reach_consensus()
            self.reset()

    def reset(self, earlier: bool = True, step: bool = False) -> None:
        """Wait for everything in flight, then drop it, with all held bytes and gradients.

        Args:
            earlier: sums of backwards before the failed one are lost, too, and repeating the failed
                one does not bring them back; after a pipeline's step, what
                :meth:`internsp.wp.communicator.ISPCommunicator.begin_step` gave.
            step: a pipeline's step has failed, on all ranks.
        """
        chunk, replicated = self._chunk, self._replicated
        chunk.wait_for_gathers()
        chunk.queue.reset()
        chunk.reducer.discard()
        if chunk.near is not None:
            chunk.near.reset()
        chunk.consumer.discard()
        for weight in replicated.sharded:
            weight.reduced.drop()
        replicated.reset()
        self._forward_open, self.backward, self._nested = False, -1, False
        self._graphs = 0
        self.order.reset()
        if chunk.link is not None:
            chunk.link.synchronize()
        self._checks.reset()
        chunk.consumer.reset(earlier, step)
