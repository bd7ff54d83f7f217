"""``internsp plan`` of a pipeline: each rank's chunks, gathers, reductions, memory, and a picture.

The order is read from torch's schedule objects and simulated before anything runs
(:func:`internsp.pipeline.simulate.check_order`), so that a printed plan is one that can run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from rich.table import Table
from torch import nn

from internsp.app.config import Config
from internsp.app.models.factory import build_model, device_type
from internsp.app.plan.classes import equal_ranks, ranges, table
from internsp.app.plan.configured import planned_shape
from internsp.app.plan.kinds import block_kinds
from internsp.base.sizes import human
from internsp.config.sections import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import ConfigError
from internsp.mesh import MeshShape
from internsp.parallel.experts import take_experts
from internsp.pipeline.chunks import Chunk, split_model
from internsp.pipeline.hooks import ComputeAction
from internsp.pipeline.picture import draw
from internsp.pipeline.pipeline import can_split_backward, chunk_config, require_patterns_match
from internsp.pipeline.schedules import (
    SCHEDULES,
    ScheduleKind,
    computations,
    schedule_kind,
    schedule_order,
)
from internsp.pipeline.simulate import (
    TimedAction,
    check_order,
    compute_actions,
    simulate_with_launches,
)
from internsp.pipeline.tied import CopyNames, TiedCopy, find_tied
from internsp.schedule.chunk import ChunkLayout, Schedule
from internsp.schedule.layout import ShardLayout, laid_out
from internsp.sp.dispatch import fixed_sizes
from internsp.structure.assign import ParameterSharding, plan_sharding
from internsp.structure.blocks import Structure, read_structure
from internsp.structure.dtypes import DTYPES
from internsp.structure.rules import Rules, match_rules
from internsp.structure.units import chunk_layout

_LONGEST_COMPARED = 2_000  # passes of blocks; the comparison plans the step a dozen times


@dataclass(frozen=True)
class ChunkOutline:
    """One chunk of the pipeline: its stage, blocks and shardings."""

    stage: int
    blocks: range
    plan: ChunkLayout
    shardings: tuple[ParameterSharding, ...]
    splits: bool
    recomputed: int
    """How many of its blocks recompute."""


@dataclass(frozen=True)
class RankPlan:
    """What one pipeline rank does in a step."""

    chunks: tuple[ChunkOutline, ...]
    actions: tuple[ComputeAction, ...]
    messages: int
    """Number of hidden states and gradients received from other stages."""
    overlap: bool

    @property
    def schedule(self) -> Schedule:
        """Its collectives."""
        return self._simulated[0]

    @property
    def launched(self) -> Sequence[tuple[int, int]]:
        """Number of gathers and of reductions in each pass."""
        return self._simulated[1]

    @cached_property
    def _simulated(self) -> tuple[Schedule, list[tuple[int, int]]]:
        """When first asked: memory is planned without, and takes a fifth of the time."""
        plans = [chunk.plan for chunk in self.chunks]
        return simulate_with_launches(self.actions, plans, self.overlap)


@dataclass(frozen=True)
class TiedOutline:
    """A weight that several stages share.

    Attributes:
        copies: ``NAME of stage N``, ascending.
        nbytes: bytes that a rank with a copy receives once a step: the other ranks' gradient sums.
    """

    name: str
    copies: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class PipelinePlan:
    """A step of all ranks of a pipeline."""

    kind: ScheduleKind
    shape: MeshShape
    micro_batches: int
    timed: tuple[TimedAction, ...]
    ranks: tuple[RankPlan, ...]
    message_bytes: int
    """Bytes of one micro-batch's hidden states on one rank."""
    parameters: int
    """Elements of the whole model."""
    kinds: tuple[int, ...]
    """Of each block, the first one of its kind."""
    tied: tuple[TiedOutline, ...]
    rules: Rules

    def picture(self) -> str:
        """The schedule as SVG."""
        launched = {}
        for rank in self.ranks:
            for action, counts in zip(rank.actions, rank.launched, strict=True):
                for kind in {"": "F", "full": "BIW", "input": "I", "weight": "W"}[action.part]:
                    launched[action.stage, kind, action.micro_batch] = counts
            for chunk in rank.chunks:  # without a split backward, the other part is empty
                empty = "I" if chunk.stage == 0 else "W" if not chunk.splits else ""
                for number in range(self.micro_batches if empty else 0):
                    launched[chunk.stage, empty, number] = (0, 0)
        return draw(self.timed, launched, f"{self.kind.name}, {self.micro_batches} micro-batches")


