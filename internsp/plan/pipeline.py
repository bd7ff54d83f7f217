"""``internsp plan`` of a pipeline: each rank's chunks, gathers, reductions and memory; a picture.

The order is read from torch's schedule objects and played before anything runs
(:func:`internsp.pipeline.plan.check`), so that a plan that is printed is one that can run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from internsp.config import Config
from internsp.config.sizes import human
from internsp.errors import ConfigError
from internsp.factory import build_model, device_type
from internsp.mesh import MeshShape
from internsp.pipeline.chunks import Chunk, split
from internsp.pipeline.hooks import ComputeAction
from internsp.pipeline.picture import draw
from internsp.pipeline.pipeline import local_config, require_patterns, splittable
from internsp.pipeline.plan import Timed, check, passes, simulate_each, simulate_passes
from internsp.pipeline.schedules import SCHEDULES, ScheduleKind, actions, computations, kind_of
from internsp.pipeline.tied import Place, Tie, shared_by
from internsp.plan.assign import Assignment, assign
from internsp.plan.blocks import read
from internsp.plan.chunk import ChunkPlan, Schedule
from internsp.plan.classes import FEW_PASSES, classes, ranks_label, table
from internsp.plan.dtypes import DTYPES
from internsp.plan.kept import KeptBlocks
from internsp.plan.repeats import Item, folded_lines, ranges
from internsp.plan.units import chunk_plan
from internsp.sp.dispatch import fixed_sizes
from internsp.wp.layout import ShardLayout, laid_out

_LONGEST_COMPARED = 2_000  # passes of a block; the comparison plans the step a dozen times


@dataclass(frozen=True)
class ChunkOutline:
    """One chunk as the plan sees it."""

    stage: int
    blocks: range
    plan: ChunkPlan
    assignments: tuple[Assignment, ...]
    splits: bool
    again: int
    """Blocks that recompute."""


@dataclass(frozen=True)
class RankPlan:
    """What the ranks of one pipeline rank do in a step."""

    chunks: tuple[ChunkOutline, ...]
    actions: tuple[ComputeAction, ...]
    launched: tuple[tuple[int, int], ...]
    """Gathers and reductions of each pass."""
    schedule: Schedule
    messages: int
    """Hidden states and their gradients that come from other stages."""

    def kept(self, overlap: bool) -> KeptBlocks:
        """What blocks that stay unsharded cost and save: simulates a step without them."""
        plans = [chunk.plan for chunk in self.chunks]
        again = partial(simulate_passes, self.actions, overlap=overlap)
        return KeptBlocks.of(plans, self.schedule, again)


@dataclass(frozen=True)
class TiedOutline:
    """A weight that several stages have.

    Attributes:
        places: ``NAME of stage N``, ascending.
        nbytes: that a rank with a copy receives once a step: of each other pipeline rank's sum.
    """

    name: str
    places: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class PipelinePlan:
    """A step of the whole pipeline."""

    kind: ScheduleKind
    shape: MeshShape
    micro_batches: int
    timed: tuple[Timed, ...]
    ranks: tuple[RankPlan, ...]
    message_bytes: int
    """Of one micro-batch's hidden states on one rank."""
    tied: tuple[TiedOutline, ...] = ()

    def picture(self) -> str:
        """The schedule as SVG."""
        launched = {}
        for rank in self.ranks:
            for action, counts in zip(rank.actions, rank.launched, strict=True):
                for kind in {"": "F", "full": "BIW", "input": "I", "weight": "W"}[action.part]:
                    launched[action.stage, kind, action.micro_batch] = counts
            for chunk in rank.chunks:  # where both gradients come at once, the other part is empty
                empty = "I" if chunk.stage == 0 else "W" if not chunk.splits else ""
                for number in range(self.micro_batches if empty else 0):
                    launched[chunk.stage, empty, number] = (0, 0)
        return draw(self.timed, launched, f"{self.kind.name}, {self.micro_batches} micro-batches")


def make_pipeline_plan(config: Config, world_size: int) -> PipelinePlan:
    """What ``config`` will do on ``world_size`` ranks. Pure: no process group, no memory.

    Raises:
        ConfigError: degrees, chunks or micro-batches that do not fit.
        OrderError: the schedule's own order could not run.
    """
    mistakes = config.check(world_size)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    shape = MeshShape(world_size, **config.degrees())
    return plan_of(config, shape, kind_of(config.pipeline.schedule), config.pipeline.chunks)


