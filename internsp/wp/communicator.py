"""How weights travel: the interface that layers see, and its three implementations.

:class:`WPCommunicator` (InternEvo's interface) is what a parallel layer asks: unshard a weight for
use, release it, prepare its backward, take its ready gradient. The blocks of a chunk, its embedding
and its head implement it over the same parts, which a :class:`Chunk` holds: the gather queue says
what to do (:mod:`internsp.wp.schedule`), slots and reducer do it. *When* an event happens is
:mod:`internsp.wp.hooks`' business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from internsp.autograd import NO_TASK, graph_task
from internsp.errors import OrderError, StaleWeightError, StructureError
from internsp.failure.last_words import EndOfBackward
from internsp.failure.recovery import Recovery
from internsp.mesh import ParallelMesh
from internsp.plan.chunk import ChunkPlan
from internsp.wp.autocast import Autocast, follow
from internsp.wp.contents import Contents
from internsp.wp.enclosing import Enclosing, EnclosingBlocks
from internsp.wp.parameter import Member, ShardedParameter, trained
from internsp.wp.perform import Chunk
from internsp.wp.replicated import ReplicatedParameters
from internsp.wp.schedule import BACKWARD, FORWARD, RECOMPUTE
from internsp.wp.slots import Unit


class WPCommunicator(ABC):
    """Gathers weights and reduces their gradients on behalf of layers.

    Four methods are what an implementation needs (``docs/own_communicator.md`` has one of sixty
    lines, for :func:`internsp.parallelize`); the others have answers that are right for any.

    Attributes:
        weight_part: the weight part of a split backward runs, which needs no unsharded weight.
    """

    weight_part = False

    @abstractmethod
    def unshard(self, weight: ShardedParameter) -> Tensor:
        """The unsharded weight, for use now, in forward or in a recompute.

        Waits for this weight's gather only. Its memory must have the same address each time as long
        as a graph is alive that was made with it.
        """

    @abstractmethod
    def release(self, weight: ShardedParameter) -> None:
        """The layer's forward is over: nothing reads the unsharded weight until its backward."""

    @abstractmethod
    def before_backward(self, weight: ShardedParameter) -> None:
        """The layer's backward is about to run: what :meth:`unshard` gave must be there again."""

    @abstractmethod
    def on_grad_ready(self, weight: ShardedParameter, gradient: Tensor) -> None:
        """The unsharded gradient of one use is ready: start its reduction; do not wait for it."""

    def before_nodes(self, weight: ShardedParameter) -> None:
        """:meth:`before_backward` of functions of any kind, which may run before a recompute."""
        self.before_backward(weight)

    def at_hand(self, weight: ShardedParameter) -> bool:
        """In backward: whether all ranks use ``weight`` here, so that it may be unsharded."""
        return True

    # a block that takes all its weights at its entry

    def unshard_all(self, weights: Sequence[ShardedParameter]) -> list[Tensor]:
        """:meth:`unshard` of each."""
        return [self.unshard(weight) for weight in weights]

    def release_all(self, weights: Sequence[ShardedParameter]) -> None:
        """:meth:`release` of each."""
        for weight in weights:
            self.release(weight)

    def before_all(self, weights: Sequence[ShardedParameter]) -> None:
        """:meth:`before_nodes` of each, the last used first."""
        for weight in reversed(weights):
            self.before_nodes(weight)

    def on_grads_ready(self, ready: Sequence[tuple[ShardedParameter, Tensor]]) -> None:
        """:meth:`on_grad_ready` of each: its last gradient from this pass through the block."""
        for weight, gradient in ready:
            self.on_grad_ready(weight, gradient)


