"""How weights travel: the interface that layers call, and its implementations.

Layers call :class:`WPCommunicator` (InternEvo's interface) to unshard a weight, to release it, to
prepare its backward, and to hand over its ready gradient. There are three implementations: of a
chunk's head, of its embedding, of its transformer blocks (:class:`ISPCommunicator`, which
:func:`internsp.parallelize` returns). Each reports what a layer does to the gather queue
(:mod:`internsp.schedule.queue`), which decides, and the :class:`internsp.wp.perform.Chunk` carries
it out. Hooks report the passes to :class:`internsp.wp.events.Events`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import TypeVar  # with a default, which typing has from Python 3.13 on

from internsp.base.autograd import NO_TASK, graph_task
from internsp.errors import MeshError, OrderError, StaleWeightError, StructureError
from internsp.failure.consensus import Consensus
from internsp.mesh import ParallelMesh
from internsp.schedule import terms as schedule
from internsp.schedule.chunk import ChunkLayout
from internsp.schedule.terms import BACKWARD, FORWARD, RECOMPUTE
from internsp.wp.autocast import follow
from internsp.wp.consumer import GradientConsumer
from internsp.wp.events import Events
from internsp.wp.parameter import Member, ModelParameter, ShardedParameter
from internsp.wp.perform import Chunk
from internsp.wp.plain_loop import PlainLoop
from internsp.wp.replicated import ReplicatedParameters
from internsp.wp.slots import Unit

P = TypeVar("P", bound=ModelParameter, default=ShardedParameter)


class WPCommunicator(ABC, Generic[P]):
    """Gathers weights and reduces their gradients for layers.

    An implementation needs the four abstract methods (``docs/howto/own_communicator.md`` has one,
    for :func:`internsp.parallelize`); the defaults of the others are right for any.

    Attributes:
        releases: whether :meth:`release` does anything now; a layer may leave it out otherwise.
    """

    releases = True

    @property
    def weight_part(self) -> bool:
        """Whether the weight backward of a split backward runs: it needs no unsharded weight."""
        return False

    @abstractmethod
    def unshard(self, weight: P) -> Tensor:
        """The unsharded weight, for use now, in forward or in a recompute.

        Waits for this weight's gather only. While a graph that was made with the weight is alive,
        the tensor must have the same address in every call.
        """

    @abstractmethod
    def release(self, weight: P) -> None:
        """The layer's forward is over; the unsharded weight is not read until its backward."""

    @abstractmethod
    def pre_backward(self, weight: P) -> None:
        """The layer's backward is about to run: the values that :meth:`unshard` gave must be at the
        same address again."""

    @abstractmethod
    def on_grad_ready(self, weight: P, gradient: Tensor) -> None:
        """The unsharded gradient of one use is ready: start its reduction, without waiting."""

    def pre_backward_of_function(self, weight: P) -> None:
        """:meth:`pre_backward` for functions that may run before the block's recompute."""
        self.pre_backward(weight)

    def may_unshard_in_backward(self, weight: P) -> bool:
        """In backward: whether ``weight`` may be unsharded here, because all ranks use it here."""
        return True

    # for a block that unshards all its weights at its entry

    def unshard_all(self, weights: Sequence[P]) -> list[Tensor]:
        """:meth:`unshard` of each."""
        return [self.unshard(weight) for weight in weights]

    def release_all(self, weights: Sequence[P]) -> None:
        """:meth:`release` of each."""
        for weight in weights:
            self.release(weight)

    def pre_backward_all(self, weights: Sequence[P]) -> None:
        """:meth:`pre_backward_of_function` of each, the last used first."""
        for weight in reversed(weights):
            self.pre_backward_of_function(weight)

    def on_grads_ready(self, ready: Sequence[tuple[P, Tensor]]) -> None:
        """:meth:`on_grad_ready` of each, with its last gradient from this run of the block."""
        for weight, gradient in ready:
            self.on_grad_ready(weight, gradient)


