"""Pure: what a chunk will do and how much memory it takes, from a model that may be on meta."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from internsp.config import WeightParallelConfig
from internsp.errors import ConfigError
from internsp.host import WEIGHTS
from internsp.mesh.shape import MeshShape
from internsp.packed import PackedShard
from internsp.plan.assign import Assignment, require_effect, require_experts
from internsp.plan.blocks import Structure, trigger_position
from internsp.plan.chunk import ChunkPlan, Schedule, UnitPlan, WeightPlan, slot_bytes
from internsp.plan.kept import kept
from internsp.plan.prefetch import KEYS
from internsp.quantize import QuantizedShard, buffer_bytes
from internsp.wp.enclosing import Enclosing
from internsp.wp.layout import ShardLayout
from internsp.wp.schedule import FORWARD, Policy
from internsp.wp.slots import aligned


def policy_of(config: WeightParallelConfig, structure: Structure) -> Policy:
    """The policy that is asked for; :func:`kept` adds which blocks stay unsharded.

    Raises:
        ConfigError: the trigger "rolling" or granularity "module" together with what it takes the
            place of.
    """
    rolling = config.trigger == "rolling"
    depth = {"prefetch_depth", *KEYS}
    for caught in structure.rules.caught:
        said = caught.rule.said().keys()
        if wrong := said & {"trigger", "prefetch_triggers", *depth} if rolling else None:
            raise ConfigError(
                f'{caught}: sets {min(wrong)}, but weight_parallel.trigger = "rolling" gathers '
                "each weight as soon as there is room: choose another trigger for all"
            )
        alone = said & {"coalesce_bytes", *depth}
        if alone and config.granularity == "module":
            raise ConfigError(
                f'{caught}: sets {min(alone)}, but weight_parallel.granularity = "module" gathers '
                'each weight alone, one ahead: set granularity = "block"'
            )
    depths = [block.said.get("prefetch_depth", config.prefetch_depth) for block in structure.blocks]
    ahead = structure.ahead
    if rolling and (config.granularity == "module" or config.prefetch_triggers):
        raise ConfigError(
            'weight_parallel.trigger = "rolling" gathers each weight as soon as there is room: '
            'set granularity = "block" and no prefetch_triggers'
        )
    count = len(depths)
    # A block whose rule says both directions gathers as many as these say, and not by its depth.
    other = [d for i, d in enumerate(depths) if {(p, i) for p in KEYS.values()} - ahead.keys()]
    reached = [min(n, count - 1 - i) for (phase, i), n in ahead.items() if phase == FORWARD]
    reached += [n for (phase, _), n in ahead.items() if phase != FORWARD]
    most = max(*other, *reached, 0, 0)
    return Policy(
        count,
        most,
        config.granularity == "module",
        accumulate_whole=config.accumulation == "full",
        rolling=rolling,
        depths=tuple(depths) if set(depths) != {most} else (),
        named=ahead,
    )


def chunk_plan(
    assignments: Sequence[Assignment],
    structure: Structure,
    config: WeightParallelConfig,
    shape: MeshShape,
    recomputed: set[int],
    split: bool = False,
    device: str = "cpu",
) -> ChunkPlan:
    """The chunk as :func:`internsp.plan.simulate.simulate` wants it.

    Args:
        shape: ranks of the weight groups.
        recomputed: indices of checkpointed blocks.
        split: its backward may be computed in two parts. Then small blocks do not take their
            weights at their entry: of weights that share a node of the graph, torch's weight part
            goes through the whole block again, with weights no longer sure to be whole (WP-14).
        device: type of the device that computes.

    Raises:
        StructureError: the mesh has an axis for experts and the model has none.
    """
    if shape.separate and shape.pipeline == 1:  # a stage of a pipeline may lack them
        require_experts((a.name for a in assignments), config, structure.rules)
    if shape.pipeline == 1:
        require_effect(assignments, structure)
    policy = policy_of(config, structure)
    if structure.divided and (split or config.compile):
        what = "a backward computed in two parts" if split else "weight_parallel.compile"
        raise ConfigError(
            f"{structure.divided} has a unit that is not a block (unit in weight_parallel.plan), "
            f"which {what} does not take: leave the rule out"
        )
    members: dict[str, list[Assignment]] = {b.name: [] for b in structure.blocks}
    for assignment in assignments:
        if assignment.unit is not None:
            members.setdefault(assignment.unit, []).append(assignment)
    weights_of = {
        name: tuple(_weight(a, shape) for a in own)
        for name, own in members.items()
    }
    sizes = [slot_bytes(weights_of[block.name]) for block in structure.blocks]
    said = [block.said.get("keep_unsharded") for block in structure.blocks]
    decided = {i: bool(keep) for i, keep in enumerate(said) if keep is not None}
    exchanges = shape.sequence > 1 or shape.expert > 1 or shape.tensor > 1
    one_order = exchanges and (device != "cpu" or not config.overlap)
    policy = replace(policy, kept=kept(config, sizes, policy.depth, decided), one_order=one_order)
    units: dict[str, UnitPlan] = {}
    slot = policy.slots
    places = {b.name: i for i, b in enumerate(structure.blocks)}
    rests = {around.name for around in structure.enclosing}
    for name, own in members.items():
        if name in rests:
            continue
        block = places.get(name, -1)
        weights = weights_of[name]
        if block in policy.kept:  # gathered once a step as it is
            weights = tuple(replace(weight, slices=0) for weight in weights)
        trigger_at = -1
        if block >= 0:
            inside = [a.owners[0].module_name.removeprefix(f"{name}.") for a in own]
            trigger_at = trigger_position(structure.blocks[block], inside)
        where = policy.slot(block) if block >= 0 else slot
        slot += block < 0
        small = block >= 0 and bool(weights) and all(w.small for w in weights)
        at_entry = block >= 0 and (config.compile or (small and not split))
        at_entry = at_entry and len(structure.blocks[block].modules) == 1
        again = block >= 0 and structure.recomputes(block, recomputed)
        around = structure.blocks[block].around if block >= 0 else -1
        units[name] = UnitPlan(name, weights, where, block, again, trigger_at, at_entry, around)
    embedding = units.get(structure.embedding[0]) if structure.embedding else None
    head = _head(structure, assignments, units)
    return ChunkPlan(
        policy,
        tuple(units[b.name] for b in structure.blocks),
        embedding,
        head,
        config.pending_blocks,
        tuple(u for u in units.values() if u.block < 0 and u not in (embedding, head)),
        _enclosing(structure, weights_of, recomputed, slot, 2 if policy.depth else 1),
        exchanged=max(shape.dense.replicas, shape.experts.replicas) > 1,
    )


def _enclosing(
    structure: Structure,
    weights_of: Mapping[str, tuple[WeightPlan, ...]],
    recomputed: Collection[int],
    slot: int,
    slots: int,
) -> tuple[Enclosing[UnitPlan], ...]:
    """Enclosing blocks; their rests take ``slots`` from ``slot`` on by turns."""
    rests = [around.name for around in structure.enclosing if around.name in weights_of]
    slots = min(slots, len(rests))
    where = {name: slot + place % slots for place, name in enumerate(rests)}
    return tuple(
        Enclosing(
            around.name,
            number,
            UnitPlan(around.name, weights_of.get(around.name, ()), where.get(around.name, -1)),
            around.first,
            around.last,
            around.layer in recomputed,
        )
        for number, around in enumerate(structure.enclosing)
    )


def _slices(assignment: Assignment, size: int) -> int:
    """Ranks of the near group that keeps slices of it.

    Raises:
        ConfigError: the weight group has no such parts.
    """
    near = assignment.options.reshard_after_forward
    if not near or assignment.block < 0 or size == 1:
        return 0
    if near == 1 or near >= size or size % near:
        fitting = [n for n in range(2, size) if size % n == 0]
        raise ConfigError(
            f"weight_parallel.reshard_after_forward = {near}: {assignment.name} is cut over "
            f"{size} ranks, of which a smaller near group is "
            f"{' or '.join(map(str, fitting)) if fitting else 'none'}; choose one of these, or 0 "
            "(keep_unsharded keeps blocks whole)"
        )
    return near


def quantized_bytes(chunk: ChunkPlan, schedule: Schedule, shape: MeshShape) -> int:
    """Bytes of the quantizer's buffers of a chunk that runs ``schedule``: exact (WP-1)."""
    shards = {
        weight.name: (weight.quantized, shape.axis(weight.expert).size)
        for unit in chunk.units
        for weight in unit.weights
        if weight.quantized is not None
    }
    gathers = (
        (a.kind == "AG", a.weight)
        for a in schedule.actions
        if a.kind in ("AG", "WAIT") and not a.near
    )
    return buffer_bytes(shards, gathers)


