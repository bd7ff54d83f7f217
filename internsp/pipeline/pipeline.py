"""``Pipeline``: one rank's chunks, stages and schedule, which run a step together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from internsp.base.autograd import tensors
from internsp.base.names import matches, within
from internsp.base.trace import Trace
from internsp.config import ActivationCheckpointConfig, SequenceConfig, WeightParallelConfig
from internsp.config.combinations import LEARN_IN_A_PIPELINE, mistakes, require_none
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
from internsp.parallel.parallelize import parallelize, recomputed_blocks
from internsp.pipeline.chunks import Chunk, MicroBatch, SplittableModel, split_model
from internsp.pipeline.failure import PipelineRecovery
from internsp.pipeline.hooks import (
    ComputeAction,
    ISPCommunicatorSchedulerHook,
    SchedulerHook,
)
from internsp.pipeline.schedules import (
    ScheduleKind,
    computations,
    initialized,
    reset_schedule,
    schedule_kind,
    schedule_order,
)
from internsp.pipeline.simulate import check_order, compute_actions, simulate_with_launches
from internsp.pipeline.stage import ISPPipelineStage
from internsp.pipeline.tied import CopyNames, copy_shared_modules, find_tied, make_tied_weights
from internsp.schedule.chunk import Schedule
from internsp.structure.assign import (
    plan_sharding,
    require_experts,
    require_patterns_matched,
)
from internsp.structure.blocks import read_structure, require_triggers_matched, trigger_matches
from internsp.structure.dtypes import DTYPES
from internsp.structure.effect import require_effect
from internsp.structure.rules import rules_of_chunk

Criterion = Callable[[Any, MicroBatch], Tensor]
_SPLITTABLE_LAYERS = (
    ParallelLinearWithCommExt,
    GroupedLinearWithCommExt,
    ParallelEmbeddingWithCommExt,
)


class Pipeline:
    """This rank's chunks of a model, run by one of torch's schedules.

    Create it on all ranks together: with :meth:`create`, or from stages of your own.

    Args:
        tied: weights of which several stages have copies: for each weight its name on each of
            these stages. Copies begin with the first stage's values, and a step sums their
            gradients. ``create`` finds tied weights by itself.

    Raises:
        StructureError: copies of a tied weight are cut differently (``docs/howto/pipeline.md``).

    Attributes:
        chunks: this rank's modules, by ascending stage.
        communicators: the communicator of each chunk; each has slots of its own.
        hooks: hooks that are called around each action; append your own.
        micro_batches: number of micro-batches of one run of the schedule.
        actions: this rank's forwards and backwards in one run of the schedule, in order.
        tied: weights of which several stages have copies.
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
        tied: Mapping[str, CopyNames] | Sequence[CopyNames] = (),
    ) -> None:
        if any(stage.communicator.events.order.learning is not None for stage in stages):
            raise ConfigError(f"weight_parallel.unexpected_order: {LEARN_IN_A_PIPELINE}")
        self.kind, self.mesh, self.stages = kind, mesh, list(stages)
        self._ids_shape = ids_shape
        self.micro_batches = micro_batches
        self.hooks = hooks
        self.criterion = criterion
        self.chunks = [stage.submod for stage in stages]
        self.communicators = [stage.communicator for stage in stages]
        for communicator in self.communicators:
            communicator.join(self.communicators)
        torch_schedule: Any = kind.cls(
            self.stages[0] if kind.single else self.stages,
            micro_batches,
            loss_fn=self._loss,
            scale_grads=False,  # gradients are sums (design.md 6)
        )
        self.schedule = torch_schedule
        self._isp_hook = ISPCommunicatorSchedulerHook(
            {s.stage_index: s.communicator for s in stages}
        )
        self._guard = PipelineRecovery(
            mesh, self.communicators, partial(initialized, torch_schedule), self._reset_step
        )
        if mesh.device.type == "cpu":
            for stage in stages:
                stage.messages = self._guard.messages
        hooks.insert(0, self._isp_hook)
        chunks = len(self.stages)
        order = schedule_order(kind, mesh.pipeline, chunks, micro_batches)
        rank_of = partial(kind.rank_of, ranks=mesh.pipeline, chunks=chunks)
        check_order(order, rank_of, mesh.pipeline * chunks)  # before anything runs (WP-2)
        self.actions = compute_actions(
            computations(order, mesh.pipeline_rank),
            [s.stage_index for s in stages],
            {s.stage_index: s.splits_backward for s in stages},
        )
        track = self._guard.messages.track if mesh.device.type == "cpu" else None
        self.tied = make_tied_weights(
            tied, self.stages, rank_of, mesh.pipeline * chunks, mesh, track
        )
        self.tied.equalize()

    @classmethod
    def create(
        cls,
        model: Any,
        mesh: ParallelMesh,
        config: WeightParallelConfig | None = None,
        *,
        sequence: SequenceConfig | None = None,
        schedule: str = "1F1B",
        chunks: int = 1,
        micro_batches: int,
        activation_checkpoint: ActivationCheckpointConfig | None = None,
        shape: tuple[int, int, int] | None = None,
        criterion: Criterion | None = None,
        router_scale: Callable[[], Tensor | float] | None = None,
        hooks: Iterable[SchedulerHook] = (),
        trace: Trace | None = None,
    ) -> Pipeline:
        """Partition ``model`` over ``mesh.pipeline`` ranks and attach communication. Collective.

        Args:
            model: a module with the attributes of a :class:`SplittableModel`, on any device, meta
                included; its modules move into the chunks.
            chunks: number of chunks on each rank.
            shape: shape of the hidden states ``[B, s, hidden]`` on this rank, the same for every
                micro-batch; ``None``: as many rows and tokens as the first micro-batch has, and
                the features of the embedding.
            criterion: computes the loss from the last chunk's output and the micro-batch; ``None``:
                that output is the loss.
            router_scale: returns by what the criterion multiplies a sum of token losses: the
                losses of routers are multiplied by it, too, on every stage.

        Raises:
            ConfigError: the numbers do not fit the schedule.
            StructureError: the model cannot be partitioned like this.
        """
        kind = schedule_kind(schedule)
        if mistake := kind.why_invalid(mesh.pipeline, chunks, micro_batches):
            raise ConfigError(mistake)
        if mesh.tensor > 1:  # messages between stages are made for one tensor rank
            raise ConfigError(
                f"a Pipeline on a mesh with {mesh.tensor} tensor ranks is not supported: make the "
                "mesh with tensor = 1 or pipeline = 1"
            )
        count = mesh.pipeline * chunks
        blocks = split_model(model, count)
        config = config or WeightParallelConfig()
        sequence = sequence or SequenceConfig()
        again = activation_checkpoint or ActivationCheckpointConfig()
        require_none(mistakes(config, sequence, again, ring=mesh.ring, pipeline=True))
        if mesh.expert > 1:
            from internsp.parallel.experts import take_experts

            take_experts(model, config, mesh.expert, mesh.expert_rank)
        require_patterns_match(model, config, mesh.shape)
        if router_scale is not None:
            for module in model.modules():
                if hasattr(module, "router_ranks"):
                    module.loss_scale = router_scale  # type: ignore[assignment]
        trace = trace or Trace()
        own = kind.stages_of(mesh.pipeline_rank, mesh.pipeline, chunks)
        all_hooks = list(hooks)
        width = embedding_width(model) if shape is None else shape[2]
        stages = []
        modules = [Chunk(model, part, s == 0, s == count - 1) for s, part in enumerate(blocks)]
        tied = find_tied(model, modules)
        copy_shared_modules([modules[stage] for stage in own])
        for index, stage in enumerate(own):
            module = modules[stage]
            weights, checkpoint = chunk_config(module, config, again)
            communicator = parallelize(
                module,
                mesh,
                weights,
                sequence=sequence,
                activation_checkpoint=checkpoint,
                trace=trace,
                split=kind.splits_backward_of(stage),
            )
            sharded = {id(weight.parameter) for weight in communicator.replicated.sharded}
            recomputed = any(unit.recomputed for unit in communicator.blocks)
            whole_blocks = weights.compile or checkpoint.tiles != 1 or recomputed
            named = config.compute_dtype
            hidden = DTYPES[named] if named is not None else next(module.parameters()).dtype
            form = partial(meta_stage_args, module, width, hidden)
            stages.append(
                ISPPipelineStage(
                    module,
                    stage,
                    count,
                    mesh.device,
                    chunk=index,
                    communicator=communicator,
                    hooks=all_hooks,
                    group=mesh.pipeline_group,
                    splits_backward=can_split_backward(module, sharded, whole_blocks),
                    form=form,
                )
            )
        ids_shape = None if shape is None else torch.Size(shape[:2])
        # A new tensor, since torch detaches the loss in place.
        criterion = criterion or (lambda output, batch: output * 1)
        return cls(kind, mesh, stages, micro_batches, all_hooks, criterion, ids_shape, tied)

    def step(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Forward and backward of all micro-batches. Collective; blocks.

        Args:
            batches: ``micro_batches`` of them or a multiple. With a multiple the schedule runs
                several times, one run after another, and gradients are summed over all runs.

        Returns:
            The losses of the micro-batches on the last stage, an empty list on other stages.

        Raises:
            CollectiveError: another rank failed; the message names its cause. The next call works
                if all ranks have failed, the ranks of each stage at the same point. Otherwise, and
                always on an accelerator, every later call raises, too.
            GradientError: a failed step has left a part of its gradients in ``.grad`` of a plain
                loop, and ``zero_grad()`` was not called. Nothing has run. (With a
                ``ZeroOptimizer``, ``ZeroOptimizer.step()`` raises instead if the failed step has
                dropped sums of earlier steps.)
            ValueError, TypeError: wrong number or type of ``batches``, or gradients are disabled.
                Every rank raises, a ``CollectiveError`` on ranks whose own arguments are right.
                Nothing has run, and the pipeline can be called again.
            OrderError: called from inside a step, by a hook or the criterion.
            StructureError: copies of a tied weight are not equal. Every rank raises, and nothing
                has run; see :meth:`equalize`.
        """
        losses: list[Tensor] = []
        with self._begin_step(batches, self.actions), self._unchanged(), self.tied.sum_gradients():
            for found in self._each_run(batches):
                self.schedule.step(target=self._targets(), losses=found, return_outputs=False)
                losses += [loss.detach() for loss in found]
        return losses

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Run the forwards only; arguments, results and errors as for :meth:`step`."""
        losses: list[Tensor] = []
        actions = [p for p in self.actions if not p.part]
        with self._begin_step(batches, actions), self._unchanged():
            for found in self._each_run(batches):
                self.schedule.eval(target=self._targets(), losses=found, return_outputs=False)
                losses += found
        return losses

    def _each_run(self, batches: Sequence[MicroBatch]) -> Iterator[list[Tensor]]:
        """For each run give its batches to the stages, and yield an empty list for its losses."""
        for first in range(0, len(batches), self.micro_batches):
            own = batches[first : first + self.micro_batches]
            for stage in self.stages:
                stage.batches, stage.more_runs = own, first + len(own) < len(batches)
            yield []

    def equalize(self) -> None:
        """Copy the first stage's values of tied weights to the other stages. Collective; blocks.

        Call it after writing (loading, editing) one copy and not the others.
        """
        if self._guard.running:
            raise OrderError(
                f"equalize() of a pipeline was called on rank {self.mesh.rank} inside a step: call "
                "it between two steps"
            )
        self.tied.equalize()

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Context in which unsharded weights in slots stay valid from action to action (WP-11)."""
        with ExitStack() as stack:
            for communicator in self.communicators:
                stack.enter_context(communicator.unchanged())
            yield

    def _targets(self) -> Tensor:
        """The targets that torch passes to the criterion: the index of each micro-batch."""
        return torch.arange(self.micro_batches)

    def planned(self, overlap: bool = True, runs: int = 1) -> Schedule:
        """This rank's gathers and reductions of one step, in order.

        Args:
            runs: how often the step runs the schedule.
        """
        plans = [communicator.plan for communicator in self.communicators]
        return simulate_with_launches([*self.actions] * runs, plans, overlap)[0]

    @property
    def stage_wait_seconds(self) -> float:
        """Seconds in which this rank ran no action in its last step, up to its last action.

        It waited for hidden states or gradients of other stages: the schedule's bubble, slower
        stages, and messages in flight. On a GPU reading the value blocks until the step ends.
        """
        return self.communicators[0].state.trace.seconds(self._isp_hook.bubbles)

    def _begin_step(
        self, batches: Sequence[MicroBatch], actions: Sequence[ComputeAction]
    ) -> PipelineRecovery:
        if self._guard.running:
            raise OrderError(
                f"step() or evaluate() of a pipeline was called on rank {self.mesh.rank} while it "
                "runs: hooks and the criterion must not do so; call it between steps"
            )
        self._guard.begin_step()
        mistake: Exception | None = None
        shape: torch.Size | None = None
        try:
            shape = self._check_batches(batches, any(action.part for action in actions))
        except (ValueError, TypeError, GradientError) as error:
            mistake = error
        runs = 0 if mistake else len(batches) // self.micro_batches
        with self._guard.step_consensus():
            refusing, differences, (least, most), shape = self._step_consensus(
                mistake is not None, runs, shape
            )
        if mistake is not None:
            raise mistake
        if differences:
            raise StructureError(
                f"copies of tied weights are not equal: {'; '.join(differences)} (this is rank "
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
        self._ids_shape = shape if any(shape) else None
        self._isp_hook.begin_step([*actions] * runs)
        for stage in self.stages:
            stage.group = self.mesh.pipeline_group
            stage.take_shape(shape)
        return self._guard

    def _reset_step(self) -> None:
        """Drop what a failed step has left in torch's objects and ours."""
        reset_schedule(self.schedule)
        self._isp_hook.reset_step()
        for stage in self.stages:
            stage.reset_step()

    def _step_consensus(
        self, mine: bool, runs: int, shape: torch.Size | None
    ) -> tuple[int, list[str], tuple[int, int], torch.Size]:
        """Agree with all ranks of the pipeline on running this step. Collective.

        No rank may wait in the step for one that refuses it (WP-10).

        Returns:
            A rank that cannot run it, or -1; a description of each tied weight with unequal copies,
            on all ranks if there is one on any; the least and the largest of the ranks' ``runs``;
            the shape of token ids, which ranks of later stages may not have.
        """
        rank = self.mesh.rank if mine else -1
        lead = torch.tensor([rank, runs, -runs, *(shape or (0, 0))], device=self.mesh.device)
        digest = self.tied.digest()
        packed = torch.cat([lead, digest.flatten()])
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=self.mesh.pipeline_group)
        differences = self.tied.differences(packed[5:].view_as(digest))
        # Read once at most. Ranks of a stage may have other lengths.
        shape = shape or torch.Size(packed[3:5].tolist())
        packed = torch.cat([packed[:3], packed.new_tensor([bool(differences)])])
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=self.mesh.stage_group)
        refusing, most, least, unequal = packed.tolist()
        if unequal and not differences:
            differences = ["those of other ranks of this stage"]
        return refusing, differences, (-least, most), shape

    def _check_batches(self, batches: Sequence[MicroBatch], training: bool) -> torch.Size | None:
        """Check number and shape, which stages' receive buffers fix; returns the ids' shape."""
        if training and not torch.is_grad_enabled():
            raise ValueError("a step needs gradients, but they are disabled here: use evaluate()")
        for communicator in self.communicators if training else ():
            communicator.placeholders.restore_grad()  # raises if a failed step has lost gradients
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
        if agreed is None and self.stages[0].is_first and self.stages[0].needs_shape:
            raise TypeError("the first input of a micro-batch of the first stage is its token ids")
        return agreed

    def _loss(self, output: Any, target: Tensor) -> Tensor:
        last = self.stages[-1]  # only the rank of the last stage has losses
        action = last.action(int(target))
        for hook in self.hooks:
            hook.before_criterion(action, output)
        loss = self.criterion(output, last.batches[int(target)])
        if torch.is_grad_enabled():
            require_loss(loss, output)
        for hook in self.hooks:
            hook.after_criterion(action, loss)
        return loss