def plan_of(config: Config, shape: MeshShape, kind: ScheduleKind, chunks: int) -> PipelinePlan:
    """:func:`make_pipeline_plan` for a schedule other than the configured one."""
    number = config.train.micro_batches
    if mistake := kind.mistake(shape.pipeline, chunks, number):
        raise ConfigError(mistake)
    order = actions(kind, shape.pipeline, chunks, number)
    rank_of = partial(kind.rank_of, ranks=shape.pipeline, chunks=chunks)
    timed = check(order, rank_of, shape.pipeline * chunks)
    ranks = []
    outlines, ties = _outlines(config, shape, kind, shape.pipeline * chunks)
    for rank in range(shape.pipeline):
        stages = kind.stages_of(rank, shape.pipeline, chunks)
        own = tuple(outlines[stage] for stage in stages)
        splits = {chunk.stage: chunk.splits for chunk in own}
        passed = passes(computations(order, rank), stages, splits)
        overlap = config.weight_parallel.overlap
        plans = [chunk.plan for chunk in own]
        schedule, launched = simulate_each(passed, plans, overlap)
        messages = sum(step.kind.startswith("RECV") for step in order[rank])
        launches = tuple(launched)
        ranks.append(RankPlan(own, tuple(passed), launches, schedule, messages))
    nbytes = message_bytes(config, shape)
    tied = tuple(_tied(name, tie, outlines, shape, rank_of) for name, tie in ties.items())
    return PipelinePlan(kind, shape, number, tuple(timed), tuple(ranks), nbytes, tied)


def _tied(
    name: str,
    tie: Tie,
    outlines: Sequence[ChunkOutline],
    shape: MeshShape,
    rank_of: Callable[[int], int],
) -> TiedOutline:
    """Slices of the ``ZeroOptimizer`` travel, and one element that says whether there is a sum."""
    first, own = next(iter(tie.items()))
    held = next(a for a in outlines[first].assignments if own in {o.full_name for o in a.owners})
    axis = shape.experts if held.expert else shape.dense
    elements = math.prod(held.shape)
    if held.unit is not None:
        elements = ShardLayout.create(held.shape, held.dim, axis.size).shard_numel
    _, length = laid_out([elements], held.parameter.itemsize, axis.zero)
    others = len({rank_of(stage) for stage in tie}) - 1
    wide = torch.promote_types(held.parameter.dtype, torch.float32).itemsize
    places = tuple(str(Place(stage, rank_of(stage), n)) for stage, n in tie.items())
    return TiedOutline(name, places, others * (length + 1) * wide)


def message_bytes(config: Config, shape: MeshShape) -> int:
    """Hidden states ``[rows, s, hidden]`` of the longest part of a sequence."""
    train = config.train
    rows = train.global_batch // (train.micro_batches * shape.data)
    length = max(fixed_sizes(config.data.sequence_length, shape.sequence_axes))
    dtype = DTYPES[config.weight_parallel.compute_dtype or train.dtype]
    return rows * length * config.model.hidden_size * dtype.itemsize


def _outlines(
    config: Config, shape: MeshShape, kind: ScheduleKind, stages: int
) -> tuple[list[ChunkOutline], dict[str, Tie]]:
    model: Any = build_model(config)  # of the zoo: others have no pipeline
    require_patterns(model, config.weight_parallel, shape)
    found = []
    parts = split(model, stages)
    chunks = [Chunk(model, part, s == 0, s == stages - 1) for s, part in enumerate(parts)]
    for stage, (blocks, chunk) in enumerate(zip(parts, chunks, strict=True)):
        weights, checkpoint = local_config(
            chunk, config.weight_parallel, config.activation_checkpoint
        )
        structure = read(
            chunk, weights.trigger, weights.blocks, weights.prefetch_triggers, weights.plan
        )
        assignments = assign(chunk, structure, weights, shape.expert)
        again = set(checkpoint.selected(len(blocks))) if checkpoint is not None else set()
        plan = chunk_plan(
            assignments,
            structure,
            weights,
            shape,
            again,
            kind.splits(stage),
            device_type(config),
        )
        cut = {id(a.parameter) for a in assignments if a.unit is not None}
        splits = splittable(chunk, cut, bool(again) or weights.compile)
        found.append(ChunkOutline(stage, blocks, plan, tuple(assignments), splits, len(again)))
    return found, shared_by(model, chunks)