class ChunkWeights(WPCommunicator[ShardedParameter]):
    """Sharded weights of a chunk: reports each call of a layer to the gather queue, and performs
    the actions that the queue returns.

    Attributes:
        state: the parts that all communicators of the chunk share.
        queue: the chunk's gather queue.
        events: where the program is in its passes.
    """

    def __init__(self, chunk: Chunk, events: Events) -> None:
        self.state, self.queue, self.events = chunk, chunk.queue, events

    @property
    def weight_part(self) -> bool:
        """See :attr:`WPCommunicator.weight_part`."""
        return self.queue.progress.split == "weights"

    def unshard(self, weight: ShardedParameter) -> Tensor:
        """See :meth:`WPCommunicator.unshard`."""
        unit, state = weight.unit, self.state
        phase = RECOMPUTE if graph_task() != NO_TASK else FORWARD
        if weight.autocasts and (
            weight.compute_dtype is not weight.base_compute_dtype
            or torch.is_autocast_enabled(weight.device.type)
        ):
            follow(weight)
        traced = state.trace.enabled
        # In most orders nothing asks for the bytes before the block's post-forward, which releases
        # them all.
        self.releases = traced or self.queue.passes.order.shares
        actions = self.queue.use(unit, weight, phase, traced or state.streams)
        if actions:
            state.perform(actions)
        return weight.read()

    def release(self, weight: ShardedParameter) -> None:
        """See :meth:`WPCommunicator.release`."""
        if self.releases and graph_task() == NO_TASK:
            actions = self.queue.release(weight.unit, weight, self.state.trace.enabled)
            if actions:
                self.state.perform(actions)

    def pre_backward(self, weight: ShardedParameter) -> None:
        """See :meth:`WPCommunicator.pre_backward`."""
        state = self.state
        if self.queue.progress.split == "weights":
            return
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
        if not unit.recomputed or not weight.needs_gather or self.queue.progress.split == "weights":
            return
        if weight in self.queue.backward.turns.reduced:
            return
        if not self.queue.slots.is_gathered(weight):
            self.state.perform(self.queue.use(unit, weight, BACKWARD))
        else:  # a gather that is in flight was launched for the recompute, which uses it next
            self.state.perform(self.queue.slots.wait_for(unit, weight, RECOMPUTE))
        self._read_slot(weight)

    def on_grad_ready(self, weight: ShardedParameter, gradient: Tensor) -> None:
        """See :meth:`WPCommunicator.on_grad_ready`; the reduction has its declared turn (WP-2)."""
        self._keep_gradients(weight.unit, ((weight, gradient),))
        actions = self.queue.backward.grad_ready(weight.unit, weight)
        if actions:
            self.state.perform(actions)

    def _keep_gradients(self, unit: Unit, ready: Sequence[tuple[ShardedParameter, Tensor]]) -> None:
        """Keep gradients until their reduction; the gradients of several uses are summed."""
        if self.events.backward < 0:
            self.events.begin_at_gradient()
        entered = not unit.unshard_at_entry or unit is self.queue.backward.open.unit
        if not entered and not self.queue.progress.split:
            raise StaleWeightError(
                f"backward entered block {unit.name} on rank {dist.get_rank()} through a tensor "
                "that left it by another way than its output, so that its weights may not have "
                "been unsharded: return that tensor from the block, or set "
                "weight_parallel.coalesce_bytes = 0 and compile = false"
            )
        kept = self.state.reducer.ready
        if self.state.streams:
            self.state.reducer.take_turn()
        for weight, gradient in ready:
            if weight.frozen:
                continue
            before = kept.get(weight)
            kept[weight] = gradient if before is None else before + gradient

    def _read_slot(self, *weights: ShardedParameter) -> None:
        if self.state.streams:
            self.state.pool.slots[weights[0].unit.slot].streams.read(*weights)


class EmbeddingWeightParallelCommunicator(ChunkWeights):
    """A unit outside of the blocks: the embedding, or any large weight that no block owns.

    It is gathered at the model's pre-forward, used or not, and reduced at the end of backward, with
    zeros if this rank has no gradient, so that all ranks launch the same collectives (WP-2). The
    backward of a lookup needs the indices, not the table, so nothing is gathered for it.
    """

    def __init__(
        self, chunk: Chunk, events: Events, unit: schedule.Unit[ShardedParameter]
    ) -> None:
        super().__init__(chunk, events)
        self.unit = unit

    def unshard(self, weight: ShardedParameter) -> Tensor:
        """See :meth:`WPCommunicator.unshard`."""
        if not self.events.inside and graph_task() == NO_TASK:
            self.state.invalidate_older(self.unit)  # no pre-forward of the model has done so
        return super().unshard(weight)

    def may_unshard_in_backward(self, weight: ShardedParameter) -> bool:
        """Only what lies in its slot: a gather would not be in the declared order (WP-2)."""
        return self.queue.slots.is_gathered(weight)


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
            self.events.order.before_head(self.queue.slots.is_gathered(weight))
        return super().unshard(weight)


