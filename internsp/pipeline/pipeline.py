"""``Pipeline``: one rank's chunks, stages and schedule, and the steps they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.config.names import matches, within
from internsp.errors import (
    CollectiveError,
    ConfigError,
    GradientError,
    LayoutError,
    OrderError,
    StructureError,
)
from internsp.layers import ParallelEmbeddingWithCommExt, ParallelLinearWithCommExt
from internsp.layers.linear import GroupedLinearWithCommExt
from internsp.mesh import MeshShape, ParallelMesh
from internsp.parallel import parallelize, recomputed_blocks
from internsp.pipeline.chunks import Chunk, MicroBatch, SplittableModel, hidden_like, split
from internsp.pipeline.failure import Watch
from internsp.pipeline.hooks import (
    ComputeAction,
    ISPCommunicatorSchedulerHook,
    SchedulerHook,
)
from internsp.pipeline.plan import check, passes, simulate_passes
from internsp.pipeline.schedules import (
    ScheduleKind,
    actions,
    computations,
    forget_step,
    kind_of,
    prepared,
)
from internsp.pipeline.stage import ISPPipelineStage
from internsp.pipeline.tied import Tie, separate, shared_by, tie
from internsp.plan.assign import (
    PATTERNS,
    assign,
    require_effect,
    require_experts,
    require_patterns_matched,
)
from internsp.plan.blocks import read, require_triggers_matched, trigger_matches
from internsp.plan.chunk import Schedule
from internsp.plan.dtypes import DTYPES
from internsp.plan.rules import NO_RULES, of_part, own_rules
from internsp.trace import Trace

Criterion = Callable[[Any, MicroBatch], Tensor]
_APART = (ParallelLinearWithCommExt, GroupedLinearWithCommExt, ParallelEmbeddingWithCommExt)
_NO_LEARNING = (
    'weight_parallel.unexpected_order = "learn" in a pipeline: the passes of a step are planned '
    "before it, in the order in which blocks are declared; declare them as they run and leave it "
    "out"
)


class Pipeline:
    """A model cut into this rank's chunks, run by one of torch's schedules.

    Make it on all ranks together with :meth:`create`, or of stages of your own.

    Args:
        tied: weights that several stages have: of each its names, by stage. They begin with the
            first stage's values, and a step sums their gradients. ``create`` finds them.

    Raises:
        StructureError: copies of a tied weight are cut differently; see ``docs/pipeline.md``.

    Attributes:
        chunks: this rank's modules, by ascending stage.
        communicators: theirs, each with slots of its own.
        hooks: append to it to be told what happens.
        micro_batches: of every step and evaluation.
        actions: what this rank does in a step, pass by pass.
        tied: weights that several stages have.
    """

    def __init__(
        self,
        kind: ScheduleKind,
        mesh: ParallelMesh,
        stages: Sequence[ISPPipelineStage],
        micro_batches: int,
        hooks: list[SchedulerHook],
        criterion: Criterion,
        ids_shape: torch.Size | None = None,
        tied: Mapping[str, Tie] | Sequence[Tie] = (),
    ) -> None:
        if any(stage.communicator.learning is not None for stage in stages):
            raise ConfigError(_NO_LEARNING)
        self.kind, self.mesh, self.stages = kind, mesh, list(stages)
        self._ids_shape = ids_shape
        self.micro_batches = micro_batches
        self.hooks = hooks
        self.criterion = criterion
        self.chunks = [stage.submod for stage in stages]
        self.communicators = [stage.communicator for stage in stages]
        made: Any = kind.cls(
            self.stages[0] if kind.single else self.stages,
            micro_batches,
            loss_fn=self._loss,
            scale_grads=False,  # gradients are sums (DESIGN 6)
        )
        self.schedule = made
        self._ours = ISPCommunicatorSchedulerHook({s.stage_index: s.communicator for s in stages})
        self._watch = Watch(mesh, self.communicators, partial(prepared, made), self._forget)
        if mesh.device.type == "cpu":
            for stage in stages:
                stage.messages = self._watch.messages
        hooks.insert(0, self._ours)
        chunks = len(self.stages)
        order = actions(kind, mesh.pipeline, chunks, micro_batches)
        rank_of = partial(kind.rank_of, ranks=mesh.pipeline, chunks=chunks)
        check(order, rank_of, mesh.pipeline * chunks)  # before anything runs (WP-2)
        steps = computations(order, mesh.pipeline_rank)
        self.actions = passes(
            steps, [s.stage_index for s in stages], {s.stage_index: s.splits for s in stages}
        )
        watch = self._watch.messages.watch if mesh.device.type == "cpu" else None
        self.tied = tie(tied, self.stages, rank_of, mesh.pipeline * chunks, mesh, watch)
        self.tied.equalize()

    @classmethod
    def create(
        cls,
        model: SplittableModel,
        mesh: ParallelMesh,
        config: WeightParallelConfig | None = None,
        *,
        schedule: str = "1F1B",
        chunks: int = 1,
        micro_batches: int,
        activation_checkpoint: ActivationCheckpointConfig | None = None,
        shape: tuple[int, int, int] | None = None,
        criterion: Criterion | None = None,
        hooks: Iterable[SchedulerHook] = (),
        trace: Trace | None = None,
    ) -> Pipeline:
        """Cut ``model`` over ``mesh.pipeline`` ranks and attach communication. Collective.

        Args:
            model: on the meta device or not; its modules move into the chunks.
            chunks: a rank holds so many.
            shape: of hidden states ``[B, s, hidden]`` on this rank, the same for every
                micro-batch; ``None``: torch finds out by a rehearsal before the first step.
            criterion: the loss from the last chunk's output and the micro-batch; ``None``: that
                output itself.

        Raises:
            ConfigError: numbers that do not fit the schedule.
            StructureError: a model that cannot be cut so.
        """
        kind = kind_of(schedule)
        if mistake := kind.mistake(mesh.pipeline, chunks, micro_batches):
            raise ConfigError(mistake)
        if mesh.tensor > 1:  # messages between stages know of one tensor rank alone
            raise ConfigError(
                f"a Pipeline on a mesh with {mesh.tensor} tensor ranks is not supported: make the "
                "mesh with tensor = 1 or pipeline = 1"
            )
        count = mesh.pipeline * chunks
        blocks = split(model, count)
        whole = config or WeightParallelConfig()
        if whole.unexpected_order == "learn":
            raise ConfigError(_NO_LEARNING)
        require_patterns(model, whole, mesh.shape)
        trace = trace or Trace()
        own = kind.stages_of(mesh.pipeline_rank, mesh.pipeline, chunks)
        everyone = list(hooks)
        stages = []
        modules = [Chunk(model, part, s == 0, s == count - 1) for s, part in enumerate(blocks)]
        tied = shared_by(model, modules)
        separate([modules[stage] for stage in own])
        for index, stage in enumerate(own):
            module = modules[stage]
            weights, again = local_config(module, config, activation_checkpoint)
            communicator = parallelize(
                module,
                mesh,
                weights,
                activation_checkpoint=again,
                trace=trace,
                split=kind.splits(stage),
            )
            cut = {id(weight.parameter) for weight in communicator.replicated.sharded}
            tiled = again is not None and again.tiles != 1
            again_whole = any(unit.recomputed for unit in communicator.blocks)
            as_one = weights.compile or tiled or again_whole
            given = {} if shape is None else described(module, shape, hidden_dtype(module, config))
            stages.append(
                ISPPipelineStage(
                    module,
                    stage,
                    count,
                    mesh.device,
                    chunk=index,
                    communicator=communicator,
                    hooks=everyone,
                    group=mesh.pipeline_group,
                    splits=splittable(module, cut, as_one),
                    **given,
                )
            )
        ids_shape = None if shape is None else torch.Size(shape[:2])
        criterion = criterion or _output_itself
        return cls(kind, mesh, stages, micro_batches, everyone, criterion, ids_shape, tied)

    def step(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Forward and backward of all micro-batches. Collective; blocks.

        Args:
            batches: as many as were agreed (``micro_batches``), or some multiple: then the schedule
                runs as often, one run after another, and gradients are summed over all.

        Returns:
            Their losses on the last stage, an empty list on others.

        Raises:
            CollectiveError: another rank failed; its cause is named. The next call goes on where
                all ranks have failed, those of each stage at the same point. Else, and on a
                device, every later call raises too.
            GradientError: a failed step has left a part of its gradients in ``.grad`` of a plain
                loop, and ``zero_grad()`` was not called. As the next: nothing has run. (With a
                ``ZeroOptimizer``, sums of earlier steps that it has taken with it are missed by
                ``ZeroOptimizer.step()``.)
            ValueError, TypeError: these are not so many of :class:`MicroBatch`, or gradients are
                disabled. Then every rank raises, a ``CollectiveError`` where its own are right, and
                nothing has run: the pipeline can go on.
            OrderError: called from inside a step, by a hook or the criterion.
            StructureError: copies of a tied weight are not equal; every rank raises, and nothing
                has run (:meth:`equalize`).
        """
        losses: list[Tensor] = []
        with self._running(batches, self.actions), self._unchanged(), self.tied.summed():
            for found in self._runs(batches):
                self.schedule.step(target=self._targets(), losses=found, return_outputs=False)
                losses += [loss.detach() for loss in found]
        return losses

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Forward only; otherwise as :meth:`step`."""
        losses: list[Tensor] = []
        actions = [p for p in self.actions if not p.part]
        with self._running(batches, actions), self._unchanged():
            for found in self._runs(batches):
                self.schedule.eval(target=self._targets(), losses=found, return_outputs=False)
                losses += found
        return losses

    def _runs(self, batches: Sequence[MicroBatch]) -> Iterator[list[Tensor]]:
        """For each run of the schedule a list for its losses, the stages having its batches."""
        for first in range(0, len(batches), self.micro_batches):
            own = batches[first : first + self.micro_batches]
            for stage in self.stages:
                stage.batches, stage.more_runs = own, first + len(own) < len(batches)
            yield []

    def equalize(self) -> None:
        """Give all copies of tied weights the values of the first stage's. Collective; blocks.

        For a program that has written one of them (loaded, edited) and not the others.
        """
        if self._watch.open:
            raise OrderError(
                f"equalize() of a pipeline was called on rank {self.mesh.rank} inside a step: call "
                "it between two steps"
            )
        self.tied.equalize()

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Weights in slots are used again from pass to pass (WP-11)."""
        with ExitStack() as stack:
            for communicator in self.communicators:
                stack.enter_context(communicator.unchanged())
            yield

    def _targets(self) -> Tensor:
        """What torch hands to the criterion for each micro-batch: its number."""
        return torch.arange(self.micro_batches)

    def planned(self, overlap: bool = True, runs: int = 1) -> Schedule:
        """What a step of this rank gathers and reduces, in order.

        Args:
            runs: of the schedule.
        """
        plans = [c.plan for c in self.communicators if c.plan is not None]
        return simulate_passes([*self.actions] * runs, plans, overlap)

    @property
    def stage_wait_seconds(self) -> float:
        """How long this rank had no pass to run in its last step, up to its last pass.

        It waited for hidden states or gradients of other stages: the schedule's bubble, slower
        stages, and messages under way. On a GPU reading it blocks until the step is over.
        """
        return self.communicators[0].state.trace.seconds(self._ours.idle)

    def _running(self, batches: Sequence[MicroBatch], actions: Sequence[ComputeAction]) -> Watch:
        if self._watch.open:
            raise OrderError(
                f"step() or evaluate() of a pipeline was called on rank {self.mesh.rank} while it "
                "runs: hooks and the criterion must not; call it between steps"
            )
        self._watch.begin()
        mistake: Exception | None = None
        try:
            shape = self._check(batches, any(action.part for action in actions))
        except (ValueError, TypeError, GradientError) as error:
            mistake = error
        runs = 0 if mistake else len(batches) // self.micro_batches
        with self._watch.entering():
            refusing, apart, (least, most) = self._refusing(mistake is not None, runs)
        if mistake is not None:
            raise mistake
        if apart:
            raise StructureError(
                f"copies of tied weights are not equal: {'; '.join(apart)} (this is rank "
                f"{self.mesh.rank}). Write, freeze and step all of them alike: optimizers of all "
                "stages need the same settings for them. Pipeline.equalize() copies the first "
                "stage's values to the others"
            )
        if refusing >= 0:
            raise CollectiveError(
                f"rank {refusing} refused this step before anything ran, its own error says why; "
                f"rank {self.mesh.rank} has changed nothing, and all ranks can call again"
            )
        if least != most:
            raise LayoutError(
                f"rank {self.mesh.rank} was given {len(batches)} micro-batches, and ranks from "
                f"{least * self.micro_batches} to {most * self.micro_batches}: all need as many"
            )
        self._ids_shape = shape
        self._ours.begin([*actions] * runs)
        for stage in self.stages:
            stage.group = self.mesh.pipeline_group
        return self._watch

    def _forget(self) -> None:
        """Nothing of a failed step is left in torch's objects and ours."""
        forget_step(self.schedule)
        self._ours.forget()
        for stage in self.stages:
            stage.forget()

    def _refusing(self, mine: bool, runs: int) -> tuple[int, list[str], tuple[int, int]]:
        """A rank that cannot run this step, or -1; no other waits for it (WP-10). And which copies
        of tied weights are not equal, in words, on all ranks where they are not on one. And of the
        ranks' ``runs`` the least and the most. Collective.
        """
        rank = self.mesh.rank if mine else -1
        lead = torch.tensor([rank, runs, -runs], device=self.mesh.device)
        digest = self.tied.digest()
        told = torch.cat([lead, digest.flatten()])
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.mesh.pipeline_group)
        apart = self.tied.apart(told[3:].view_as(digest))
        told = torch.cat([told[:3], told.new_tensor([bool(apart)])])
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.mesh.stage_group)
        refusing, most, least, unequal = told.tolist()
        if unequal and not apart:
            apart = ["those of other ranks of this stage"]
        return refusing, apart, (-least, most)

    def _check(self, batches: Sequence[MicroBatch], training: bool) -> torch.Size | None:
        """Stages receive into buffers of a fixed number and shape; returns that of the ids."""
        if training and not torch.is_grad_enabled():
            raise ValueError("a step needs gradients, but they are disabled here: use evaluate()")
        for communicator in self.communicators if training else ():
            if communicator.plain is not None:  # what a failed step has left, unless it was dropped
                communicator.plain.unfinished.take()
        if not len(batches) or len(batches) % self.micro_batches:
            raise ValueError(f"{len(batches)} micro-batches, but {self.micro_batches} were agreed")
        agreed = self._ids_shape
        for number, batch in enumerate(batches):
            if not isinstance(batch, MicroBatch):
                raise TypeError(f"a micro-batch is a {type(batch).__name__}, not a MicroBatch")
            if not batch.inputs or not isinstance(batch.inputs[0], Tensor):
                continue
            found = batch.inputs[0].shape[:2]
            agreed = agreed or found
            if found != agreed:
                raise LayoutError(
                    f"micro-batch {number} on rank {self.mesh.rank} has rows and tokens "
                    f"{tuple(found)}, but {tuple(agreed)} were agreed (Pipeline.create's "
                    "shape, else the first micro-batch): stages exchange hidden states of one "
                    "shape; pad the batch, or make another Pipeline"
                )
        return agreed

    def _loss(self, output: Any, target: Tensor) -> Tensor:
        last = self.stages[-1]  # only the rank of the last stage has losses
        batch = last.batches[int(target)]
        if last.rehearsing:
            return self._judged(output, batch)
        action = last.action(int(target))
        for hook in self.hooks:
            hook.before_criterion(action, output)
        loss = self._judged(output, batch)
        for hook in self.hooks:
            hook.after_criterion(action, loss)
        return loss

    def _judged(self, output: Any, batch: MicroBatch) -> Tensor:
        loss = self.criterion(output, batch)
        if torch.is_grad_enabled() and loss.numel() != 1:
            # torch's split backward would take the gradient of its sum, in silence.
            raise ValueError(
                f"a loss is one number, but the criterion gave {tuple(loss.shape)}: without labels "
                "the last chunk returns logits; give labels, or a criterion that sums"
            )
        return loss