def tables(config: Config, plan: PipelinePlan) -> list[Table]:
    """For a person: what each rank holds and launches, and other schedules beside this one."""
    title = f"{plan.kind.name}: chunks, and collectives of a step with the payload a rank receives"
    columns = ("pipeline rank", "stage", "blocks", "slots", "gathers", "reductions", "messages")
    rows = []
    same = classes([(_sizes(each), each.messages) for each in plan.ranks])
    for ranks in same.values():
        each = plan.ranks[ranks[0]]
        alike = [plan.ranks[rank].chunks for rank in ranks]
        row = (
            ranges(ranks),
            "\n".join(ranges([c[i].stage for c in alike]) for i in range(len(each.chunks))),
            "\n".join(_blocks([c[i].blocks for c in alike]) for i in range(len(each.chunks))),
            "\n".join(str(chunk.plan.policy.slots) for chunk in each.chunks),
            *(f"{each.schedule.count(k)}\n{human(each.schedule.nbytes(k))}" for k in ("AG", "RS")),
            f"{each.messages}\n{human(each.messages * plan.message_bytes)}",
        )
        rows.append(row)
    found = [table(title, columns, rows)]
    if plan.tied:
        title = "Weights of several stages, whose gradients are summed once a step"
        rows = [(t.name, "\n".join(t.places), human(t.nbytes)) for t in plan.tied]
        found.append(table(title, ("<weight", "<copies", "a rank receives"), rows))
    if config.model.layers * plan.micro_batches <= _LONGEST_COMPARED:
        found.append(_comparison(config, plan))
    return found


def _sizes(rank: RankPlan) -> tuple[object, ...]:
    """What the table says of a rank, beside which stages and blocks are its own."""
    counts = [(rank.schedule.count(kind), rank.schedule.nbytes(kind)) for kind in ("AG", "RS")]
    chunks = [(len(chunk.blocks), chunk.plan.policy.slots) for chunk in rank.chunks]
    return (*counts, *chunks)


def _blocks(blocks: list[range]) -> str:
    """``4-7``; of several ranks ``4-15, 4 each`` (in a V the stages may count down)."""
    first, last = min(b.start for b in blocks), max(b.stop for b in blocks) - 1
    return f"{first}-{last}" + (f", {len(blocks[0])} each" if len(blocks) > 1 else "")


def _comparison(config: Config, plan: PipelinePlan) -> Table:
    """Gathers of the busiest rank under each schedule that these numbers allow."""
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


def print_schedules(plan: PipelinePlan, console: Console) -> None:
    """Every rank's actions, pass by pass; of long ones what repeats once, ranks alike together."""
    short = sum(len(rank.actions) for rank in plan.ranks) <= FEW_PASSES
    bodies = [_pass_lines(rank, short) for rank in plan.ranks]
    for ranks in classes([(tuple(lines), _sizes(plan.ranks[r])) for r, lines in enumerate(bodies)]
                         ).values():  # fmt: skip
        count = len(plan.ranks[ranks[0]].schedule.actions)
        console.print(f"[bold]Schedule of one step, {ranks_label(ranks)}[/bold] ({count} actions)")
        alike = [plan.ranks[rank].chunks for rank in ranks]
        stages = [ranges([chunks[i].stage for chunks in alike]) for i in range(len(alike[0]))]
        for line in bodies[ranks[0]]:
            told = line
            for number, stage in enumerate(stages):
                told = told.replace(f"<{number}>", stage)
            console.print(f"  {told}", markup=False)


def _pass_lines(rank: RankPlan, short: bool) -> list[str]:
    """One pass a line, with ``<chunk>`` in place of its stage."""
    items: list[Item] = []
    text: dict[Hashable, str] = {}
    for action, (gathers, reductions) in zip(rank.actions, rank.launched, strict=True):
        what = f"backward ({action.part})" if action.part else "forward"
        key = (action.chunk, what, gathers, reductions)
        text[key] = (
            f"stage <{action.chunk}> micro-batch {{}} {what:<18} "
            f"{gathers} gathers, {reductions} reductions"
        )
        items.append(Item(key, action.micro_batch))
    if short:
        return [text[item.key].format(item.number) for item in items]
    return folded_lines(items, text)