class ISPCommunicator(ChunkWeights):
    """Weights of a chunk's transformer blocks, and what a program may ask of the whole chunk.

    Attributes:
        replicated: the replicated parameters, and the flags of all.
        mean: gradients are averaged over the ranks of the stage, not summed.
        head, embedding: the communicators of these units, or ``None``.
        parameters_of: the parameter that each module holds under each name.
        consensus: lets all ranks of the model, those of tensor parallel too, agree between two
            passes.
        blocks: units in the declared order.
        recovery: what happens after an exception (WP-10).
        accumulation: which backwards only sum gradients (``no_sync`` and kin, pipelines).
        placeholders: in ``.grad`` while the plain loop's sums wait for a later backward (WP-9).
        chunks: the communicators of all chunks of this pipeline rank, which clip by one norm; this
            one alone without a pipeline.
    """

    def __init__(
        self,
        chunk: Chunk,
        events: Events,
        mesh: ParallelMesh,
        replicated: ReplicatedParameters,
        mean: bool,
        head: HeadWeightParallelCommunicator | None,
        embedding: EmbeddingWeightParallelCommunicator | None,
        parameters_of: Mapping[tuple[nn.Module, str], Member],
        consensus: Consensus,
    ) -> None:
        super().__init__(chunk, events)
        self.mesh, self.replicated, self.mean = mesh, replicated, mean
        self.head, self.embedding, self.parameters_of = head, embedding, parameters_of
        self.consensus, self.recovery = consensus, events.recovery
        self.blocks, self.accumulation = chunk.units.blocks, chunk.accumulation
        plain = PlainLoop(chunk, mesh, replicated, mean)
        self.placeholders = plain.placeholders
        chunk.attach(plain)
        self.chunks: Sequence[ISPCommunicator] = (self,)
        mesh.users.add(self)

    def join(self, chunks: Sequence[ISPCommunicator]) -> None:
        """Be one of the ``chunks`` of a pipeline rank."""
        self.chunks = tuple(chunks)

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

    @property
    def plan(self) -> ChunkLayout:
        """The layout of the chunk, in the learned order once there is one."""
        return self.events.order.layout

    # weights of blocks, for layers

    def unshard(self, weight: ShardedParameter | nn.Module) -> Any:
        """Unshard a weight, for layers; or start the all-gathers of a module, for programs.

        For a module, called between two passes: start the all-gathers of the units in which its
        weights lie (its block, the embedding, the head), as :meth:`prefetch_all` does for all.

        Raises:
            OrderError: a pass runs, or blocks that run before would overwrite the slot.
            StructureError: the module has no sharded weight.
        """
        if not isinstance(weight, nn.Module):
            return super().unshard(weight)
        self.unshard_units(self._units_of(weight, "unshard"))
        return None

    def unshard_units(self, units: Sequence[schedule.Unit[ShardedParameter]]) -> None:
        """Start the all-gathers of ``units``: see :meth:`unshard` of a module."""
        fits = self.queue.prefetchable()
        for unit in units:
            if unit not in fits:
                raise OrderError(
                    f"unshard(): {unit.name} shares its slot with blocks that run before it, which "
                    f"would take it: those that fit are {', '.join(u.name for u in fits)}; raise "
                    "weight_parallel.prefetch_depth, or set keep_unsharded for it"
                )
        self._prefetch(units)

    def may_unshard_in_backward(self, weight: ShardedParameter) -> bool:
        """Those of the block whose backward runs, which all ranks come to."""
        return not weight.needs_gather or weight.unit is self.queue.backward.open.unit

    # blocks that unshard all their weights at their entry

    def unshard_all(self, weights: Sequence[ShardedParameter]) -> list[Tensor]:
        """See :meth:`WPCommunicator.unshard_all`."""
        unit = weights[0].unit
        phase = RECOMPUTE if graph_task() != NO_TASK else FORWARD
        follow(*weights)
        self.releases = self.state.trace.enabled or self.queue.passes.order.shares
        self.state.perform(self.queue.use_all(unit, phase, self.state.trace.enabled))
        self._read_slot(*unit.weights)
        return [weight.read() for weight in weights]

    def pre_backward_all(self, weights: Sequence[ShardedParameter]) -> None:
        """:meth:`pre_backward_of_function` for a block that unsharded its weights at its entry."""
        unit = weights[0].unit
        if unit.recomputed or self.queue.progress.split:
            for weight in weights if unit.recomputed else reversed(weights):
                self.pre_backward_of_function(weight)
            return
        self.state.perform(self.queue.use_all(unit, BACKWARD, self.state.trace.enabled))
        self._read_slot(*unit.weights)

    def on_grads_ready(self, ready: Sequence[tuple[ShardedParameter, Tensor]]) -> None:
        """See :meth:`WPCommunicator.on_grads_ready`."""
        unit = ready[0][0].unit
        self._keep_gradients(unit, ready)
        self.state.perform(self.queue.backward.grads_ready(unit, [weight for weight, _ in ready]))

    # backwards that only sum

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

    # unsharded weights between two passes

    def unchanged(self) -> AbstractContextManager[None]:
        """Context in which nothing writes weights, so that forwards reuse the contents of slots.

        For evaluations, micro-batches and generation in a row: the last blocks of a pass, kept
        blocks, embedding and head are not gathered again by the next one. Outside of the context a
        forward reuses nothing from the pass before. A forward raises ``StaleWeightError`` if a
        weight was written all the same. All ranks enter and leave it together; no message.
        """
        return self.events.contents.unchanged()

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
        self.reshard_units(self._units_of(module, "reshard"))

    def reshard_units(self, units: Sequence[schedule.Unit[ShardedParameter]]) -> None:
        """Drop what is unsharded of ``units``: see :meth:`reshard`."""
        self._require_rest("reshard")
        for unit in units:
            self.state.perform(self.queue.reshard(unit))
            self.state.pool.slots[unit.slot].free(unit)

    def _prefetch(self, units: Sequence[schedule.Unit[ShardedParameter]]) -> None:
        self._require_rest("prefetch_all")
        self.events.contents.prefetched()
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
        return [unit for unit in self.state.units.all if unit in inside]

    def _require_rest(self, what: str) -> None:
        self.events.recover()
        if self.events.inside or graph_task() != NO_TASK:
            raise OrderError(f"{what}() belongs between two passes: a forward or backward runs")
        if not any(unit.groups for unit in self.state.units.all):
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

    # the end of the mesh (:class:`internsp.mesh.owned.MeshUser`)

    def before_close(self) -> None:
        """Wait for gathers, reductions, exchanges and new values in flight. Launches nothing.

        After a lost group nothing is in flight any more.

        Raises:
            MeshError: a pass runs, or has failed and the ranks have not recovered.
        """
        comm_context, rank = self.state.collectives.comm_context, self.mesh.rank
        if self.events.busy:
            raise MeshError(
                f"ParallelMesh.close() was called on rank {rank} {self.events.busy} of a model on "
                "this mesh: call it between two passes"
            )
        if comm_context.failure or self.recovery.guard.fatal_cause:
            return
        if self.events.unfinished:
            raise MeshError(
                f"ParallelMesh.close() was called on rank {rank} after a pass that failed, while "
                "other ranks may wait for this one: run the next pass, in which the ranks recover, "
                "or end the process"
            )
        self.wait_until_ready()
        self.state.wait_for_gathers()
        self.state.finish_reductions()
        self.state.consumer.discard()

    def closed(self) -> None:
        """See :class:`internsp.mesh.owned.MeshUser`."""
        self.recovery.guard.close()

        def refuse(what: str, everyone: bool = False) -> None:
            raise self.mesh.users.refusal(what)

        for weight in self.replicated.sharded:
            weight.meet = refuse
