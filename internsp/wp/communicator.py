"""How weights travel: the interface that layers call, and its implementations.

Layers call :class:`WPCommunicator` (InternEvo's interface) to unshard a weight, to release it, to
prepare its backward, and to hand over its ready gradient. The blocks of a chunk, its embedding and
its head implement the interface over the same parts, which :class:`internsp.wp.perform.Chunk`
holds: the gather queue decides (:mod:`internsp.schedule.queue`), slots and reducer carry it out. A
user's own implementation is wrapped (:class:`UsersCommunicator`). The hooks that report events are
in
:mod:`internsp.modules.hooks`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from internsp.base.autograd import NO_TASK, graph_task
from internsp.errors import MeshError, OrderError, StaleWeightError, StructureError
from internsp.failure.detection import PostBackwardCallback
from internsp.failure.recovery import StageRecovery
from internsp.mesh import ParallelMesh
from internsp.schedule import terms as schedule
from internsp.schedule.chunk import ChunkLayout
from internsp.schedule.enclosing import Enclosing
from internsp.schedule.terms import BACKWARD, FORWARD, RECOMPUTE
from internsp.wp.autocast import Autocast, follow
from internsp.wp.checks import RootCheck
from internsp.wp.consumer import GradientConsumer
from internsp.wp.contents import Contents
from internsp.wp.parameter import Member, ShardedParameter, trained
from internsp.wp.perform import Chunk
from internsp.wp.plain_loop import PlainLoop
from internsp.wp.replicated import ReplicatedParameters
from internsp.wp.slots import Unit

if TYPE_CHECKING:
    from internsp.schedule.learned_passes import LearnedPasses


class WPCommunicator(ABC):
    """Gathers weights and reduces their gradients for layers.

    An implementation needs the four abstract methods (``docs/own_communicator.md`` has one of sixty
    lines, for :func:`internsp.parallelize`); the defaults of the others are right for any.

    Attributes:
        weight_part: whether the weight backward of a split backward runs, which needs no unsharded
            weight.
    """

    weight_part = False

    @abstractmethod
    def unshard(self, weight: ShardedParameter) -> Tensor:
        """The unsharded weight, for use now, in forward or in a recompute.

        Waits for this weight's gather only. While a graph that was made with the weight is alive,
        the tensor must have the same address in every call.
        """

    @abstractmethod
    def release(self, weight: ShardedParameter) -> None:
        """The layer's forward is over; the unsharded weight is not read until its backward."""

    @abstractmethod
    def pre_backward(self, weight: ShardedParameter) -> None:
        """The layer's backward is about to run: the values that :meth:`unshard` gave must be at the
        same address again."""

    @abstractmethod
    def on_grad_ready(self, weight: ShardedParameter, gradient: Tensor) -> None:
        """The unsharded gradient of one use is ready: start its reduction, without waiting."""

    def pre_backward_of_function(self, weight: ShardedParameter) -> None:
        """:meth:`pre_backward` for functions that may run before the block's recompute."""
        self.pre_backward(weight)

    def may_unshard_in_backward(self, weight: ShardedParameter) -> bool:
        """In backward: whether ``weight`` may be unsharded here, because all ranks use it here."""
        return True

    # for a block that unshards all its weights at its entry

    def unshard_all(self, weights: Sequence[ShardedParameter]) -> list[Tensor]:
        """:meth:`unshard` of each."""
        return [self.unshard(weight) for weight in weights]

    def release_all(self, weights: Sequence[ShardedParameter]) -> None:
        """:meth:`release` of each."""
        for weight in weights:
            self.release(weight)

    def pre_backward_all(self, weights: Sequence[ShardedParameter]) -> None:
        """:meth:`pre_backward_of_function` of each, the last used first."""
        for weight in reversed(weights):
            self.pre_backward_of_function(weight)

    def on_grads_ready(self, ready: Sequence[tuple[ShardedParameter, Tensor]]) -> None:
        """:meth:`on_grad_ready` of each, with its last gradient from this run of the block."""
        for weight, gradient in ready:
            self.on_grad_ready(weight, gradient)


class UsersCommunicator(WPCommunicator):
    """Wraps a user's own implementation.

    That implementation hands reduced gradients to :meth:`ShardedParameter.add_reduced_grad`;
    exchange between replicas, ``.grad`` and optimizers go on from there.
    """

    def __init__(self, chunk: Chunk, own: WPCommunicator) -> None:
        self._chunk, self.own = chunk, own

    def unshard(self, weight: ShardedParameter) -> Tensor:
        """See :meth:`WPCommunicator.unshard`."""
        follow(weight)
        weight.used_version = weight.current_version()
        return self.own.unshard(weight)

    def release(self, weight: ShardedParameter) -> None:
        """See :meth:`WPCommunicator.release`."""
        if graph_task() == NO_TASK:
            self.own.release(weight)

    def pre_backward(self, weight: ShardedParameter) -> None:
        """See :meth:`WPCommunicator.pre_backward`."""
        self.own.pre_backward(weight)

    def on_grad_ready(self, weight: ShardedParameter, gradient: Tensor) -> None:
        """See :meth:`WPCommunicator.on_grad_ready`."""
        self._chunk.began()
        reducer = self._chunk.reducer
        if weight in reducer.frozen:  # since the forward; other ranks' reductions need this one's
            gradient = torch.zeros_like(gradient)
            reducer.had_gradient.setdefault(weight, False)
        else:
            reducer.had_gradient[weight] = True
        self.own.on_grad_ready(weight, gradient)