def require_loss(loss: Any, output: Any) -> None:
    """Check what a criterion gave for the last chunk's ``output``, before its backward.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is not one number, of which torch's split backward would silently take the
            gradient of its sum; or it is cut from ``output``, and torch's stages would silently
            compute no gradient.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"a criterion returns a loss, a tensor of one element, but this one gave a "
            f"{type(loss).__name__}: return the tensor from which backward begins"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"a loss is one number, but the criterion gave {tuple(loss.shape)}: without labels "
            "the last chunk returns logits; give labels, or a criterion that sums"
        )
    if not loss.requires_grad and any(each.requires_grad for each in tensors(output)):
        raise ValueError(
            "the criterion gave a loss without a graph, so that nothing would be trained: compute "
            "it from the last chunk's output without detach(), item() and no_grad(); for a "
            "micro-batch that does not count return output.sum() * 0"
        )


def require_patterns_match(
    model: Any, config: WeightParallelConfig, shape: MeshShape
) -> None:
    """Require that every pattern of the configuration matches something in the model (WP-7).

    A pattern need not match in every chunk: :func:`chunk_config` leaves out those that do not.

    Raises:
        StructureError: a pattern matches nothing, or ``blocks`` leaves out some of
            ``model.layers``.
    """
    layers = [f"layers.{i}" for i in range(len(model.layers))]
    for pattern in config.blocks:
        if not any(matches(name, pattern) for name in layers):
            raise StructureError(
                f"weight_parallel.blocks: {pattern!r} matches none of layers.0 to {layers[-1]}: a "
                "pipeline is split between the blocks of model.layers; leave blocks empty, or set "
                '"layers.*"'
            )
    if config.blocks and not all(any(matches(n, p) for p in config.blocks) for n in layers):
        raise StructureError(
            f"weight_parallel.blocks = {list(config.blocks)} leaves out some of layers.0 to "
            f'{layers[-1]}, which are the blocks of a pipeline: leave it empty, or set "layers.*"'
        )
    # Before the structure is read, which would tell of a block without a trigger.
    require_triggers_matched(list(model.layers), config.gather_before_modules)
    parts = {"embed": model.embed, "layers": model.layers, "norm": model.norm, "head": model.head}
    names = [name for part, module in parts.items() for name, _ in module.named_parameters(part)]
    require_patterns_matched(names, config)
    first: dict[int, str] = {}  # of a block that stages share, the first name
    for name, layer in zip(layers, model.layers, strict=True):
        first.setdefault(id(layer), name)
    structure = read_structure(
        model, config.gather_before, tuple(first.values()), config.gather_before_modules,
        config.rules,
    )  # fmt: skip
    shardings = plan_sharding(model, structure, config, shape.expert)
    require_effect(shardings, structure, config, shape)
    if shape.separate:
        require_experts(names, config, structure.rules)


def chunk_config(
    chunk: Chunk, config: WeightParallelConfig, checkpoint: ActivationCheckpointConfig
) -> tuple[WeightParallelConfig, ActivationCheckpointConfig]:
    """The configuration for one chunk: its own block names, indices and matching patterns."""
    own = [name for name, _ in chunk.named_parameters()]
    update: dict[str, Any] = {  # patterns that match something in this chunk
        "blocks": chunk.block_names(),
        "gather_before_modules": tuple(
            trigger
            for trigger in config.gather_before_modules
            if trigger_matches(trigger, chunk.layers.values())
        ),
        "expert_parameters": tuple(
            p for p in config.expert_parameters if any(within(n, p) for n in own)
        ),
        "rules": rules_of_chunk(chunk, config.rules),
    }
    again: dict[str, Any] = {}
    if checkpoint.mode != "none":  # the chosen blocks say it all
        chosen = sorted(recomputed_blocks(checkpoint, chunk.total))
        local = tuple(i - chunk.blocks.start for i in chosen if i in chunk.blocks)
        again = {"blocks": local, "fraction": 1.0}
    return config.model_copy(update=update), checkpoint.model_copy(update=again)


def can_split_backward(chunk: nn.Module, sharded: set[int], whole_blocks: bool) -> bool:
    """Whether the chunk can run a weight backward by itself, without unsharded weights.

    Args:
        sharded: ``id`` of each sharded parameter.
        whole_blocks: a block recomputes its activations, is compiled or computes in tiles. torch
            would recompute a block once more for each of its weights; compiled and tiled blocks
            compute input and weight gradients together.
    """
    if whole_blocks:
        return False
    return all(
        isinstance(module, _SPLITTABLE_LAYERS)
        for module in chunk.modules()
        if any(id(p) in sharded for p in module.parameters(recurse=False))
    )


def embedding_width(model: SplittableModel) -> int:
    """Features of the hidden states, by the embedding of a token without values.

    Raises:
        ConfigError: it does not compute on the meta device.
    """
    held = {**dict(model.embed.named_parameters()), **dict(model.embed.named_buffers())}
    meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in held.items()}
    token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    try:
        hidden = torch.func.functional_call(model.embed, meta, (token,))
    except Exception as error:
        raise ConfigError(
            f"the width of hidden states is not known, as model.embed fails on the meta device "
            f"({error}): give Pipeline.create the shape [B, s, hidden]"
        ) from error
    return int(hidden.shape[-1])


def meta_stage_args(
    chunk: Chunk, width: int, dtype: torch.dtype, ids_shape: torch.Size
) -> dict[str, Any]:
    """A stage's inputs and outputs on the meta device, which replace torch's shape inference.

    Args:
        dtype: of hidden states between chunks, in which weights compute.
    """
    rows, length = ids_shape
    ids = torch.empty(ids_shape, dtype=torch.int64, device="meta")
    hidden = torch.empty(rows, length, width, dtype=dtype, device="meta", requires_grad=True)
    wide = torch.promote_types(dtype, torch.float32)
    loss = torch.empty((), dtype=wide, device="meta", requires_grad=True)
    return {
        "input_args": ids if chunk.first else hidden,
        "output_args": loss if chunk.last else hidden,
    }