class UsersCommunicator(WPCommunicator):
    """A user's own implementation, and what the library does around it.

    What it reduces it hands to :meth:`ShardedParameter.add_reduced_grad`; replicas, ``.grad`` and
    optimizers go on from there.
    """

    def __init__(self, chunk: Chunk, own: WPCommunicator) -> None:
        self._chunk, self.own = chunk, own

    def unshard(self, weight: ShardedParameter) -> Tensor:
        """See :meth:`WPCommunicator.unshard`."""
        if weight.autocasts:
            follow(weight)
        weight.shown = weight.tag()
        return self.own.unshard(weight)

    def release(self, weight: ShardedParameter) -> None:
        """See :meth:`WPCommunicator.release`."""
        if graph_task() == NO_TASK:
            self.own.release(weight)

    def before_backward(self, weight: ShardedParameter) -> None:
        """See :meth:`WPCommunicator.before_backward`."""
        self.own.before_backward(weight)

    def on_grad_ready(self, weight: ShardedParameter, gradient: Tensor) -> None:
        """See :meth:`WPCommunicator.on_grad_ready`."""
        self._chunk.began()
        self._chunk.reducer.touched[weight] = True
        self.own.on_grad_ready(weight, gradient)


class ChunkWeights(WPCommunicator):
    """A chunk's cut weights, in its blocks and beside them: what the gather queue says is done.

    Attributes:
        state: the parts that all communicators of the chunk share.
    """

    def __init__(self, state: Chunk) -> None:
        self.state, self.queue = state, state.queue

    def unshard(self, weight: ShardedParameter) -> Tensor:
        """See :meth:`WPCommunicator.unshard`."""
        unit, state = weight.unit, self.state
        phase = RECOMPUTE if graph_task() != NO_TASK else FORWARD
        if weight.autocasts:
            follow(weight)
        if unit.block < 0 and not state.inside and phase == FORWARD:  # no entry has looked
            state.forget_older(unit)
        actions = self.queue.use(unit, weight, phase, state.trace.enabled or state.streams)
        if actions:
            state.perform(actions)
        return state.pool.view(weight)

    def unshard_all(self, weights: Sequence[ShardedParameter]) -> list[Tensor]:
        """See :meth:`WPCommunicator.unshard_all`."""
        unit = weights[0].unit
        phase = RECOMPUTE if graph_task() != NO_TASK else FORWARD
        follow(*weights)
        self.state.perform(self.queue.use_all(unit, phase, self.state.trace.enabled))
        self._read(*unit.weights)
        return [self.state.pool.view(weight) for weight in weights]

    def release(self, weight: ShardedParameter) -> None:
        """See :meth:`WPCommunicator.release`."""
        if graph_task() == NO_TASK:
            actions = self.queue.release(weight.unit, weight, self.state.trace.enabled)
            if actions:
                self.state.perform(actions)

    def release_all(self, weights: Sequence[ShardedParameter]) -> None:
        """Its bytes are released when the block is left; with rolling gathers, here."""
        if self.queue.policy.rolling or self.state.trace.enabled:
            super().release_all(weights)

    def before_backward(self, weight: ShardedParameter) -> None:
        """See :meth:`WPCommunicator.before_backward`."""
        state = self.state
        told = state.trace.enabled or state.streams
        actions = self.queue.before_backward(weight.unit, weight, told)
        if actions:
            state.perform(actions)

    def before_nodes(self, weight: ShardedParameter) -> None:
        """:meth:`before_backward` for a function that keeps a weight by itself.

        torch's non-reentrant form would recompute only when it is asked for a saved tensor, and
        such a function may ask for none.
        """
        self.before_backward(weight)
        unit = weight.unit
        if not unit.recomputed or not weight.moves or weight in self.queue.reduced:
            return
        if not self.queue.holds(weight):
            self.state.perform(self.queue.use(unit, weight, BACKWARD))
        else:  # a gather in flight is the recompute's, which uses it next
            self.state.perform(self.queue.arrive(unit, weight, RECOMPUTE))
        self._read(weight)

    def before_all(self, weights: Sequence[ShardedParameter]) -> None:
        """:meth:`before_nodes` for a block that took all its weights at its entry."""
        unit = weights[0].unit
        if unit.recomputed or self.queue.split:
            for weight in weights if unit.recomputed else reversed(weights):
                self.before_nodes(weight)
            return
        self.state.perform(self.queue.use_all(unit, BACKWARD, self.state.trace.enabled))
        self._read(*unit.weights)

    def at_hand(self, weight: ShardedParameter) -> bool:
        """See :meth:`WPCommunicator.at_hand`."""
        if weight.unit.block < 0:  # its slot is not shared
            return self.queue.holds(weight)
        return not weight.moves or weight.unit is self.queue.open

    def on_grad_ready(self, weight: ShardedParameter, gradient: Tensor) -> None:
        """See :meth:`WPCommunicator.on_grad_ready`; reduced in the declared order (WP-2)."""
        self._ready(weight.unit, ((weight, gradient),))
        actions = self.queue.grad_ready(weight.unit, weight)
        if actions:
            self.state.perform(actions)

    def on_grads_ready(self, ready: Sequence[tuple[ShardedParameter, Tensor]]) -> None:
        """See :meth:`WPCommunicator.on_grads_ready`."""
        unit = ready[0][0].unit
        self._ready(unit, ready)
        self.state.perform(self.queue.grads_ready(unit, [weight for weight, _ in ready]))

    def _ready(self, unit: Unit, ready: Sequence[tuple[ShardedParameter, Tensor]]) -> None:
        """Keep gradients until their reduction; those of several uses are summed."""
        self.state.began()
        if unit.at_entry and unit is not self.queue.open and not self.queue.split:
            raise StaleWeightError(
                f"backward entered block {unit.name} on rank {dist.get_rank()} through a tensor "
                "that left it by another way than its output, so that its weights may not have "
                "been whole: return that tensor from the block, or set "
                "weight_parallel.coalesce_bytes = 0 and compile = false"
            )
        kept, frozen = self.state.reducer.ready, self.state.reducer.frozen
        for weight, gradient in ready:
            if weight in frozen:
                continue
            before = kept.get(weight)
            kept[weight] = gradient if before is None else before + gradient

    def _read(self, *weights: ShardedParameter) -> None:
        self.state.pool.slots[weights[0].unit.slot].streams.read(*weights)