class ChunkWeights(WPCommunicator):
    """Sharded weights of a chunk: reports each call of a layer to the gather queue, and performs
    the actions that the queue returns.

    Attributes:
        state: the parts that all communicators of the chunk share.
        queue: the chunk's gather queue.
    """

    def __init__(self, state: Chunk) -> None:
        self.state, self.queue = state, state.queue

    def unshard(self, weight: ShardedParameter) -> Tensor:
        """See :meth:`WPCommunicator.unshard`."""
        unit, state = weight.unit, self.state
        phase = RECOMPUTE if graph_task() != NO_TASK else FORWARD
        if weight.autocasts and (
            weight.compute_dtype is not weight.base_compute_dtype
            or torch.is_autocast_enabled(weight.device.type)
        ):
            follow(weight)
        if unit.block < 0 and not state.inside and phase == FORWARD:
            # No pre-forward of the model has done so.
            state.invalidate_older(unit)
        actions = self.queue.use(unit, weight, phase, state.trace.enabled or state.streams)
        if actions:
            state.perform(actions)
        return weight.read()

    def unshard_all(self, weights: Sequence[ShardedParameter]) -> list[Tensor]:
        """See :meth:`WPCommunicator.unshard_all`."""
        unit = weights[0].unit
        phase = RECOMPUTE if graph_task() != NO_TASK else FORWARD
        follow(*weights)
        self.state.perform(self.queue.use_all(unit, phase, self.state.trace.enabled))
        self._read_slot(*unit.weights)
        return [weight.read() for weight in weights]

    def release(self, weight: ShardedParameter) -> None:
        """See :meth:`WPCommunicator.release`. In most orders nothing asks for the bytes before the
        block's post-forward, which releases them all."""
        if not self.queue.passes.order.shares and not self.state.trace.enabled:
            return
        if graph_task() == NO_TASK:
            actions = self.queue.release(weight.unit, weight, self.state.trace.enabled)
            if actions:
                self.state.perform(actions)

    def pre_backward(self, weight: ShardedParameter) -> None:
        """See :meth:`WPCommunicator.pre_backward`."""
        state = self.state
        record = state.trace.enabled or state.streams
        actions = self.queue.backward.use(weight.unit, weight, record)
        if actions:
            state.perform(actions)

    def pre_backward_of_function(self, weight: ShardedParameter) -> None:
        """:meth:`pre_backward` for a function that keeps the weight without saving it in autograd.

        torch's non-reentrant checkpointing recomputes when a saved tensor is read, and such a
        function may read none.
        """
        self.pre_backward(weight)
        unit = weight.unit
        if not unit.recomputed or not weight.needs_gather:
            return
        if weight in self.queue.backward.turns.reduced:
            return
        if not self.queue.slots.is_gathered(weight):
            self.state.perform(self.queue.use(unit, weight, BACKWARD))
        else:  # a gather that is in flight was launched for the recompute, which uses it next
            self.state.perform(self.queue.slots.wait_for(unit, weight, RECOMPUTE))
        self._read_slot(weight)

    def pre_backward_all(self, weights: Sequence[ShardedParameter]) -> None:
        """:meth:`pre_backward_of_function` for a block that unsharded its weights at its entry."""
        unit = weights[0].unit
        if unit.recomputed or self.queue.progress.split:
            for weight in weights if unit.recomputed else reversed(weights):
                self.pre_backward_of_function(weight)
            return
        self.state.perform(self.queue.use_all(unit, BACKWARD, self.state.trace.enabled))
        self._read_slot(*unit.weights)

    def may_unshard_in_backward(self, weight: ShardedParameter) -> bool:
        """See :meth:`WPCommunicator.may_unshard_in_backward`."""
        if weight.unit.block < 0:  # a gather would not be in the declared order (WP-2)
            return self.queue.slots.is_gathered(weight)
        return not weight.needs_gather or weight.unit is self.queue.backward.open.unit

    def on_grad_ready(self, weight: ShardedParameter, gradient: Tensor) -> None:
        """See :meth:`WPCommunicator.on_grad_ready`; the reduction has its declared turn (WP-2)."""
        self._keep_gradients(weight.unit, ((weight, gradient),))
        actions = self.queue.backward.grad_ready(weight.unit, weight)
        if actions:
            self.state.perform(actions)

    def on_grads_ready(self, ready: Sequence[tuple[ShardedParameter, Tensor]]) -> None:
        """See :meth:`WPCommunicator.on_grads_ready`."""
        unit = ready[0][0].unit
        self._keep_gradients(unit, ready)
        self.state.perform(self.queue.backward.grads_ready(unit, [weight for weight, _ in ready]))

    def _keep_gradients(self, unit: Unit, ready: Sequence[tuple[ShardedParameter, Tensor]]) -> None:
        """Keep gradients until their reduction; the gradients of several uses are summed."""
        self.state.began()
        opened = unit is self.queue.backward.open.unit
        if unit.unshard_at_entry and not opened and not self.queue.progress.split:
            raise StaleWeightError(
                f"backward entered block {unit.name} on rank {dist.get_rank()} through a tensor "
                "that left it by another way than its output, so that its weights may not have "
                "been unsharded: return that tensor from the block, or set "
                "weight_parallel.coalesce_bytes = 0 and compile = false"
            )
        kept, frozen = self.state.reducer.ready, self.state.reducer.frozen
        if self.state.streams:
            self.state.reducer.take_turn()
        for weight, gradient in ready:
            if weight in frozen:
                continue
            before = kept.get(weight)
            kept[weight] = gradient if before is None else before + gradient

    def _read_slot(self, *weights: ShardedParameter) -> None:
        self.state.pool.slots[weights[0].unit.slot].streams.read(*weights)