def make_pipeline_plan(config: Config, world_size: int) -> PipelinePlan:
    """Plan a step of ``config`` on ``world_size`` ranks. Needs no process group and no memory.

    Raises:
        ConfigError: degrees, chunks or micro-batches that do not fit.
        OrderError: the schedule's order would deadlock.
    """
    shape = planned_shape(config, world_size)
    return plan_of(config, shape, schedule_kind(config.pipeline.schedule), config.pipeline.chunks)


def plan_of(config: Config, shape: MeshShape, kind: ScheduleKind, chunks: int) -> PipelinePlan:
    """:func:`make_pipeline_plan` for a schedule other than the configured one."""
    number = config.train.micro_batches
    if mistake := kind.why_invalid(shape.pipeline, chunks, number):
        raise ConfigError(mistake)
    order = schedule_order(kind, shape.pipeline, chunks, number)
    rank_of = partial(kind.rank_of, ranks=shape.pipeline, chunks=chunks)
    timed = check_order(order, rank_of, shape.pipeline * chunks)
    ranks = []
    model: Any = build_model(config)  # from the model zoo: other models have no pipeline
    parameters = sum(p.numel() for p in model.parameters())
    kinds, rules = block_kinds(config, model), match_rules(model, config.weight_parallel.rules)
    outlines, ties = _outlines(config, shape, kind, model, shape.pipeline * chunks)
    for rank in range(shape.pipeline):
        stages = kind.stages_of(rank, shape.pipeline, chunks)
        own = tuple(outlines[stage] for stage in stages)
        splits = {chunk.stage: chunk.splits for chunk in own}
        passed = compute_actions(computations(order, rank), stages, splits)
        messages = sum(step.kind.startswith("RECV") for step in order[rank])
        ranks.append(RankPlan(own, tuple(passed), messages, config.weight_parallel.overlap))
    nbytes = message_bytes(config, shape, config.data.sequence_length)
    tied = tuple(_tied(name, tie, outlines, shape, rank_of) for name, tie in ties.items())
    return PipelinePlan(
        kind, shape, number, tuple(timed), tuple(ranks), nbytes, parameters, kinds, tied, rules
    )


def _tied(
    name: str,
    tie: CopyNames,
    outlines: Sequence[ChunkOutline],
    shape: MeshShape,
    rank_of: Callable[[int], int],
) -> TiedOutline:
    """Ranks send slices of the ``ZeroOptimizer``, and one element: whether there is a gradient."""
    first, own = next(iter(tie.items()))
    sharding = next(a for a in outlines[first].shardings if own in {o.full_name for o in a.owners})
    axis = shape.experts if sharding.expert else shape.dense
    elements = math.prod(sharding.shape)
    if sharding.unit is not None:
        elements = ShardLayout.create(sharding.shape, sharding.dim, axis.size).shard_numel
    _, length = laid_out([elements], sharding.parameter.itemsize, axis.zero)
    others = len({rank_of(stage) for stage in tie}) - 1
    wide = torch.promote_types(sharding.parameter.dtype, torch.float32).itemsize
    copies = tuple(str(TiedCopy(stage, rank_of(stage), n)) for stage, n in tie.items())
    return TiedOutline(name, copies, others * (length + 1) * wide)


def message_bytes(config: Config, shape: MeshShape, sequence_length: int) -> int:
    """Bytes of hidden states ``[rows, s, hidden]`` of the longest shard of a sequence."""
    train = config.train
    rows = train.global_batch // (train.micro_batches * shape.data)
    length = max(fixed_sizes(sequence_length, shape.sequence_axes))
    dtype = DTYPES[config.weight_parallel.compute_dtype or train.dtype]
    return rows * length * config.model.hidden_size * dtype.itemsize


def sharded(
    config: Config, shape: MeshShape, module: nn.Module, weights: WeightParallelConfig,
    checkpoint: ActivationCheckpointConfig, split: bool = False,
) -> tuple[Structure, tuple[ParameterSharding, ...], ChunkLayout]:  # fmt: skip
    """How a model, or a pipeline's chunk with settings of its own, is found, sharded and run.

    Args:
        split: its backward has two parts.
    """
    structure = read_structure(
        module, weights.gather_before, weights.blocks, weights.gather_before_modules, weights.rules
    )
    shardings = plan_sharding(module, structure, weights, shape.expert)
    again, device = set(checkpoint.selected(structure.layers)), device_type(config)
    layout = chunk_layout(shardings, structure, weights, shape, again, split, device)
    return structure, tuple(shardings), layout