def _head(
    structure: Structure, assignments: Sequence[Assignment], units: dict[str, UnitPlan]
) -> UnitPlan | None:
    """The unit that holds the head's weight: the embedding's, where the two are tied."""
    if structure.head is None:
        return None
    for assignment in assignments:
        if assignment.unit and any(o.module_name == structure.head[0] for o in assignment.owners):
            return units[assignment.unit]
    return None


def _weight(assignment: Assignment, shape: MeshShape) -> WeightPlan:
    options = assignment.options
    parameter, size = assignment.parameter, shape.axis(assignment.expert).size
    layout = ShardLayout.create(assignment.shape, assignment.dim, size)
    compute = assignment.dtypes.compute
    shard_bytes = layout.shard_numel * compute.itemsize
    sent = assignment.dtypes.reduce if assignment.dtypes.reduce and size > 1 else compute
    small = size > 1 and layout.padded_numel * compute.itemsize <= options.coalesce_bytes
    quantized: QuantizedShard | PackedShard | None = None
    if options.own is not None and size > 1:
        quantized = PackedShard.of(assignment.name, options.own, layout, parameter.dtype)
    elif options.quantize != "none" and assignment.block >= 0 and size > 1 and not small:
        if math.prod(assignment.shape) >= options.quantize_min_elements:
            quantized = QuantizedShard.of(
                assignment.name, layout.shard_numel, compute, parameter.dtype
            )
    return WeightPlan(
        assignment.name,
        gather_bytes=(size - 1) * (shard_bytes if quantized is None else quantized.nbytes),
        reduce_bytes=(size - 1) * layout.shard_numel * sent.itemsize,
        slot_bytes=aligned(layout.padded_numel * compute.itemsize),
        shard_bytes=layout.shard_numel * parameter.dtype.itemsize,
        trainable=parameter.requires_grad,
        moves=size > 1 or compute != parameter.dtype or WEIGHTS in options.offload,
        small=small,
        quantized=quantized,
        gradient_bytes=layout.padded_numel * sent.itemsize,
        expert=assignment.expert and shape.separate,
        gather_dtype=compute,
        reduce_dtype=sent,
        autocasts=assignment.autocasts,
        dtype=parameter.dtype,
        offload=frozenset(options.offload),
        slices=_slices(assignment, size),
        unsharded_bytes=layout.padded_numel * compute.itemsize,
        sum_bytes=layout.padded_numel * torch.promote_types(compute, torch.float32).itemsize,
    )