class EmbeddingWeightParallelCommunicator(ChunkWeights):
    """A unit outside of the blocks: the embedding, or any large weight that no block owns.

    It is gathered at the model's pre-forward, used or not, and reduced at the end of backward, with
    zeros if this rank has no gradient, so that all ranks launch the same collectives (WP-2). The
    backward of a lookup needs the indices, not the table, so nothing is gathered for it.
    """

    def __init__(self, state: Chunk, unit: Unit) -> None:
        super().__init__(state)
        self.unit = unit


class HeadWeightParallelCommunicator(EmbeddingWeightParallelCommunicator):
    """The output projection: its weight has a slot of its own, gathered after the last block.

    Its gradient is reduced once, when backward comes to the blocks, however often a rank used the
    weight; the gather queue (its ``head``) knows when that is. A head that is tied to the embedding
    is part of the embedding's unit. The logits are exchanged by the model
    (``sequence.head_output``, :mod:`internsp.sp.vocabulary`).
    """

    def unshard(self, weight: ShardedParameter) -> Tensor:
        """See :meth:`WPCommunicator.unshard`."""
        if graph_task() == NO_TASK:  # the other ranks may run a block that this one does not
            self.state.before_head(self.queue.slots.is_gathered(weight))
        return super().unshard(weight)


