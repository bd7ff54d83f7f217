"""A planned step: its schedule, the bytes of its collectives, and memory; runs nothing.

A step without a pipeline is a pipeline of one stage. The model is built on the meta device, so that
a plan of any size takes a second and no memory. The order of a pipeline is read from torch's
schedule objects and simulated (:func:`internsp.pipeline.simulate.check_order`), so that a printed
plan is one that can run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from internsp.app.config import Config
from internsp.app.models.factory import build_model, device_type
from internsp.app.plan.configured import planned_shape
from internsp.app.plan.rank import ChunkOutline, RankPlan
from internsp.config.sections import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import ConfigError
from internsp.mesh import MeshShape
from internsp.parallel.experts import take_experts
from internsp.pipeline.chunks import Chunk, split_model
from internsp.pipeline.pipeline import can_split_backward, chunk_config, require_patterns_match
from internsp.pipeline.schedules import (
    Order,
    ScheduleKind,
    computations,
    schedule_kind,
    schedule_order,
)
from internsp.pipeline.simulate import TimedAction, check_order, compute_actions
from internsp.pipeline.tied import CopyNames, TiedCopy, find_tied
from internsp.schedule.chunk import ChunkLayout
from internsp.schedule.layout import ShardLayout, laid_out
from internsp.sp.dispatch import fixed_sizes
from internsp.structure.assign import plan_sharding, require_patterns_matched
from internsp.structure.blocks import read_structure
from internsp.structure.dtypes import DTYPES
from internsp.structure.rules import Rules, match_rules
from internsp.structure.units import chunk_layout

_LONGEST_STEP = 20_000  # micro-batches x blocks that are simulated within a minute


def block_kinds(config: Config, model: Any) -> tuple[int, ...]:
    """For each block, the first one of its kind, which has the same modules and shapes.

    Later blocks may differ from the first, as experts do from what is dense. Blocks of
    transformers' models are taken to be of one kind.

    Args:
        model: that of the configuration.
    """
    if config.model.family == "hf":
        return (0,) * config.model.layers
    first: dict[object, int] = {}
    kinds = []
    for number, block in enumerate(model.layers):
        modules = tuple((name, type(module)) for name, module in block.named_modules())
        weights = tuple((name, weight.shape) for name, weight in block.named_parameters())
        kinds.append(first.setdefault((modules, weights), number))
    return tuple(kinds)


def shown_kinds(kinds: Sequence[int]) -> tuple[int, ...]:
    """Those of a step that stands for one of blocks of these kinds: each of them once, the last
    block's at the end, and two at least."""
    found = tuple(dict.fromkeys(reversed(kinds)))[::-1]
    return found if len(found) > 1 else 2 * found


@dataclass(frozen=True)
class Plan:
    """A step as it will run, of all pipeline ranks.

    Attributes:
        order: computations and messages of every pipeline rank.
        timed: its computations, where a forward takes 1.
        ranks: of the pipeline; one without a pipeline.
        parameters: elements of the whole model.
        kinds: of each block, the first one of its kind.
        tied: weights that several stages share: the name, ``NAME of stage N`` of each copy, and
            bytes that a rank with a copy receives once a step: the other ranks' gradient sums.
    """

    config: Config
    shape: MeshShape
    kind: ScheduleKind
    order: Order
    timed: tuple[TimedAction, ...]
    ranks: tuple[RankPlan, ...]
    parameters: int
    kinds: tuple[int, ...]
    tied: tuple[tuple[str, tuple[str, ...], int], ...]
    rules: Rules

    @property
    def chunk(self) -> ChunkLayout:
        """The whole model's, without a pipeline."""
        return self.ranks[0].chunks[0].plan


def make_plan(config: Config, world_size: int) -> Plan:
    """Plan a step of ``config`` on ``world_size`` ranks. Needs no process group and no memory.

    Raises:
        ConfigError: degrees, chunks or micro-batches that do not fit; lists all mistakes.
        OrderError: the schedule's order would deadlock.
    """
    shape = planned_shape(config, world_size)
    if shape.pipeline == 1:  # whatever the schedule
        return plan_of(config, shape, schedule_kind("1F1B"), 1)
    return plan_of(config, shape, schedule_kind(config.pipeline.schedule), config.pipeline.chunks)


