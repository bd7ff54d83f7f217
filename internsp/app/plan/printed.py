"""``internsp plan``: mesh, schedule of one step, bytes of each collective and memory; runs nothing.

The model is built on the meta device, so that a plan of any size takes a second and no memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from internsp.app.config import Config
from internsp.app.config.sizes import moments
from internsp.app.models.factory import build_model, device_type
from internsp.app.plan.classes import memory_by_rank, print_mesh, rules_lines, schedule_lines, table
from internsp.app.plan.matrices import MatrixTraffic
from internsp.app.plan.offloaded import (
    COPIED,
    WRITTEN,
    OffloadedMemory,
    exchange_buffer_bytes,
    with_sums,
)
from internsp.app.plan.pipeline import (
    PipelinePlan,
    RankPlan,
    make_pipeline_plan,
    print_schedules,
    tables,
)
from internsp.app.plan.sequences import SequenceTraffic, head_exchange_lines
from internsp.app.process import terminal
from internsp.base.host import GRADIENTS, OPTIMIZER, WEIGHTS
from internsp.base.sizes import human
from internsp.errors import ConfigError
from internsp.mesh import MeshShape
from internsp.pipeline.schedules import schedule_kind
from internsp.schedule.chunk import ChunkLayout, Schedule
from internsp.schedule.simulate import simulate
from internsp.structure.assign import ParameterSharding, plan_sharding, require_patterns_matched
from internsp.structure.blocks import read_structure
from internsp.structure.dtypes import DTYPES
from internsp.structure.kept import KeptBlocks
from internsp.structure.rules import Rules, match_rules
from internsp.structure.units import chunk_layout
from internsp.wp.encode import encoder_bytes

_LONGEST_STEP = 20_000  # micro-batches x blocks that are simulated within a minute
_ENTRY_BYTES = 400  # of a tensor's entry in a checkpoint file, with its number of steps
_RANDOM_BYTES = 1 << 14  # random states of a rank

_KINDS = {
    "AG": "weight gather",
    "WAIT": "wait",
    "USE": "use of an unsharded weight",
    "FREE": "free",
    "RS": "gradient reduction",
    "FINISH": "finish into the shard",
    "EX": "exchange between replicas",
}


@dataclass(frozen=True)
class Plan:
    """A step as it will run, and the memory and traffic of each rank."""

    shape: MeshShape
    chunk: ChunkLayout
    schedule: Schedule
    memory: tuple[tuple[str, int], ...]
    traffic: SequenceTraffic
    matrices: MatrixTraffic
    kept: KeptBlocks
    rules: Rules


def make_plan(config: Config, world_size: int) -> Plan:
    """Plan a step of ``config`` on ``world_size`` ranks. Needs no process group and no memory.

    Raises:
        ConfigError: degrees that do not fit the number of ranks; lists all mistakes.
    """
    mistakes = config.check(world_size)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    weights = config.weight_parallel
    shape = MeshShape(world_size, **config.degrees())
    model = build_model(config)
    structure = read_structure(
        model, weights.trigger, weights.blocks, weights.prefetch_triggers, weights.plan
    )
    require_patterns_matched((name for name, _ in model.named_parameters()), weights)
    shardings = plan_sharding(model, structure, weights, shape.expert)
    recomputed = set(config.activation_checkpoint.selected(structure.layers))
    chunk = chunk_layout(
        shardings, structure, weights, shape, recomputed, device=device_type(config)
    )
    schedule = simulate(chunk, config.train.micro_batches, weights.overlap)
    return Plan(
        shape,
        chunk,
        schedule,
        tuple(_memory(config, shape, chunk, shardings, schedule)),
        _traffic(config, shape, config.model.layers, len(recomputed)),
        MatrixTraffic.of(config, shape, shardings),
        KeptBlocks.of(
            [chunk],
            schedule,
            lambda other: simulate(other[0], config.train.micro_batches, weights.overlap),
        ),
        structure.rules,
    )


def _memory(
    config: Config,
    shape: MeshShape,
    chunk: ChunkLayout,
    shardings: Sequence[ParameterSharding],
    schedule: Schedule,
) -> list[tuple[str, int]]:
    """(component, bytes) of one rank; slots are exact, reductions an upper bound (WP-1, WP-6)."""
    units = [*chunk.blocks, *chunk.others]
    units += list({id(u): u for u in (chunk.embedding, chunk.head) if u}.values())
    weights = [w for u in units for w in u.weights]
    shards = sum(w.shard_bytes for w in weights)
    train = config.train
    parts = max(train.micro_batches, 2 if train.batch_tokens else 1)  # as many as rows need
    off = OffloadedMemory.of(chunk, shape, moments(config), parts, device_type(config))
    small = [a.parameter for a in shardings if a.unit is None]
    small_bytes = sum(p.numel() * p.element_size() for p in small)
    size = DTYPES[config.train.dtype].itemsize
    wide = max(size, 4)
    elements = (shards - off.shards[GRADIENTS] + small_bytes) // size
    # A weight group of one sends nothing.
    moving = [[w.gradient_bytes for w in u.weights if w.reduce_bytes] for u in units]
    largest = sorted(map(sum, moving), reverse=True)
    pending = sum(largest[: config.weight_parallel.pending_blocks])
    masters = int(size < 4)
    stated = [w for w in weights if OPTIMIZER not in w.offload]
    own = sum(w.shard_bytes for w in stated if not w.expert) + small_bytes
    owned = -(-(own // size) // shape.zero_size)
    owned += -(-(sum(w.shard_bytes for w in stated if w.expert) // size) // shape.experts.zero)
    summed = chunk.policy.accumulate_whole and parts > 1
    held = [w for w in weights if w.trainable and GRADIENTS not in w.offload]
    unsharded_sums = sum(w.sum_bytes for w in held) if summed else 0
    slices = sum(w.slice_bytes for w in weights)
    matrices = MatrixTraffic.of(config, shape, shardings)
    values = owned * wide * moments(config)
    if config.optimizer.name in ("adafactor", "muon"):  # state by parameter
        values = matrices.state
    device_state = values + owned * wide * masters
    state = device_state + off.host[OPTIMIZER]
    peer = config.checkpoint.peer
    encoded = encoder_bytes(chunk, schedule, shape)
    return [
        ("weight shards", shards - off.shards[WEIGHTS]),
        ("replicated parameters", small_bytes),
        ("unsharded weights (slots, exact)", sum(chunk.slots())),
        *([("quantized shards in flight (exact)", encoded)] if encoded else []),
        *([("slices within near groups (exact)", slices)] if slices else []),
        ("reductions in flight (at most)", 2 * pending),
        ("sums on their way to the optimizer (at most)", exchange_buffer_bytes(chunk, shape)),
        ("gradient sums", elements * wide),
        ("unsharded gradient sums (full accumulation)", unsharded_sums),
        ("optimizer state", device_state),
        *matrices.rows(),
        *off.rows(),
        *(_peer_copies(shards + small_bytes + state, len(shardings)) if peer else []),
    ]


def _peer_copies(nbytes: int, parameters: int) -> list[tuple[str, int]]:
    """Host memory of ``checkpoint.peer``: a rank's file while it is written, and the two files kept
    for a rank of another machine: the newest valid one, and the one that is being received.

    Args:
        nbytes: of the rank's weights and optimizer state.
    """
    # A parameter has its weight and three kinds of state, each of up to three boxes.
    file = nbytes + 12 * parameters * _ENTRY_BYTES + _RANDOM_BYTES
    return [(WRITTEN, file), (COPIED, 2 * file)]


def _traffic(config: Config, shape: MeshShape, blocks: int, recomputed: int) -> SequenceTraffic:
    again = recomputed if config.activation_checkpoint.mode == "full" else 0
    return SequenceTraffic.of(config, shape, blocks, again)


def print_plan(
    config: Config,
    world_size: int,
    console: Console | None = None,
    picture: Path | None = None,
) -> None:
    """Print the plan of a step (:func:`make_plan`); of a pipeline, that of every rank.

    Args:
        picture: file for a picture of a pipeline's schedule (SVG).

    Raises:
        ConfigError: see :func:`make_plan`; or the step is too long to simulate; or ``picture`` is
            given without a pipeline, or cannot be written.
    """
    console = console or terminal.console()
    _check_length(config)
    if config.train.batch_tokens:
        console.print(
            f"A step has as many micro-batches as {config.train.batch_tokens:,} tokens need "
            f"(train.batch_tokens); planned are {config.train.micro_batches}."
        )
    if config.parallel.pipeline > 1:
        _print_pipeline(make_pipeline_plan(config, world_size), config, console, picture)
        return
    if picture is not None:
        raise ConfigError("--picture: there is no pipeline to draw (parallel.pipeline = 1)")
    plan = make_plan(config, world_size)
    print_mesh(plan.shape, console)
    _print_rules(plan.rules, console)
    console.print(_schedule_table(plan))
    _print_head_exchange(config, plan.shape, False, console)
    console.print(_memory_table(plan))
    if plan.kept.blocks:
        console.print(plan.kept.line())
    console.print(_units_line(plan.chunk))
    count = len(plan.schedule.actions)
    console.print(f"[bold]Schedule of one step[/bold] ({count} actions a rank)")
    for line in schedule_lines(plan.schedule):
        console.print(f"  {line}", markup=False)


def _check_length(config: Config) -> None:
    """Refuse steps that take too long to simulate: some milliseconds a block and micro-batch."""
    layers, number = config.model.layers, config.train.micro_batches
    if layers * number > _LONGEST_STEP:
        raise ConfigError(
            f"train.micro_batches: {number} micro-batches x {layers} blocks are too many to plan "
            f"one by one (at most {_LONGEST_STEP}); plan fewer micro-batches, since one is as the "
            "other after the first few"
        )


def _print_pipeline(
    plan: PipelinePlan, config: Config, console: Console, picture: Path | None
) -> None:
    if picture is not None:
        try:
            picture.write_text(plan.picture(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--picture {picture}: {error.strerror}") from error
    print_mesh(plan.shape, console)
    _print_rules(match_rules(build_model(config), config.weight_parallel.plan), console)
    for printed in tables(config, plan):
        console.print(printed)
    memory = [rank_memory(config, plan, rank) for rank in plan.ranks]
    names = dict.fromkeys(name for mine in memory for name in mine)  # ranks may lack rows
    console.print(memory_by_rank({n: [mine.get(n, 0) for mine in memory] for n in names}))
    for number, rank in enumerate(plan.ranks):
        each = [MatrixTraffic.of(config, plan.shape, chunk.shardings) for chunk in rank.chunks]
        if exchanges := sum(one.exchanges for one in each):
            received = human(sum(one.received for one in each))
            console.print(
                f"Pipeline rank {number}: a step has {exchanges} exchanges of matrices to and from "
                f"owners, {received} received (mean)"
            )
        blocks = sum(len(chunk.blocks) for chunk in rank.chunks)
        again = sum(chunk.recomputed for chunk in rank.chunks)
        for name, nbytes in _traffic(config, plan.shape, blocks, again).rows(plan.shape):
            console.print(f"Pipeline rank {number}: {name}: {human(nbytes)} a step")
        if any(chunk.plan.policy.kept for chunk in rank.chunks):
            line = rank.kept(config.weight_parallel.overlap).line()
            console.print(f"Pipeline rank {number}: {line}")
    _print_head_exchange(
        config, plan.shape, schedule_kind(config.pipeline.schedule).splits_backward, console
    )
    print_schedules(plan, console)
    console.print("Simulated with the messages between ranks: no rank waits forever.")
    if picture is not None:
        console.print(f"Picture: {picture}")


def rank_memory(config: Config, plan: PipelinePlan, rank: RankPlan) -> dict[str, int]:
    """Bytes by component, of all chunks of a pipeline rank, without activations."""
    found: Counter[str] = Counter()
    for chunk in rank.chunks:
        found.update(dict(_memory(config, plan.shape, chunk.plan, chunk.shardings, rank.schedule)))
    return dict(found)


def _print_head_exchange(config: Config, shape: MeshShape, split: bool, console: Console) -> None:
    for line in head_exchange_lines(config, shape, device_type(config), split):
        console.print(line, markup=False)


def _print_rules(rules: Rules, console: Console) -> None:
    if rules.matched:
        console.print("[bold]Rules of the plan[/bold]")
    for line in rules_lines(rules):
        console.print(line, markup=False)


def _schedule_table(plan: Plan) -> Table:
    rows: list[tuple[object, ...]] = []
    units = (*plan.chunk.blocks, *plan.chunk.root_units, plan.chunk.head)
    experts = {w.name for u in units if u is not None for w in u.weights if w.expert}
    for kind in ("AG", "RS"):
        schedule = plan.schedule
        rows.append((_KINDS[kind], schedule.count(kind), human(schedule.nbytes(kind))))
        near = [a.nbytes for a in schedule.actions if a.kind == kind and a.near]
        if near:
            rows.append(("  of it within near groups", len(near), human(sum(near))))
        if experts:
            own = [a.nbytes for a in schedule.actions if a.kind == kind and a.weight in experts]
            size = plan.shape.experts.size
            rows.append((f"  of it experts, over {size} ranks", len(own), human(sum(own))))
    rows += [(name, "", human(nbytes)) for name, nbytes in plan.traffic.rows(plan.shape)]
    if plan.matrices.exchanges:
        name = "matrices to and from owners (mean)"
        rows.append((name, plan.matrices.exchanges, human(plan.matrices.received)))
    title = "Collectives of one step, payload a rank receives"
    return table(title, ("<what", "count", "bytes"), rows)


def _units_line(chunk: ChunkLayout) -> str:
    """A line on the memory of unsharded weights: the largest unit, all slots, the minimum."""
    largest = max(chunk.blocks, key=lambda unit: unit.slot_bytes)
    return (
        f"{len(chunk.blocks)} units are gathered in turn, the largest {largest.name} "
        f"({human(largest.slot_bytes)}): slots of {human(sum(chunk.slots()))}, at least "
        f"{human(chunk.min_slot_bytes())} (prefetch_depth = 0, none kept)"
    )


def _memory_table(plan: Plan) -> Table:
    rows = [(name, human(nbytes)) for name, nbytes in with_sums(plan.memory)]
    return table("Memory of one rank, without activations", ("<component", "bytes"), rows)