def _outlines(
    config: Config, shape: MeshShape, kind: ScheduleKind, model: Any, stages: int
) -> tuple[list[ChunkOutline], dict[str, CopyNames]]:
    """The chunks of a model, and what they share."""
    take_experts(model, config.weight_parallel, shape.expert, 0)
    require_patterns_match(model, config.weight_parallel, shape)
    found = []
    parts = split_model(model, stages)
    chunks = [Chunk(model, part, s == 0, s == stages - 1) for s, part in enumerate(parts)]
    for stage, (blocks, chunk) in enumerate(zip(parts, chunks, strict=True)):
        weights, checkpoint = chunk_config(
            chunk, config.weight_parallel, config.activation_checkpoint
        )
        split = kind.splits_backward_of(stage)
        _, shardings, plan = sharded(config, shape, chunk, weights, checkpoint, split)
        again = len(checkpoint.selected(len(blocks)))
        cut = {id(a.parameter) for a in shardings if a.unit is not None}
        splits = can_split_backward(chunk, cut, bool(again) or weights.compile)
        found.append(ChunkOutline(stage, blocks, plan, shardings, splits, again))
    return found, find_tied(model, chunks)


def tables(config: Config, plan: PipelinePlan) -> list[Table]:
    """Tables to print: what each rank holds and launches, and a comparison with other schedules."""
    title = f"{plan.kind.name}: chunks, and collectives of a step with the payload a rank receives"
    columns = ("pipeline rank", "stage", "blocks", "slots", "gathers", "reductions", "messages")
    rows = []
    same = equal_ranks([(_grouping_key(each), each.messages) for each in plan.ranks])
    for ranks in same.values():
        each = plan.ranks[ranks[0]]
        alike = [plan.ranks[rank].chunks for rank in ranks]
        row = (
            ranges(ranks),
            "\n".join(ranges([c[i].stage for c in alike]) for i in range(len(each.chunks))),
            "\n".join(_blocks_label([c[i].blocks for c in alike]) for i in range(len(each.chunks))),
            "\n".join(str(chunk.plan.policy.slots) for chunk in each.chunks),
            *(f"{each.schedule.count(k)}\n{human(each.schedule.nbytes(k))}" for k in ("AG", "RS")),
            f"{each.messages}\n{human(each.messages * plan.message_bytes)}",
        )
        rows.append(row)
    found = [table(title, columns, rows)]
    if plan.tied:
        title = "Weights of several stages, whose gradients are summed once a step"
        rows = [(t.name, "\n".join(t.copies), human(t.nbytes)) for t in plan.tied]
        found.append(table(title, ("<weight", "<copies", "a rank receives"), rows))
    if config.model.layers * plan.micro_batches <= _LONGEST_COMPARED:
        found.append(_comparison(config, plan))
    return found


def _grouping_key(rank: RankPlan) -> tuple[object, ...]:
    """What the table shows of a rank in addition to its stages and blocks."""
    counts = [(rank.schedule.count(kind), rank.schedule.nbytes(kind)) for kind in ("AG", "RS")]
    chunks = [(len(chunk.blocks), chunk.plan.policy.slots) for chunk in rank.chunks]
    return (*counts, *chunks)


def _blocks_label(blocks: list[range]) -> str:
    """``4-7``; for several ranks ``4-15, 4 each`` (in a V schedule the stages may count down)."""
    first, last = min(b.start for b in blocks), max(b.stop for b in blocks) - 1
    return f"{first}-{last}" + (f", {len(blocks[0])} each" if len(blocks) > 1 else "")


def _comparison(config: Config, plan: PipelinePlan) -> Table:
    """Gathers of the busiest rank under each schedule that the degrees and numbers allow."""
    columns = ("<schedule", "chunks", "weights re-gathered", "blocks kept", "time, forwards")
    rows = []
    for kind in SCHEDULES.values():
        chunks = kind.chunks or max(2, config.pipeline.chunks)
        counts = []
        for keep in (None, "all"):
            weights = config.weight_parallel.model_copy(update={"keep_unsharded": keep})
            changed = config.model_copy(update={"weight_parallel": weights})
            try:
                other = plan_of(changed, plan.shape, kind, chunks)
            except ValueError:  # too few blocks or micro-batches for this one
                break
            counts.append(max(rank.schedule.count("AG") for rank in other.ranks))
        if len(counts) == 2:
            time = max(t.end for t in other.timed) / chunks
            rows.append((kind.name, chunks, *counts, f"{time:g}"))
    return table("Gathers of a step by schedule, busiest rank", columns, rows)


def schedule_lines(plan: PipelinePlan) -> Iterator[str]:
    """Every rank's actions, a pass on a line."""
    for number, rank in enumerate(plan.ranks):
        count = len(rank.schedule.actions)
        yield f"Schedule of one step, pipeline rank {number} ({count} actions)"
        for action, (gathers, reductions) in zip(rank.actions, rank.launched, strict=True):
            what = f"backward ({action.part})" if action.part else "forward"
            yield (
                f"  stage {action.stage} micro-batch {action.micro_batch} {what:<18} "
                f"{gathers} gathers, {reductions} reductions"
            )