class ISPCommunicator(ChunkWeights):
    """Weights of a chunk's transformer blocks, and the chunk's passes from begin to end.

    Attributes:
        blocks: units in the declared order.
        replicated: the replicated parameters, and the flags of all.
        mean: gradients are averaged over the ranks of the stage, not summed.
        head, embedding: the communicators of these units, or ``None``; other large weights outside
            of the blocks have none of their own.
        recovery: what happens after an exception (WP-10).
        contents: decides whether a pass may reuse the contents of slots (WP-11).
        plan: the layout of the chunk, in the learned order once there is one.
        parameters_of: the parameter that each module holds under each name.
        placeholders: in ``.grad`` while the plain loop's sums wait for a later backward (WP-9).
        accumulation: which backwards only sum gradients (``no_sync`` and kin, pipelines).
        batch_check: compares the batches of ranks that share one; ``None`` if none do.
        agreement: compares the blocks that ranks of a weight group run where these are not the
            expected ones (:class:`internsp.parallel.order.OrderAgreement`); ``None`` if the order
            never changes, or no weight group has several ranks.
        learning: records the order of blocks in the first step (``unexpected_order = "learn"``);
            ``None`` if no order is learned, or once one is (``learned``).
        consensus: lets all ranks of the model, those of tensor parallel too, agree on collectives
            between two passes.
        forwards: number of forwards that have begun; the hooks on outputs note it.
        full_params_in: name of the context that holds parameters unsharded outside of training
            (:mod:`internsp.values.whole`), during which no pass may begin; empty if none does.
    """

    def __init__(
        self,
        state: Chunk,
        mesh: ParallelMesh,
        blocks: list[Unit],
        replicated: ReplicatedParameters,
        mean: bool = False,
        batch_check: RootCheck | None = None,
    ) -> None:
        super().__init__(state)
        self.mesh, self.blocks, self.replicated = mesh, blocks, replicated
        self.mean, self.batch_check = mean, batch_check
        self.agreement: Any = None
        self.learning: Any = None
        self.learned: LearnedPasses[ShardedParameter] | None = None
        self.head: HeadWeightParallelCommunicator | None = None
        self.embedding: EmbeddingWeightParallelCommunicator | None = None
        self.full_params_in = ""
        self.plan: ChunkLayout | None = None
        self.parameters_of: dict[tuple[nn.Module, str], Member] = {}
        self.accumulation = state.accumulation
        self.recovery = StageRecovery(mesh, state.collectives.comm_context)
        self.consensus = self.recovery.among(self.recovery.shared_name, mesh.model_ranks)
        self._autocast = Autocast(replicated.sharded, blocks, mesh.device.type)
        self.contents = Contents(self)
        mesh.users.add(self)
        state.began = replicated.began = self._ensure_callback
        state.before_head = self._before_head
        self._has_replicas = any(axis.replicas > 1 for axis in mesh.axes)
        self._next = 0  # the block that a forward must run next
        self.forwards = 0
        self._graphs = 0  # graphs made by forwards since the last backward ended
        self._forward: int | None = None  # the forward whose graph the backward is in, if known
        self._forward_open = False  # a forward has begun and not reached its end
        self._nested = False  # the graph task of the backward that runs may be an inner one
        root = self.root_units()
        head = [unit for unit in self.units() if unit.block < 0 and unit not in root]
        plain = PlainLoop(state, mesh, replicated, mean, (*head, *reversed(blocks), *root))
        self.placeholders = plain.placeholders
        state.attach(plain)

    def attach(self, optimizer: GradientConsumer) -> bool:
        """Let ``optimizer`` consume the reduce-scatter handles, in the place of the plain loop.

        Called between two passes. What is summed stays where it is, for the optimizer's step.

        Returns:
            Whether anything is: then ``.grad`` had placeholders.

        Raises:
            ValueError: there is an optimizer already.
            GradientError: the sums were lost in a failed pass.
        """
        if self.state.consumer.is_optimizer:
            raise ValueError(
                "this communicator has a ZeroOptimizer already: give one optimizer all parameters "
                "and use param_groups"
            )
        sums_wait = self.placeholders.restore_grad()
        self.state.attach(optimizer)
        return sums_wait

    def root_units(self) -> list[schedule.Unit[ShardedParameter]]:
        """Units outside of the blocks, without the head; and the rests of enclosing blocks."""
        rests = [block.rest for block in self.queue.backward.enclosing.blocks if block.rest.weights]
        return [*self.queue.passes.order.root, *rests]

    def units(self) -> list[schedule.Unit[ShardedParameter]]:
        """All units of the chunk: blocks, embedding, others, head."""
        order = self.queue.passes.order
        head = [order.head] if order.head is not None else []
        return list(dict.fromkeys([*self.blocks, *self.root_units(), *head]))

    # weights of blocks, for layers

    def unshard(self, weight: ShardedParameter | nn.Module) -> Any:
        """Unshard a weight, for layers; or start the all-gathers of a module, for programs.

        For a module, called between two passes: start the all-gathers of the units in which its
        weights lie (its block, the embedding, the head), as :meth:`prefetch_all` does for all.

        Raises:
            OrderError: a pass runs, or blocks that run before would overwrite the slot.
            StructureError: the module has no sharded weight.
        """
        if isinstance(weight, ShardedParameter):
            return super().unshard(weight)
        units = self._units_of(weight, "unshard")
        fits = self.queue.prefetchable()
        for unit in units:
            if unit not in fits:
                raise OrderError(
                    f"unshard(): {unit.name} shares its slot with blocks that run before it, which "
                    f"would take it: those that fit are {', '.join(u.name for u in fits)}; raise "
                    "weight_parallel.prefetch_depth, or set keep_unsharded for it"
                )
        self._prefetch(units)
        return None

    # forward

    def root_pre_forward(self) -> None:
        """The model's pre-forward: recover from a failed pass, launch the first gathers."""
        self.recover()
        self.state.consumer.pass_begins()
        self.recovery.guard.begin_pass()
        if self.learning is not None:
            self.learning.root_pre_forward()
        self._forward_open = self.state.inside = True
        self._next = 0
        self._count_forward()
        self._autocast.enter_model()
        keep = self.contents.begin_pass()
        self.state.perform(self.queue.root_pre_forward(keep, head=self.learning is not None))

    @property
    def busy(self) -> str:
        """What runs now, in words for errors; empty between two passes."""
        if self.full_params_in:
            return f"inside {self.full_params_in}"
        if self.state.inside:
            return "in the model's forward"
        if graph_task() != NO_TASK:
            return "in a backward"
        return "within unchanged(), which a step opens" if self.contents.promised else ""

    def require_shards(self) -> None:
        """Check before a pass or a step that parameters are sharded.

        Raises:
            MeshError: the mesh was closed.
            OrderError: a context such as ``full_params`` holds them unsharded.
        """
        if self.mesh.is_closed:
            raise self.mesh.users.refusal("this model")
        if self.full_params_in:
            raise OrderError(
                f"a forward, a step or zero_grad() of this model was called on rank "
                f"{self.mesh.rank} inside {self.full_params_in}, where its parameters are whole "
                "plain tensors without communication: leave the context first"
            )

    def recover(self) -> None:
        """After a failed pass: reset, or raise the first cause (WP-10). Otherwise no effect."""
        self.require_shards()
        self.recovery.check()
        comm_context, fatal_cause = (
            self.state.collectives.comm_context,
            self.recovery.guard.fatal_cause,
        )
        if (
            comm_context.failure
            or fatal_cause
            or self._forward_open
            or self.replicated.backward >= 0
        ):
            self.recovery.reach_consensus()
            self.rest()

    def forward_failed(self, error: BaseException) -> None:
        """The model's forward has raised: report it to the ranks that wait for this one (WP-10)."""
        if self._forward_open:
            self.recovery.report_failure(f"{type(error).__name__} in forward: {error}")
        else:
            self.recovery.report_refusal(error)
        self.recovery.add_cause_note(error)

    def root_post_forward(self) -> None:
        """The model's post-forward: check that all blocks ran."""
        order = self.queue.passes.order.blocks
        if self.learning is not None:
            self.learning.pre_forward(None)
        if self.queue.slots.strict and self._next < len(order) and not self._may_differ():
            raise OrderError(  # the forward stays open: all ranks recover together
                f"only {self._next} of {len(order)} blocks ran in this forward on rank "
                f"{self.mesh.rank}: the next in order was {order[self._next].name}. "
                "Set weight_parallel.unexpected_order = 'learn' for models that always skip the "
                "same blocks, 'gather' for those that skip others from step to step, on all ranks "
                "alike"
            )
        if self.agreement is not None:
            self.agreement.post_blocks("the end", self._next == len(self.queue.passes.order.blocks))
        self._forward_open = False
        if self.state.link is not None:
            self.state.link.synchronize()  # from here on a program may write weights

    def block_pre_forward(self, unit: Unit) -> None:
        """A block's pre-forward, in forward or in a recompute."""
        if graph_task() != NO_TASK:
            if unit.around >= 0:  # the recompute may be that of the enclosing block
                self.state.perform(self.queue.backward.enclosing.recompute(unit))
            else:
                self.block_pre_backward(unit)
        else:
            self._check_order(unit)
            changed = self._autocast.pre_forward(unit)
            self.state.perform(self.queue.pre_forward(unit))
            if changed:
                self.state.perform(self.queue.slots.gather_again(unit))

    def pre_forward_of_enclosing(self, block: Enclosing[ShardedParameter]) -> None:
        """The pre-forward of a block that holds units of its own."""
        if graph_task() == NO_TASK:
            if self.agreement is not None:
                first = self.queue.passes.order.blocks[block.first].name
                self.agreement.pre_forward(first, self._next == block.first)
            self.state.perform(self.queue.backward.enclosing.pre_forward(block))

    def pre_backward_of_enclosing(self, block: Enclosing[ShardedParameter]) -> None:
        """The pre-backward of a block that holds units of its own."""
        if not self.weight_part:
            self._agree_in_backward(self.queue.passes.order.blocks[block.last])
            enclosing = self.queue.backward.enclosing
            self.state.perform(enclosing.pre_backward(block, self._all_ranks_take_part()))

    # backward

    def root_pre_backward(self, forward: int) -> None:
        """The model's pre-backward: a gradient has arrived at an output of the model or of a block.

        Called for each such gradient; the first one of a backward begins it, and queues the
        callback for its end from the outermost graph task (WP-9).

        Args:
            forward: number of the forward that made the output (``forwards`` at that time).
        """
        task = torch._C._current_graph_task_id()
        if self.weight_part:
            return
        if task == self.replicated.backward:
            self._enter_graph(forward)
            return
        self.recovery.check()
        if self.replicated.backward >= 0 and not self._nested:
            # The backward before this one never ended.
            self.recovery.reach_consensus()
            self.rest()
        self.replicated.backward, self._forward = task, forward
        self._nested = False
        self._note_frozen()
        self._autocast.root_pre_backward()
        self.queue.backward.root_pre_backward(self._exchanges_early())
        self.contents.check()
        self._queue_post_backward_callback()

    def block_pre_backward(self, unit: Unit, run: int | None = None) -> None:
        """A block's pre-backward: the gradient of its output has arrived, or its recompute begins.

        Args:
            run: see :meth:`internsp.schedule.backward.Backward.pre_backward`.
        """
        if not self.weight_part:
            self._agree_in_backward(unit)
            backward = self.queue.backward
            self.state.perform(backward.pre_backward(unit, self._all_ranks_take_part(), run))

    def root_post_backward(self) -> None:
        """The end of the outermost backward: launch the last reductions, finish them (WP-9)."""
        if self.batch_check is not None:
            self.batch_check.confirm()
        self._agree_in_backward(None)
        backward = self.queue.backward
        self.state.perform(
            backward.root_post_backward(self._all_ranks_take_part(), self._last_trained())
        )
        if self.queue.progress.split:  # an input backward: no weight has a gradient
            self.queue.backward.end_pass()
            self.replicated.backward = -1
            return
        self.finalize_backward()

    def finalize_backward(self) -> None:
        """All gradients are ready: reduce what was accumulated; complete ``.grad``, unless a
        ``ZeroOptimizer`` does so."""
        if self.state.streams:
            self.state.reducer.take_turn()
        if not self.queue.reductions.accumulating:
            self.state.reduce_accumulated()  # sums that this backward has not reduced
        self.queue.backward.end_pass()
        self.state.consumer.backward_ended(self.accumulation.goes_on)
        self.replicated.backward, self._graphs = -1, 0
        if self.state.link is not None:
            self.state.link.synchronize()
        if self.learning is not None:
            self.learning.backward_ended()

    def no_sync(self) -> AbstractContextManager[None]:
        """Full accumulation: backwards inside sum unsharded gradients on this rank, send nothing.

        The first backward outside takes the sums along, so that a loop over micro-batches reduces
        once: put all but the last inside (as with torch's DDP). ``.grad`` is complete again after
        that one, or finished by a ZeroOptimizer's next step, which takes what is left; in between,
        reading it raises, and `zero_grad()` and `.grad = None` drop the sums. Costs the memory of
        every unsharded gradient in fp32 or wider.
        """
        return self.accumulation.no_sync()

    def no_replica_sync(self) -> AbstractContextManager[None]:
        """Sharded accumulation: backwards inside reduce within the weight group only.

        Sums stay on this rank and have the size of a shard. The first backward outside takes them
        along and exchanges them once, with the replicas and, for replicated parameters, with all
        ranks; until then ``.grad`` is as in :meth:`no_sync` (WP-9). A ZeroOptimizer does so by
        itself.
        """
        return self.replica_sync(False)

    def replica_sync(self, now: bool) -> AbstractContextManager[None]:
        """Say of each backward inside whether replicas exchange after it, for certain.

        Args:
            now: it is the last before the exchange (with a ZeroOptimizer, before its step), and
                goes through the graph of one forward: the exchange starts while it runs.
        """
        return self.accumulation.replica_sync(now)

    def unchanged(self) -> AbstractContextManager[None]:
        """Context in which nothing writes weights, so that forwards reuse the contents of slots.

        For evaluations, micro-batches and generation in a row: the last blocks of a pass, kept
        blocks, embedding and head are not gathered again by the next one. Outside of the context a
        forward reuses nothing from the pass before. A forward raises ``StaleWeightError`` if a
        weight was written all the same. All ranks enter and leave it together; no message.
        """
        return self.contents.unchanged()

    def prefetch_all(self) -> None:
        """Start the first all-gathers of the next forward, of every unit that fits into the slots.

        Called between two passes, after the last write of weights: the forward raises
        ``StaleWeightError`` if one was written since. Collective, does not block.

        Raises:
            OrderError: a pass runs.
        """
        self._prefetch(self.queue.prefetchable())

    def reshard(self, module: nn.Module) -> None:
        """Drop the unsharded weights of ``module``'s units: their next use gathers them again.

        Called between two passes, also between a forward and its backward. Frees their memory if
        ``memory_pool`` is off; slots stay. Collective: all ranks call it. Waits for gathers in
        flight.

        Raises:
            OrderError: a pass runs.
            StructureError: ``module`` has no sharded weight.
        """
        for unit in self._units_of(module, "reshard"):
            self.state.perform(self.queue.reshard(unit))
            self.state.pool.slots[unit.slot].free(unit)

    def _prefetch(self, units: Sequence[schedule.Unit[ShardedParameter]]) -> None:
        self._require_rest("prefetch_all")
        self.contents.prefetched()
        self.state.perform(self.queue.prefetch(units))

    def _units_of(self, module: nn.Module, what: str) -> list[schedule.Unit[ShardedParameter]]:
        """The units in which weights of ``module`` lie, in the order of the queue."""
        self._require_rest(what)
        inside = {
            member.unit
            for part in module.modules()
            for name in part._parameters
            if isinstance(member := self.parameters_of.get((part, name)), ShardedParameter)
        }
        if not inside:
            raise StructureError(
                f"{what}(): no sharded weight of this model lies in the {type(module).__name__}"
            )
        return [unit for unit in self.units() if unit in inside]

    def _require_rest(self, what: str) -> None:
        self.recover()
        if self.state.inside or graph_task() != NO_TASK:
            raise OrderError(f"{what}() belongs between two passes: a forward or backward runs")
        if not any(unit.groups for unit in self.units()):
            raise StructureError(f"{what}(): a communicator of your own gathers by itself")

    # for pipelines

    def begin_step(self) -> bool:
        """A step of all micro-batches begins.

        Returns:
            Whether sums of earlier steps wait for the optimizer.
        """
        self.state.consumer.pass_begins()
        return self.state.consumer.step_begins()

    def prefetch_pass(self, phase: str) -> None:
        """Start the first gathers of the forward or backward that a pipeline runs next."""
        self.state.perform(self.queue.prefetch_pass(phase))

    def begin_backward_part(self, weights: bool) -> None:
        """Begin one part of a split backward.

        Args:
            weights: the weight backward; else the input backward.
        """
        self.recovery.check()
        self.queue.backward.begin_backward_part(weights, self._exchanges_early())
        self._set_weight_part(weights)

    def end_backward_part(self) -> None:
        """End that part; after the weight backward, gradients are as after any backward."""
        weights = self.weight_part
        self.state.perform(self.queue.backward.end_backward_part())
        self._set_weight_part(False)
        if weights:
            self.finalize_backward()

    # between two passes

    def invalidate(self) -> None:
        """Raise all versions: weights were written in a way that no counter shows (WP-11).

        All weights are gathered anew. Not needed between two passes. Between a forward and its
        backward it makes the backward an error.
        """
        for member in self.replicated.all_parameters():
            member.invalidate()

    def wait_until_ready(self) -> None:
        """Wait until every shard holds the values of the last optimizer step (WP-3)."""
        in_flight = [member.ready for member in self.replicated.all_parameters()]
        for new_values in dict.fromkeys(in_flight):  # an optimizer's all-gather has several members
            if new_values is not None:
                new_values.wait()

    def wait_for_gathers(self) -> None:
        """Wait for all gathers in flight: the shards that they read are about to be written."""
        self.state.perform(self.queue.slots.wait_for_gathers())

    def invalidate_slots(self) -> None:
        """Wait for gathers in flight, and drop the contents of all slots."""
        self.wait_for_gathers()
        self.queue.slots.invalidate_contents()
        self.queue.backward.end_pass()

    def rest(self, earlier: bool = True, step: bool = False) -> None:
        """Reset: wait for everything in flight, then drop it, with all held bytes and gradients.

        Args:
            earlier: sums of backwards before the failed one are lost, too, and repeating the failed
                one does not bring them back; after a pipeline's step, what :meth:`begin_step` gave.
            step: a pipeline's step has failed, on all ranks.
        """
        self.wait_for_gathers()
        self.queue.reset()
        self.state.reducer.discard()
        if self.state.near is not None:
            self.state.near.reset()
        self.state.consumer.discard()
        self._set_weight_part(False)
        for weight in self.replicated.sharded:
            weight.drop_reduced_grad()
        self.replicated.reset()
        self._forward_open, self.replicated.backward, self._nested = False, -1, False
        self._next = self._graphs = 0
        if self.state.link is not None:
            self.state.link.synchronize()
        if self.batch_check is not None:
            self.batch_check.reset()
        self.state.consumer.reset(earlier, step)

    # the end of the mesh (:class:`internsp.mesh.owned.MeshUser`)

    def before_close(self) -> None:
        """Wait for gathers, reductions, exchanges and new values in flight. Launches nothing.

        After a lost group nothing is in flight any more.

        Raises:
            MeshError: a pass runs, or has failed and the ranks have not recovered.
        """
        comm_context, rank = self.state.collectives.comm_context, self.mesh.rank
        if self.busy:
            raise MeshError(
                f"ParallelMesh.close() was called on rank {rank} {self.busy} of a model on this "
                "mesh: call it between two passes"
            )
        if comm_context.failure or self.recovery.guard.fatal_cause:
            return
        if self._forward_open or self.replicated.backward >= 0:
            raise MeshError(
                f"ParallelMesh.close() was called on rank {rank} after a pass that failed, while "
                "other ranks may wait for this one: run the next pass, in which the ranks recover, "
                "or end the process"
            )
        self.wait_until_ready()
        self.wait_for_gathers()
        self.state.finish_reductions()
        self.state.consumer.discard()

    def closed(self) -> None:
        """See :class:`internsp.mesh.owned.MeshUser`."""
        self.recovery.guard.close()

        def refuse(what: str) -> None:
            raise self.mesh.users.refusal(what)

        for weight in self.replicated.sharded:
            weight.meet = refuse

    # inside

    def _enter_graph(self, forward: int) -> None:
        """Backward is in the graph of ``forward`` now; if it was in another one, that has ended."""
        if self._forward not in (None, forward):
            self._agree_in_backward(None)
            backward = self.queue.backward
            self.state.perform(
                backward.begin_earlier_graph(self._all_ranks_take_part(), self._last_trained())
            )
        self._forward = forward

    def _count_forward(self) -> None:
        """A forward begins: note which weights are trained in it."""
        self.forwards += 1
        if self.agreement is not None:
            self.agreement.begin_forward()
        self._graphs += torch.is_grad_enabled()
        weights = self.replicated.sharded
        for weight, now in zip(weights, trained(weights), strict=True):
            weight.trained = now

    def _exchanges_early(self) -> bool:
        """Whether replicas exchange gradients while the backward that begins still runs.

        It must be the last backward before the exchange, the queue must know which reduction of
        each weight is the last, and all ranks must have the same queue.
        """
        if self.accumulation.goes_on or not self.queue.slots.strict:
            return False
        if not self._has_replicas:
            return False
        if self.queue.passes.order.recurs:  # reduced twice; the last is not known
            return False
        if not all(weight.trained for _, weight in self.state.reducer.unsharded_sums):
            return False  # sums of frozen weights are reduced at the end of backward
        if self.accumulation.more_to_come is None:  # a loss may be a sum over several forwards
            return self._graphs == 1 and self.state.consumer.expects_exchange()
        return True

    def _all_ranks_take_part(self) -> bool:
        """Whether every rank acts for every block, also for blocks without a gradient there."""
        if self._nested or self.queue.progress.split:
            return False
        return self.queue.slots.strict or (
            self.agreement is not None and self.agreement.was_in_order(self._graph())
        )

    def _graph(self) -> int:
        """The forward in whose graph backward is, the last one if it is not known."""
        return self.forwards if self._forward is None else self._forward

    def _before_head(self, gathered: bool) -> None:
        """The head is about to be used: agree with the other ranks that it comes next, unless it is
        on its way in the middle of the blocks."""
        if self.agreement is not None:
            complete = self._next == len(self.queue.passes.order.blocks)
            if complete or not gathered:
                self.agreement.post_blocks("the head", complete)

    def _agree_in_backward(self, unit: schedule.Unit[ShardedParameter] | None) -> None:
        """In the backward of a forward in another order: agree with the other ranks on the block
        that comes next; ``None``: the end."""
        opened = unit is not None and unit is self.queue.backward.open.unit
        if self.agreement is None or self.queue.slots.strict or opened:
            return
        self.agreement.pre_backward(unit.name if unit is not None else "the end", self._graph())

    def _set_weight_part(self, runs: bool) -> None:
        for weight in self.replicated.all_parameters():
            weight.communicator.weight_part = runs
        self.weight_part = runs

    def _last_trained(self) -> int:
        """Number of the block at which every rank's backward ends: all blocks below are frozen."""
        if not self.queue.progress.lowest:
            return 0
        if any(weight.trained for unit in self.root_units() for weight in unit.weights):
            return 0
        names = [m.name for m in self.replicated.members if m.requires_grad]
        for number, unit in enumerate(self.queue.passes.order.blocks):
            small = any(name.startswith(self.blocks[unit.block].within) for name in names)
            if small or any(weight.trained for weight in unit.weights):
                return number
        return len(self.queue.passes.order.blocks)

    def _check_order(self, unit: Unit) -> None:
        """Check at a block's pre-forward that it is the next one in the order (WP-2)."""
        order = self.queue.passes.order.blocks
        if not self.state.inside:  # the program calls blocks without the model's forward
            self.recover()
            self._next %= len(order)
            if unit not in order[self._next :] or not self._next:  # a new forward begins
                self.state.consumer.pass_begins()
                self.recovery.guard.begin_pass()
                self._count_forward()
                self.queue.begin_blocks(self.contents.begin_pass())
            self.state.invalidate_older(unit)
            for shared in self.root_units():  # they hold the weights that blocks share
                self.state.invalidate_older(shared)
        elif self.learning is not None:
            self.learning.pre_forward(unit)
        expected = order[self._next] if self._next < len(order) else None
        if expected is unit:
            self._next += 1
        elif self.queue.slots.strict:
            self._out_of_order(unit, expected)
        else:
            self._next = unit.block + 1
        if self.agreement is not None:
            self.agreement.pre_forward(unit.name, expected is unit)

    def _may_differ(self) -> bool:
        """Whether this forward may run another order than the learned one: it has no backward."""
        return self.learned is not None and not torch.is_grad_enabled()

    def _out_of_order(self, unit: Unit, expected: schedule.Unit[ShardedParameter] | None) -> None:
        """A block runs that is not the next one in the order."""
        before = self.queue.passes.order.blocks[self._next - 1] if self._next else None
        if self.learned is not None and (self.learned.out_of_order or unit is before):
            return  # several runs in a row count as one
        if self.learned is not None and self._may_differ():
            self.learned.leave_order()
            return
        which = "which the first step has shown" if self.learned else "as declared"
        raise OrderError(
            f"block {unit.name} ran on rank {self.mesh.rank} where "
            f"{expected.name if expected is not None else 'the end'} was expected, {which}: the "
            "prefetch order would be wrong. Declare the blocks in the order in which they run "
            "(weight_parallel.blocks), or set weight_parallel.unexpected_order = 'learn' for an "
            "order that never changes, 'gather' for one that changes on all ranks alike"
        )

    def _ensure_callback(self) -> None:
        """Queue the callback for the end of backward at a ready gradient, if no output's hook did.

        Under reentrant checkpointing the graph task is an inner one; the callback then comes early,
        but every gradient of that task is complete.
        """
        if self.replicated.backward < 0 and not self.queue.progress.split:
            self.replicated.backward = torch._C._current_graph_task_id()
            self._nested, self._forward = True, None
            self._note_frozen()
            self._queue_post_backward_callback()

    def _note_frozen(self) -> None:
        """Note at the begin of a backward which parameters were frozen since the forward.

        They get no gradient, as under autograd. Also notes gradients that the user dropped.
        """
        replicated, sharded = self.replicated, self.replicated.sharded
        small = zip(replicated.members, trained(replicated.members), strict=True)
        replicated.frozen = {member for member, now in small if not now}
        large = zip(sharded, trained(sharded), strict=True)
        self.state.reducer.frozen = {weight for weight, now in large if not now}
        self.placeholders.drop_removed()

    def _queue_post_backward_callback(self) -> None:
        end = PostBackwardCallback(self.root_post_backward, self.recovery.report_backward_failure)
        torch.autograd.Variable._execution_engine.queue_callback(end)