class EmbeddingWeightParallelCommunicator(ChunkWeights):
    """A unit beside the blocks: the embedding, or any large weight that no block owns.

    It is gathered at the model's entry, used or not, and reduced at the end of backward, with zeros
    where this rank has no gradient, so that all ranks send the same messages (WP-2). The backward
    of a lookup needs the indices, not the table, so nothing is gathered for it.
    """

    def __init__(self, state: Chunk, unit: Unit) -> None:
        super().__init__(state)
        self.unit = unit


class HeadWeightParallelCommunicator(EmbeddingWeightParallelCommunicator):
    """The output projection: its weight has a slot of its own, gathered after the last block.

    Its gradient is reduced where backward comes to the blocks: once, however often a rank used it.
    When that is, the gather queue knows (``head``); else it is a unit beside the blocks as any, and
    the embedding's where the two are tied. What becomes of the logits
    (``weight_parallel.head_output``) is the model's business, which exchanges them
    (:mod:`internsp.sp.vocabulary`).
    """


class ISPCommunicator(ChunkWeights):
    """Weights of a chunk's transformer blocks, and the chunk's passes from begin to end.

    Attributes:
        blocks: units in the declared order.
        replicated: parameters that every rank holds unsharded.
        head, embedding: their communicators, or ``None``; other large weights outside of blocks
            have none of their own.
        enclosing: blocks that hold units of their own.
        recovery: what happens after an exception.
        contents: whether what is in the slots may be used again.
        places: which parameter each module holds under which name.
        plain: completes ``.grad`` at the end of backward
            (:class:`internsp.optim.plain_loop.PlainLoop`); ``None``: a ``ZeroOptimizer`` does so
            later (WP-9).
        more_to_come: whether replicas exchange sums after a later backward, not after this one;
            ``None``: the program has said nothing.
        expects_exchange: asked as a backward begins of which nothing is known: whether it is
            expected to be the last before replicas exchange their sums.
        sums_wait: asked between two steps of a pipeline: whether sums of earlier backwards wait
            for an exchange or an optimizer's step.
        confirm: called as the outermost backward returns; raises where the ranks' batches differ,
            before anything of its gradients is complete.
        learning: records the order in the first step (``unexpected_order = "learn"``); ``None``
            where none is learned, and once it is (``learned``).
        meeting: where the ranks of the stage agree on what is done at rest.
        step_gradients: what a pipeline's step adds to gradients of weights that other stages have,
            too (:class:`internsp.pipeline.tied.StepGradients`); ``None``: there are none.
        whole_in: what has made parameters whole outside of training
            (:mod:`internsp.whole`), so that no pass may begin; empty: nothing.
    """

    def __init__(
        self,
        state: Chunk,
        mesh: ParallelMesh,
        blocks: list[Unit],
        replicated: ReplicatedParameters,
        mean: bool = False,
    ) -> None:
        super().__init__(state)
        self.mesh, self.blocks, self.replicated = mesh, blocks, replicated
        self.mean = mean
        self.learning: Any = None
        self.learned = False
        self.head: HeadWeightParallelCommunicator | None = None
        self.embedding: EmbeddingWeightParallelCommunicator | None = None
        self.enclosing: EnclosingBlocks[Unit, ShardedParameter] = EnclosingBlocks(self.queue, ())
        self.meeting: Any = None
        self.whole_in = ""
        self.step_gradients: Any = None
        self.plan: ChunkPlan | None = None
        self.places: dict[tuple[nn.Module, str], Member] = {}
        self.plain: Any = None
        self.more_to_come: bool | None = None
        self.expects_exchange: Callable[[], bool] = lambda: True
        self.sums_wait: Callable[[], bool] = lambda: False  # a pipeline's step completes .grad
        self._completed = False  # .grad, since a pipeline's step has begun
        self.confirm: Callable[[], None] = lambda: None
        self.after_backward: list[Callable[[], None]] = []
        # Who holds sums of its own forgets them; told whether earlier ones are missed.
        self.after_rest: list[Callable[[bool], None]] = []
        self.recovery = Recovery(mesh, state.collectives.ledger)
        self._autocast = Autocast(replicated.sharded, blocks, mesh.device.type)
        self.contents = Contents(self)
        state.began = replicated.began = self._ensure_callback
        self._has_replicas = any(axis.replicas > 1 for axis in mesh.axes)
        self._next = 0  # the block that a forward must run next
        self.forwards = 0  # that have begun; one backward may go through the graphs of several
        self._graphs = 0  # made by forwards since a backward ended
        self._forward: int | None = None  # in whose graph the backward that runs is, if known
        self._forward_open = False  # begun, and not come to its end
        self._nested = False  # that task may be an inner one

    def beside(self) -> list[Unit]:
        """Units beside blocks and head; of enclosing blocks what lies in none of their units."""
        rests = [block.rest for block in self.enclosing.blocks if block.rest.weights]
        return [*self.queue.root, *rests]

    def units(self) -> list[Unit]:
        """All of the chunk: blocks, embedding, others, head."""
        head = [self.queue.head] if self.queue.head is not None else []
        return list(dict.fromkeys([*self.blocks, *self.beside(), *head]))

    # weights of blocks, for layers

    def unshard(self, weight: ShardedParameter | nn.Module) -> Any:
        """See :meth:`WPCommunicator.unshard`; of a module, for programs, before a forward.

        Of a module: start the all-gathers of its units, as :meth:`prefetch_all` of all. In a
        module's place stand the block in which it lies, the embedding, the head.

        Raises:
            OrderError: a pass runs, or what runs before would take the slot.
            StructureError: no cut weight lies in the module.
        """
        if isinstance(weight, ShardedParameter):
            return super().unshard(weight)
        units = self._units_of(weight, "unshard")
        room = self.queue.with_room()
        for unit in units:
            if unit not in room:
                raise OrderError(
                    f"unshard(): {unit.name} shares its slot with blocks that run before it, which "
                    f"would take it: those with room are {', '.join(u.name for u in room)}; raise "
                    "weight_parallel.prefetch_depth, or set keep_unsharded for it"
                )
        self._gather_early(units)
        return None

    # forward

    def begin_forward(self) -> None:
        """The model is entered: recover from a failed pass, launch the first gathers."""
        self.recover()
        self.recovery.lookout.begin()
        if self.learning is not None:
            self.learning.begin_forward()
        self._forward_open = self.state.inside = True
        self._next = 0
        self._count_forward()
        self._autocast.enter_model()
        keep = self.contents.begin_pass()
        self.state.perform(self.queue.begin_forward(keep, head=self.learning is not None))

    @property
    def busy(self) -> str:
        """What runs now, in words; empty at rest."""
        if self.whole_in:
            return f"inside {self.whole_in}"
        if self.state.inside:
            return "in the model's forward"
        if graph_task() != NO_TASK:
            return "in a backward"
        return "within unchanged(), which a step opens" if self.contents.promised else ""

    def require_shards(self) -> None:
        """Before a pass, a step or the like.

        Raises:
            OrderError: parameters are whole outside of training.
        """
        if self.whole_in:
            raise OrderError(
                f"a forward, a step or zero_grad() of this model was called on rank "
                f"{self.mesh.rank} inside {self.whole_in}, where its parameters are whole plain "
                "tensors without communication: leave the context first"
            )

    def recover(self) -> None:
        """No effect unless a pass has failed: then rest, or raise the first cause (WP-10)."""
        self.require_shards()
        self.recovery.check()
        ledger, doom = self.state.collectives.ledger, self.recovery.lookout.doom
        if ledger.failure or doom or self._forward_open or self.replicated.backward >= 0:
            self.recovery.agree()
            self.rest()

    def forward_failed(self, error: BaseException) -> None:
        """The model's forward has raised: tell the ranks that will wait for this one (WP-10)."""
        if self._forward_open:
            self.recovery.failed(f"{type(error).__name__} in forward: {error}")
        else:
            self.recovery.refused(error)
        self.recovery.annotate(error)

    def end_forward(self) -> None:
        """The model's forward is over."""
        order = self.queue.blocks
        if self.learning is not None:
            self.learning.come_to(None)
        if self.queue.strict and self._next < len(order) and not self._may_differ():
            raise OrderError(  # the forward stays open: all ranks recover together
                f"only {self._next} of {len(order)} blocks ran in this forward on rank "
                f"{self.mesh.rank}: the next in order was {order[self._next].name}. "
                "Set weight_parallel.unexpected_order = 'learn' for models that always skip the "
                "same blocks, 'gather' for others"
            )
        self._forward_open = False
        if self.state.link is not None:
            self.state.link.rest()  # from here on a program may write weights

    def enter_block(self, unit: Unit) -> None:
        """A block's forward or recompute begins."""
        if graph_task() != NO_TASK:
            if unit.around >= 0:  # of a recompute that may go around several units
                self.state.perform(self.enclosing.recompute(unit))
            else:
                self.enter_backward(unit)
        else:
            self._check_order(unit)
            changed = self._autocast.enter_block(unit)
            self.state.perform(self.queue.enter(unit))
            if changed:
                self.state.perform(self.queue.renew(unit))

    def enter_enclosing(self, block: Enclosing[Unit]) -> None:
        """The forward of a block that holds units of its own begins, or its recompute."""
        if graph_task() == NO_TASK:
            self.state.perform(self.enclosing.enter(block))

    def enclosing_backward(self, block: Enclosing[Unit]) -> None:
        """The gradient of such a block's output has arrived."""
        if not self.weight_part:
            self.state.perform(self.enclosing.enter_backward(block, self._everywhere()))

    # backward

    def begin_backward(self, forward: int) -> None:
        """A gradient entered the graph of ``forward``; idempotent within one backward.

        Queues the end-of-backward callback, from the outermost graph task (WP-9).
        """
        task = torch._C._current_graph_task_id()
        if self.weight_part:
            return
        if task == self.replicated.backward:
            self._come_to(forward)
            return
        self.recovery.check()
        if self.replicated.backward >= 0 and not self._nested:  # the one before this never ended
            self.recovery.agree()
            self.rest()
        self.replicated.backward, self._forward = task, forward
        self._nested = False
        self._look()
        self._autocast.begin_backward()
        self.queue.begin_backward(self._exchanges())
        self.contents.check()
        self._queue_end()

    def enter_backward(self, unit: Unit, run: int | None = None) -> None:
        """The gradient of a block's output has arrived (or its recompute begins).

        Args:
            run: see :meth:`GatherQueue.enter_backward`.
        """
        if not self.weight_part:
            self.state.perform(self.queue.enter_backward(unit, self._everywhere(), run))

    def end_backward(self) -> None:
        """The outermost backward returns: every ready gradient is launched; finish them (WP-9)."""
        self.confirm()
        self.state.perform(self.queue.end_backward(self._everywhere(), self._last_trained()))
        if self.queue.split:  # an input backward: no weight has a gradient
            self.queue.end_pass()
            self.replicated.backward = -1
            return
        self.finish_backward()

    def finish_backward(self) -> None:
        """Every gradient is ready: reduce the rest, complete ``.grad`` unless an optimizer does."""
        if not self.queue.reductions.accumulating:
            self.state.reduce_accumulated()  # of what this backward has passed over
        self.queue.end_pass()
        if self.plain is not None:
            more = self.queue.reductions.accumulating or self.more_to_come
            self.plain.backward_ended(bool(more))
            self._completed |= not more
        self.replicated.backward, self._graphs = -1, 0
        if self.state.link is not None:
            self.state.link.rest()
        for callback in self.after_backward:
            callback()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Full accumulation: backwards inside sum unsharded gradients on this rank, send nothing.

        The first backward outside takes the sums along, so that a loop over micro-batches reduces
        once: put all but the last inside (as with torch's DDP). ``.grad`` is complete again after
        that one, or finished by a ZeroOptimizer's next step, which takes what is left; in between,
        reading it raises, and `zero_grad()` and `.grad = None` drop the sums. Costs the memory of
        every unsharded gradient in fp32 or wider.
        """
        queue = self.queue
        before, queue.reductions.accumulating = queue.reductions.accumulating, True
        try:
            yield
        finally:
            queue.reductions.accumulating = before

    @contextmanager
    def no_replica_sync(self) -> Iterator[None]:
        """Sharded accumulation: backwards inside reduce within the weight group only.

        Sums stay on this rank, of the size of a shard. The first backward outside takes them along
        and exchanges them with the replicas and, for replicated parameters, with all ranks, once;
        until then ``.grad`` is as in :meth:`no_sync` (WP-9). A ZeroOptimizer does so by itself.
        """
        with self.replica_sync(False):
            yield

    @contextmanager
    def replica_sync(self, now: bool) -> Iterator[None]:
        """Say of each backward inside whether replicas exchange after it, for certain.

        Args:
            now: it is the last before the exchange (with a ZeroOptimizer, before its step), and
                goes through the graph of one forward: the exchange starts while it runs.
        """
        before, self.more_to_come = self.more_to_come, not now
        try:
            yield
        finally:
            self.more_to_come = before

    def unchanged(self) -> AbstractContextManager[None]:
        """A promise that nothing writes weights inside: forwards use again what is in slots.

        For evaluations, micro-batches and generation in a row: the last blocks of a pass, kept
        ones, embedding and head are not gathered again by the next. Outside of it a forward takes
        over nothing from the pass before. A forward raises ``StaleWeightError`` where the promise
        was broken. All ranks enter and leave it together; no message.
        """
        return self.contents.unchanged()

    def prefetch_all(self) -> None:
        """Start the all-gathers of the next forward: of every unit that has room in the slots.

        Between two passes, after whatever writes weights: the forward raises ``StaleWeightError``
        where one was written since. Collective: all ranks call it. Does not block.

        Raises:
            OrderError: a pass runs.
        """
        self._gather_early(self.queue.with_room())

    def reshard(self, module: nn.Module) -> None:
        """Forget the unsharded weights of ``module``'s units: their next use gathers them.

        Between two passes, also between a forward and its backward. Frees their memory where
        ``memory_pool`` is off; slots stay. Collective: all ranks call it. Waits for what is in
        flight.

        Raises:
            OrderError: a pass runs.
            StructureError: no cut weight lies in ``module``.
        """
        for unit in self._units_of(module, "reshard"):
            self.state.perform(self.queue.forget(unit))
            self.state.pool.slots[unit.slot].free(unit)

    def _gather_early(self, units: Sequence[Unit]) -> None:
        self._require_rest("prefetch_all")
        self.contents.prefetched()
        self.state.perform(self.queue.gather_early(units))

    def _units_of(self, module: nn.Module, what: str) -> list[Unit]:
        """Those in which weights of ``module`` lie, in the order of the queue."""
        self._require_rest(what)
        inside = {
            member.unit
            for part in module.modules()
            for name in part._parameters
            if isinstance(member := self.places.get((part, name)), ShardedParameter)
        }
        if not inside:
            raise StructureError(
                f"{what}(): no cut weight of this model lies in the {type(module).__name__}"
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
            Whether sums of steps before wait for the optimizer.
        """
        self._completed = False
        return self.sums_wait()

    def step_failed(self, earlier: bool) -> None:
        """On all ranks: back to rest.

        Args:
            earlier: what :meth:`begin_step` has returned.
        """
        if self._completed:  # what the step has added to .grad cannot be taken out again
            members = self.replicated.everyone()
            added = [member for member in members if member.parameter.grad is not None]
            self.plain.unfinished.show(added, failed=True)
        self.rest(earlier or self._completed)

    def expect(self, phase: str) -> None:
        """A schedule runs this chunk's forward or backward next: start its first gathers."""
        self.state.perform(self.queue.expect(phase))

    def begin_part(self, weights: bool) -> None:
        """One part of a backward that is computed in two begins.

        Args:
            weights: the weight gradients; else those of the chunk's inputs.
        """
        self.recovery.check()
        self.queue.begin_part(weights, self._exchanges())
        self._set_weight_part(weights)

    def end_part(self) -> None:
        """It is over; after the weights' own, gradients are as after any backward."""
        weights = self.weight_part
        self.state.perform(self.queue.end_part())
        self._set_weight_part(False)
        if weights:
            self.finish_backward()

    # at rest

    def invalidate(self) -> None:
        """Weights were written where nothing can see it: gather them anew (WP-11).

        Between two passes this is not needed. Between a forward and its backward it makes the
        backward an error.
        """
        for member in self.replicated.everyone():
            member.invalidate()

    def publish(self) -> None:
        """Wait until every shard is what the optimizer made of it (WP-3)."""
        for member in self.replicated.everyone():
            member.publish()

    def settle_gathers(self) -> None:
        """Let gathers that were not used arrive: the shards they read are about to be written."""
        self.state.perform(self.queue.settle())

    def forget_slots(self) -> None:
        """Let gathers in flight arrive; nothing that is unsharded now will be reused."""
        self.settle_gathers()
        self.queue.forget_contents()
        self.queue.end_pass()

    def rest(self, earlier: bool = True) -> None:
        """Let everything in flight arrive and forget it: no bytes held, no reduced gradient.

        Args:
            earlier: sums may be among it that a repetition of what has failed does not bring back.
        """
        self.settle_gathers()
        self.queue.reset()
        self.state.reducer.discard()
        if self.state.near is not None:
            self.state.near.discard()
        self.state.replicas.discard()
        self._set_weight_part(False)
        for weight in self.replicated.sharded:
            weight.drop_reduced_grad()
        self.replicated.reset()
        if self.plain is not None:
            if earlier:
                self.plain.unfinished.lose()
            else:
                self.plain.unfinished.take()
        self._forward_open, self.replicated.backward, self._nested = False, -1, False
        self._next = self._graphs = 0
        if self.state.link is not None:
            self.state.link.rest()
        for callback in self.after_rest:
            callback(earlier)

    # inside

    def _come_to(self, forward: int) -> None:
        """Backward is in the graph of ``forward``. If it was in another's, that is over."""
        if self._forward not in (None, forward):
            self.state.perform(self.queue.come_to_earlier(self._everywhere(), self._last_trained()))
        self._forward = forward

    def _count_forward(self) -> None:
        self.forwards += 1
        self._graphs += torch.is_grad_enabled()
        weights = self.replicated.sharded
        for weight, now in zip(weights, trained(weights), strict=True):
            weight.trained = now

    def _exchanges(self) -> bool:
        """Whether replicas exchange what the backward that begins completes, while it runs.

        It must be the last before the exchange, every weight must have its last reduction at the
        place that the queue knows, and the queue must be every rank's.
        """
        if self.queue.reductions.accumulating or self.more_to_come or not self.queue.strict:
            return False
        if not self._has_replicas or self.queue.recurs:  # twice reduced: its last is not known
            return False
        if not all(weight.trained for _, weight in self.state.reducer.whole):
            return False  # their sums are reduced when the backward is over
        if self.more_to_come is None:  # a loss may be a sum over several forwards
            return self._graphs == 1 and self.expects_exchange()
        return True

    def _everywhere(self) -> bool:
        """Whether all ranks go through all blocks, those whose data skip some as if they did."""
        return self.queue.strict and not self._nested and not self.queue.split

    def _set_weight_part(self, runs: bool) -> None:
        for weight in self.replicated.everyone():
            weight.communicator.weight_part = runs
        self.weight_part = runs

    def _last_trained(self) -> int:
        """The block at which every rank's backward ends: a frozen one below is nowhere entered."""
        if not self.queue.lowest:
            return 0
        if any(weight.trained for unit in self.beside() for weight in unit.weights):
            return 0
        names = [m.name for m in self.replicated.members if m.requires_grad]
        for number, unit in enumerate(self.queue.blocks):
            small = any(name.startswith(unit.within) for name in names)
            if small or any(weight.trained for weight in unit.weights):
                return number
        return len(self.queue.blocks)

    def _check_order(self, unit: Unit) -> None:
        order = self.queue.blocks
        if not self.state.inside:  # blocks run by themselves, without the model's forward
            self.recover()
            self._next %= len(order)
            if unit.block < self._next or not self._next:
                self.recovery.lookout.begin()
                self._count_forward()
                self.queue.begin_blocks(self.contents.begin_pass())
            self.state.forget_older(unit)
            for beside in self.beside():  # where weights lie that blocks share
                self.state.forget_older(beside)
        elif self.learning is not None:
            self.learning.come_to(unit)
        expected = order[self._next] if self._next < len(order) else None
        if expected is unit:
            self._next += 1
        elif self.queue.strict:
            self._out_of_order(unit, expected)
        else:
            self._next = unit.block + 1

    def _may_differ(self) -> bool:
        return self.learned and not torch.is_grad_enabled()

    def _out_of_order(self, unit: Unit, expected: Unit | None) -> None:
        """A block runs that is not the next of the order."""
        before = self.queue.blocks[self._next - 1] if self._next else None
        if self.learned and (self.queue.astray or unit is before):
            return  # several times in a row are one place
        if self._may_differ():
            self.queue.stray()
            return
        which = "which the first step has shown" if self.learned else "as declared"
        raise OrderError(
            f"block {unit.name} ran on rank {self.mesh.rank} where "
            f"{expected.name if expected is not None else 'the end'} was expected, {which}: the "
            "prefetch order would be wrong. Declare the blocks in the order in which they run "
            "(weight_parallel.blocks), or set weight_parallel.unexpected_order = 'learn' for an "
            "order that never changes, 'gather' for one that does"
        )

    def _ensure_callback(self) -> None:
        """A gradient is ready though no output of the model was hooked: finish at this task's end.

        Under reentrant checkpointing that task is an inner one: early, but complete.
        """
        if self.replicated.backward < 0 and not self.queue.split:
            self.replicated.backward = torch._C._current_graph_task_id()
            self._nested, self._forward = True, None
            self._look()
            self._queue_end()

    def _look(self) -> None:
        """A backward begins: a user may have dropped gradients that are not complete.

        Or frozen, since the forward, parameters that will then have none, as under autograd.
        """
        replicated, sharded = self.replicated, self.replicated.sharded
        small = zip(replicated.members, trained(replicated.members), strict=True)
        replicated.frozen = {member for member, now in small if not now}
        large = zip(sharded, trained(sharded), strict=True)
        self.state.reducer.frozen = {weight for weight, now in large if not now}
        if self.plain is not None:
            self.plain.unfinished.look()

    def _queue_end(self) -> None:
        end = EndOfBackward(self.end_backward, self.recovery.backward_failed)
        torch.autograd.Variable._execution_engine.queue_callback(end)