def plan_of(config: Config, shape: MeshShape, kind: ScheduleKind, chunks: int) -> Plan:
    """:func:`make_plan` for a schedule other than the configured one."""
    number = config.train.micro_batches
    if mistake := kind.why_invalid(shape.pipeline, chunks, number):
        raise ConfigError(mistake)
    order = schedule_order(kind, shape.pipeline, chunks, number)
    rank_of = partial(kind.rank_of, ranks=shape.pipeline, chunks=chunks)
    timed = check_order(order, rank_of, shape.pipeline * chunks)
    model: Any = build_model(config)
    parameters = sum(p.numel() for p in model.parameters())
    kinds, rules = block_kinds(config, model), match_rules(model, config.weight_parallel.rules)
    outlines, ties = _outlines(config, shape, kind, model, shape.pipeline * chunks)
    ranks = []
    for rank in range(shape.pipeline):
        stages = kind.stages_of(rank, shape.pipeline, chunks)
        own = tuple(outlines[stage] for stage in stages)
        splits = {chunk.stage: chunk.splits for chunk in own}
        passed = compute_actions(computations(order, rank), stages, splits)
        messages = sum(step.kind.startswith("RECV") for step in order[rank])
        ranks.append(RankPlan(config, shape, own, tuple(passed), messages))
    tied = tuple(_tied(name, tie, outlines, shape, rank_of) for name, tie in ties.items())
    return Plan(
        config, shape, kind, order, tuple(timed), tuple(ranks), parameters, kinds, tied, rules
    )


def _tied(
    name: str,
    tie: CopyNames,
    outlines: Sequence[ChunkOutline],
    shape: MeshShape,
    rank_of: Callable[[int], int],
) -> tuple[str, tuple[str, ...], int]:
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
    return name, copies, others * (length + 1) * wide


def message_bytes(config: Config, shape: MeshShape, sequence_length: int) -> int:
    """Bytes of hidden states ``[rows, s, hidden]`` of the longest shard of a sequence."""
    train = config.train
    rows = train.global_batch // (train.micro_batches * shape.data)
    length = max(fixed_sizes(sequence_length, shape.sequence_axes))
    dtype = DTYPES[config.weight_parallel.compute_dtype or train.dtype]
    return rows * length * config.model.hidden_size * dtype.itemsize


def _outlines(
    config: Config, shape: MeshShape, kind: ScheduleKind, model: Any, stages: int
) -> tuple[list[ChunkOutline], dict[str, CopyNames]]:
    """The chunks of a model, or the whole of it, and what they share."""
    weights, checkpoint = config.weight_parallel, config.activation_checkpoint
    take_experts(model, weights, shape.expert, 0)
    if shape.pipeline == 1:
        require_patterns_matched((name for name, _ in model.named_parameters()), weights)
        blocks = range(config.model.layers)
        return [_outline(config, shape, 0, blocks, model, weights, checkpoint)], {}
    require_patterns_match(model, weights, shape)
    parts = split_model(model, stages)  # of the zoo: other models have no pipeline
    chunks = [Chunk(model, part, s == 0, s == stages - 1) for s, part in enumerate(parts)]
    found = [
        _outline(
            config, shape, stage, parts[stage], chunk, *chunk_config(chunk, weights, checkpoint),
            kind.splits_backward_of(stage),
        )
        for stage, chunk in enumerate(chunks)
    ]  # fmt: skip
    return found, find_tied(model, chunks)


def _outline(
    config: Config, shape: MeshShape, stage: int, blocks: range, module: nn.Module,
    weights: WeightParallelConfig, checkpoint: ActivationCheckpointConfig, split: bool = False,
) -> ChunkOutline:  # fmt: skip
    """A chunk with settings of its own.

    Args:
        split: its backward may have two parts.
    """
    structure = read_structure(
        module, weights.gather_before, weights.blocks, weights.gather_before_modules, weights.rules
    )
    shardings = plan_sharding(module, structure, weights, shape.expert)
    again, device = set(checkpoint.selected(structure.layers)), device_type(config)
    layout = chunk_layout(shardings, structure, weights, shape, again, split, device)
    cut = {id(a.parameter) for a in shardings if a.unit is not None}
    splits = can_split_backward(module, cut, bool(again) or weights.compile)
    return ChunkOutline(stage, blocks, layout, tuple(shardings), splits, len(again))


def check_length(config: Config) -> None:
    """Refuse steps that take too long to simulate: some milliseconds a block and micro-batch."""
    layers, number = config.model.layers, config.train.micro_batches
    if layers * number > _LONGEST_STEP:
        raise ConfigError(
            f"train.micro_batches: {number} micro-batches x {layers} blocks are too many to plan "
            f"one by one (at most {_LONGEST_STEP}); plan fewer micro-batches, since one is as the "
            "other after the first few"
        )