def _output_itself(output: Any, batch: MicroBatch) -> Tensor:
    # A tensor of its own: torch cuts the graph at the loss in place.
    loss: Tensor = output * 1
    return loss


def require_patterns(
    model: SplittableModel, config: WeightParallelConfig, shape: MeshShape
) -> None:
    """Every pattern of the configuration matches something of the whole model (WP-7).

    Of one chunk that would be too much: :func:`local_config` leaves out what matches nothing there.

    Raises:
        StructureError: one does not, or those of ``blocks`` do not mean all of ``model.layers``.
    """
    layers = [f"layers.{i}" for i in range(len(model.layers))]
    for pattern in config.blocks:
        if not any(matches(name, pattern) for name in layers):
            raise StructureError(
                f"weight_parallel.blocks: {pattern!r} matches none of layers.0 to {layers[-1]}: a "
                "pipeline is cut between the blocks of model.layers; leave blocks empty, or set "
                '"layers.*"'
            )
    if config.blocks and not all(any(matches(n, p) for p in config.blocks) for n in layers):
        raise StructureError(
            f"weight_parallel.blocks = {list(config.blocks)} leaves out some of layers.0 to "
            f'{layers[-1]}, which are the blocks of a pipeline: leave it empty, or set "layers.*"'
        )
    require_triggers_matched(list(model.layers), config.prefetch_triggers)
    parts = {"embed": model.embed, "layers": model.layers, "norm": model.norm, "head": model.head}
    names = [name for part, module in parts.items() for name, _ in module.named_parameters(part)]
    require_patterns_matched(names, config)
    rules = NO_RULES
    if config.plan or own_rules(model):
        if not isinstance(model, nn.Module):
            raise StructureError(f"a plan has rules for a module, not a {type(model).__name__}")
        triggers = config.prefetch_triggers
        structure = read(model, config.trigger, tuple(layers), triggers, config.plan)
        require_effect(assign(model, structure, config, shape.expert), structure)
        rules = structure.rules
    if shape.separate:
        require_experts(names, config, rules)


