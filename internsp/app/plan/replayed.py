"""Seconds of a configuration's step, replayed action by action: what ``internsp plan`` prints.

Repeated blocks and micro-batches are replayed a few times and multiplied: from the second on, each
takes as long as the one before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from internsp.app.config import Config
from internsp.app.plan.block_seconds import block_seconds
from internsp.app.plan.compute import head
from internsp.app.plan.configured import workload_of
from internsp.app.plan.devices import Device
from internsp.app.plan.links import Group
from internsp.app.plan.machines import on_machines
from internsp.app.plan.replay import (
    EXCHANGE,
    GATHER,
    REDUCE,
    Clocks,
    UnitSeconds,
    computing_actions,
    replay,
)
from internsp.app.plan.seconds import (
    Part,
    Stepped,
    StepSeconds,
    ends,
    paces,
    stage_blocks,
    step_seconds,
)
from internsp.app.plan.step import make_plan
from internsp.app.plan.workload import Workload
from internsp.mesh import MeshShape
from internsp.pipeline.schedules import ScheduleAction, schedule_kind, schedule_order
from internsp.pipeline.simulate import check_order
from internsp.schedule.chunk import ChunkLayout

FEW = 200  # passes of blocks that are replayed one by one
_KINDS: Mapping[str, str] = {Part.GATHERS: GATHER, Part.REDUCTIONS: REDUCE, Part.REPLICAS: EXCHANGE}
_BLOCKS, _PASSES = (4, 6), (2, 3)  # numbers of blocks and micro-batches that are multiplied


def replayed(
    config: Config, shape: MeshShape, device: Device, chunk: ChunkLayout | None = None
) -> StepSeconds:
    """Seconds of a step of ``config``.

    Args:
        chunk: the planned chunk, if there is one already; a pipeline needs none.
    """
    config = on_machines(config, shape.world_size, device)
    load = workload_of(config, shape)
    closed = step_seconds(load, device)
    if shape.pipeline > 1:
        return _pipeline(config, load, device, closed)
    if shape.weight == 1:
        return closed
    layers, number = config.model.layers, config.train.micro_batches
    given = config.model.family == "hf"  # its folder says how many blocks there are
    if given and chunk is None:
        chunk = make_plan(config, shape.world_size).chunk
    if chunk is not None and (given or layers * number <= FEW):
        clocks = _replay(load, device, chunk, number, config.weight_parallel.overlap)
    else:
        clocks = _multiplied(config, load, device)
    slowed = {part: clocks.slowed[kind] for part, kind in _KINDS.items()}
    waited = {part: clocks.waited[kind] + slowed[part] for part, kind in _KINDS.items()}
    messages = closed.messages - closed.parts.get(Part.REPLICAS, 0.0)
    parts = {part: value for part, value in {**closed.parts, **waited}.items() if value > 0}
    return StepSeconds(parts, messages, closed.compute, slowed)


def _pipeline(config: Config, load: Workload, device: Device, closed: StepSeconds) -> StepSeconds:
    """The order of torch's schedule, each pass with the seconds of its stage."""
    kind, stages = schedule_kind(config.pipeline.schedule), load.degrees.pipeline
    chunks, number = config.pipeline.chunks, load.micro_batches
    order = schedule_order(kind, stages, chunks, number)
    block, outer = block_seconds(load, device), ends(load, device)
    multiplied = head(load, device)[1].products
    passes = number * stages
    waits = [closed.parts.get(name, 0.0) / number for name in (Part.GATHERS, Part.REDUCTIONS)]
    blocks = stage_blocks(load)
    mean = load.model.layers / (stages * chunks)
    ahead, behind = paces(load, block)
    sums = Stepped.of(load, device).accumulated / chunks

    def cost(action: ScheduleAction) -> float:
        last = action.stage == stages * chunks - 1
        share = blocks[action.stage]
        each = share / mean / chunks
        if action.kind == "F":
            own = share * ahead + waits[0] / 2 * each
            return own + (outer[0] if last else 0.0)
        own = share * behind + (waits[0] / 2 + waits[1]) * each
        own += outer[1] if last else 0.0
        own += sums
        weights = (share * block.backward.products + last * multiplied) / 2 + sums
        return {"B": own, "I": own - weights, "W": weights}[action.kind]

    rank_of = partial(kind.rank_of, ranks=stages, chunks=chunks)
    neighbors = Group(2, load.degrees.devices // stages, device)
    message = neighbors.pass_on(load.tokens * load.model.hidden * 2)
    timed = check_order(order, rank_of, stages * chunks, cost, message)
    parts = {name: value for name, value in closed.parts.items() if name != Part.BUBBLE}
    after = (Part.REPLICAS, Part.OPTIMIZER, Part.COPIES)
    of_passes = sum(value for name, value in parts.items() if name not in after)
    end = max(action.end for action in timed)
    # Idle time is what the slowest rank needs beyond an average one, and all that it waits.
    parts[Part.BUBBLE] = max(0.0, end - of_passes)
    messages = closed.messages + 2 * message * passes / stages
    return StepSeconds(parts, messages, closed.compute)


def _replay(
    load: Workload, device: Device, chunk: ChunkLayout, number: int, overlap: bool
) -> Clocks:
    block = block_seconds(load, device)
    before, after = ends(load, device)
    share = load.recompute.products or 1.0  # of the blocks that recompute
    attends = block.forward.attention + block.sequences[0]
    again = block.again.attention / share
    backward = block.backward.attention + block.sequences[1]
    pace = paces(load, block)
    rest = [
        pace[0] - attends,
        (block.again.total - block.again.attention) / share,
        pace[1] - block.again.total - backward,
    ]
    one = UnitSeconds((rest[0], attends), (rest[1], again), (rest[2], backward))
    units = dict.fromkeys((unit.name for unit in chunk.blocks), one)
    if chunk.head is not None:
        units[chunk.head.name] = UnitSeconds((before, 0.0), (0.0, 0.0), (after, 0.0))
    actions = computing_actions(chunk, number, overlap)
    return replay(chunk, actions, units, messages(load, device, chunk), device.fitted.slowdown)


def messages(load: Workload, device: Device, chunk: ChunkLayout) -> dict[str, dict[str, float]]:
    """Seconds of each message, by kind and by the name of its weight or parcel."""
    degrees, parts = load.degrees, load.habits.sends_parts
    group = Group(degrees.sharded, degrees.tensor, device)
    few = Group(degrees.expert_shards, degrees.expert_stride, device)
    others = Group(degrees.copies, degrees.tensor * degrees.sharded, device)
    found: dict[str, dict[str, float]] = {GATHER: {}, REDUCE: {}, EXCHANGE: {}}
    for unit in chunk.units:
        for weight in unit.weights:
            quantized = load.habits.gather_bytes < 2 and weight.encoding is not None
            size = weight.unsharded_bytes * (0.5 if quantized else 1.0)
            among = few if weight.expert and degrees.expert_shards else group
            found[GATHER][weight.name] = among.gather(size)
            in_parts = parts and not load.habits.reduces_in_ring
            found[REDUCE][weight.name] = among.reduce(weight.gradient_bytes, in_parts)
            if weight.far_bytes:  # half for each of its two messages
                groups = round(among.size * (1 - weight.reduce_bytes / weight.gradient_bytes))
                near = replace(among, size=among.size // groups)
                far = replace(among, size=groups, stride=among.stride * near.size)
                both = near.reduce(weight.gradient_bytes, parts)
                both += far.reduce(weight.far_bytes * groups / (groups - 1), parts)
                found[REDUCE][weight.name] = both / 2
    parcels = chunk.parcels if chunk.exchanged else ()
    alike = others
    if degrees.expert_shards:
        alike = Group(degrees.expert_copies, degrees.expert * degrees.expert_shards, device)
    names = Counter(parcel.name for parcel in parcels)  # a unit's own, and its experts'
    for parcel in parcels:
        among = alike if parcel.weights[0].expert else others
        mean = among.all_reduce(parcel.nbytes, parts) / names[parcel.name]
        found[EXCHANGE][parcel.name] = found[EXCHANGE].get(parcel.name, 0.0) + mean
    return found


def _multiplied(config: Config, load: Workload, device: Device) -> Clocks:
    """Clocks of all blocks and micro-batches, from those of few: linear in both numbers."""
    layers, number = config.model.layers, config.train.micro_batches
    overlap = config.weight_parallel.overlap
    at = {}
    passes = _PASSES if number > _PASSES[1] else (number, number)
    # The folder of a model of the zoo has given its sizes, and would contradict another depth.
    path = config.model.path if config.model.family == "hf" else None
    for blocks in _BLOCKS:
        small = config.model_copy(
            update={
                "model": config.model.model_copy(update={"layers": blocks, "path": path}),
                "train": config.train.model_copy(
                    update={"micro_batches": 1, "global_batch": config.train.global_batch // number}
                ),
            }
        )
        chunk = make_plan(small, load.degrees.devices).chunk
        for count in set(passes):
            at[blocks, count] = _replay(load, device, chunk, count, overlap)
    found = Clocks(device.fitted.slowdown)
    for name in ("waited", "slowed"):
        for kind in (GATHER, REDUCE, EXCHANGE):
            lines = [
                _line(passes, [getattr(at[blocks, count], name)[kind] for count in passes], number)
                for blocks in _BLOCKS
            ]
            getattr(found, name)[kind] = max(0.0, _line(_BLOCKS, lines, layers))
    return found


def _line(at: Sequence[int], values: Sequence[float], wanted: int) -> float:
    if at[0] == at[1]:
        return values[0]
    return values[1] + (values[1] - values[0]) / (at[1] - at[0]) * (wanted - at[1])