def local_config(
    chunk: Chunk,
    config: WeightParallelConfig | None,
    checkpoint: ActivationCheckpointConfig | None,
) -> tuple[WeightParallelConfig, ActivationCheckpointConfig | None]:
    """Settings that name or number the model's blocks, for one chunk's own."""
    config = config or WeightParallelConfig()
    own = [name for name, _ in chunk.named_parameters()]
    update: dict[str, Any] = {  # of the model's patterns those that match something here
        "blocks": chunk.block_names(),
        "prefetch_triggers": tuple(
            trigger
            for trigger in config.prefetch_triggers
            if trigger_matches(trigger, chunk.layers.values())
        ),
        **{
            option: tuple(p for p in getattr(config, option) if any(within(n, p) for n in own))
            for option in PATTERNS
        },
        "plan": of_part(chunk, config.plan),
    }
    config = config.model_copy(update=update)
    if checkpoint is not None:
        chosen = sorted(recomputed_blocks(checkpoint, chunk.total))
        local = tuple(i - chunk.blocks.start for i in chosen if i in chunk.blocks)
        checkpoint = checkpoint.model_copy(update={"blocks": local})
    return config, checkpoint


def splittable(chunk: nn.Module, cut: set[int], whole_blocks: bool) -> bool:
    """Whether weight gradients may be computed apart, without unsharded weights.

    Args:
        cut: identities of the cut parameters.
        whole_blocks: some block recomputes, is compiled or computes in tiles. torch would recompute
            a block once more for each of its weights; the others compute both gradients together.
    """
    owners = (m for m in chunk.modules() if any(id(p) in cut for p in m.parameters(recurse=False)))
    return not whole_blocks and all(isinstance(module, _APART) for module in owners)


def hidden_dtype(chunk: nn.Module, config: WeightParallelConfig | None) -> torch.dtype:
    """Of the hidden states between chunks: what their weights compute in."""
    if config is not None and config.compute_dtype is not None:
        return DTYPES[config.compute_dtype]
    return next(chunk.parameters()).dtype


def described(chunk: Chunk, shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    """Inputs and outputs of a stage without memory, so that torch need not try."""
    ids = torch.empty(shape[:2], dtype=torch.int64, device="meta")
    wide = torch.promote_types(dtype, torch.float32)
    loss = torch.empty((), dtype=wide, device="meta", requires_grad=True)
    return {
        "input_args": ids if chunk.first else hidden_like(*shape, dtype),
        "output_args": loss if chunk.last else hidden_like(*shape, dtype),
    }
