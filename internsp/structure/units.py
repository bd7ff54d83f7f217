"""Builds a chunk's units, slots and gather policy from a model that may be on meta. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from internsp.base.host import WEIGHTS
from internsp.base.sizes import human
from internsp.config import WeightParallelConfig
from internsp.errors import ConfigError
from internsp.mesh.shape import MeshShape
from internsp.schedule.chunk import (
    ChunkLayout,
    EnclosingLayout,
    UnitLayout,
    WeightDtypes,
    WeightLayout,
    aligned,
    slot_bytes,
)
from internsp.schedule.layout import ShardLayout
from internsp.schedule.terms import FORWARD, Policy
from internsp.structure.assign import ParameterSharding, require_experts
from internsp.structure.blocks import Structure, trigger_position
from internsp.structure.effect import require_effect
from internsp.structure.prefetch import KEYS

if TYPE_CHECKING:
    from internsp.schedule.encoding import Encoding


def make_policy(config: WeightParallelConfig, structure: Structure) -> Policy:
    """The configured gather policy; :func:`choose_kept_blocks` adds the blocks that stay unsharded.

    Raises:
        ConfigError: a rule sets what the trigger "rolling" or granularity "module" replaces.
    """
    rolling = config.gather_before == "rolling"
    depth = {"prefetch_depth", *KEYS}
    for matched_rule in structure.rules.matched:
        keys = matched_rule.rule.options().keys()
        if wrong := keys & {"gather_before", "gather_before_modules", *depth} if rolling else None:
            raise ConfigError(
                f'{matched_rule}: sets {min(wrong)}, but weight_parallel.gather_before = "rolling" '
                "gathers each weight as soon as there is room: choose another trigger for all"
            )
        alone = keys & {"coalesce_bytes", *depth}
        if alone and config.granularity == "module":
            raise ConfigError(
                f'{matched_rule}: sets {min(alone)}, but weight_parallel.granularity = "module" '
                'gathers each weight alone, one ahead: set granularity = "block"'
            )
    usual = config.prefetch_depth
    depths = [block.rule_options.get("prefetch_depth", usual) for block in structure.blocks]
    counts = structure.prefetch_counts
    count = len(depths)
    # A block with prefetch targets for both directions prefetches these; its depth has no effect.
    other = [d for i, d in enumerate(depths) if {(p, i) for p in KEYS.values()} - counts.keys()]
    reached = [min(n, count - 1 - i) for (phase, i), n in counts.items() if phase == FORWARD]
    reached += [n for (phase, _), n in counts.items() if phase != FORWARD]
    most = max(*other, *reached, 0, 0)
    return Policy(
        count,
        most,
        config.granularity == "module",
        accumulate_whole=config.accumulation == "full",
        rolling=rolling,
        depths=tuple(depths) if set(depths) != {most} else (),
        named=counts,
    )


def _kept_blocks(
    structure: Structure, sizes: Sequence[int], config: WeightParallelConfig, depth: int,
    whole: bool,
) -> frozenset[int]:  # fmt: skip
    """The blocks that stay unsharded until the optimizer step; ``whole``: of the whole model.

    Raises:
        ConfigError: the configured size holds none of the blocks.
    """
    rules_keep = [block.rule_options.get("keep_unsharded") for block in structure.blocks]
    decided = {i: bool(keep) for i, keep in enumerate(rules_keep) if keep is not None}
    if not (config.keep_unsharded or decided):
        return frozenset()
    from internsp.structure.kept import choose_kept_blocks  # few programs keep blocks

    kept = choose_kept_blocks(config, sizes, depth, decided)
    none = isinstance(config.keep_unsharded, str) and not kept - decided.keys()
    if none and any(sizes) and whole:
        raise ConfigError(
            f'weight_parallel.keep_unsharded = "{config.keep_unsharded}" has no effect: it '
            f"holds none of the blocks, the smallest of which takes {human(min(sizes))}; give "
            "more, a number of blocks, or leave it out"
        )
    return kept


def chunk_layout(
    shardings: Sequence[ParameterSharding],
    structure: Structure,
    config: WeightParallelConfig,
    shape: MeshShape,
    recomputed: set[int],
    split: bool = False,
    device: str = "cpu",
    own_communicator: bool = False,
) -> ChunkLayout:
    """The units, slots and policy of a chunk.

    Args:
        shape: the mesh, with the ranks of the weight groups.
        recomputed: indices of checkpointed blocks.
        split: backward may be split into input and weight backward. Then small blocks do not
            unshard their weights at block entry: for weights that share a node of the graph,
            torch's weight backward goes through all of the block again, when its weights may no
            longer be unsharded (WP-14).
        device: type of the device that computes.
        own_communicator: a communicator of the user's own gathers the weights.

    Raises:
        StructureError: the mesh has an axis for experts and the model has none, or a key of a rule
            has no effect.
        ConfigError: an option has no effect.
    """
    # One stage of a pipeline may have no experts.
    if shape.separate and shape.pipeline == 1 and not any(a.expert for a in shardings):
        require_experts((a.name for a in shardings), config, structure.rules)
    if shape.pipeline == 1:
        require_effect(shardings, structure, config, shape, own_communicator)
    policy = make_policy(config, structure)
    if structure.enclosing and (split or config.compile):
        what = "a backward computed in two parts" if split else "weight_parallel.compile"
        raise ConfigError(
            f"{structure.enclosing[0].name} has a unit that is not a block (unit in "
            f"weight_parallel.rules), which {what} does not support: leave the rule out"
        )
    members: dict[str, list[ParameterSharding]] = {b.name: [] for b in structure.blocks}
    for assignment in shardings:
        if assignment.unit is not None:
            members.setdefault(assignment.unit, []).append(assignment)
    near = config.reduce if isinstance(config.reduce, int) else 0
    if config.reduce == "auto" and shape.machines:
        from internsp.structure.near import near_of  # few models need it

        near = near_of(shardings, shape)
    weights_of = {
        name: tuple(_weight_layout(a, shape, near) for a in own) for name, own in members.items()
    }
    sizes = [slot_bytes(weights_of[block.name]) for block in structure.blocks]
    exchanges = shape.sequence > 1 or shape.expert > 1 or shape.tensor > 1
    # Ranks ask each other for the order between launches that each waits for at once.
    asks = config.unexpected_order != "error" and not config.overlap
    one_order = asks or (exchanges and (device != "cpu" or not config.overlap))
    kept = _kept_blocks(structure, sizes, config, policy.depth, shape.pipeline == 1)
    levels = any(w.far_bytes for own in weights_of.values() for w in own)
    policy = replace(policy, kept=kept, one_order=one_order, two_levels=levels)
    units: dict[str, UnitLayout] = {}
    slot = policy.slots
    index_of = {b.name: i for i, b in enumerate(structure.blocks)}
    rests = {around.name for around in structure.enclosing}
    for name, own in members.items():
        if name in rests:
            continue
        block = index_of.get(name, -1)
        weights = weights_of[name]
        if block in policy.kept:  # a kept block is gathered once a step, never from slices
            weights = tuple(replace(weight, slices=0) for weight in weights)
        trigger_at = -1
        if block >= 0:
            inside = [a.owners[0].module_name.removeprefix(f"{name}.") for a in own]
            trigger_at = trigger_position(structure.blocks[block], inside)
        where = policy.slot(block) if block >= 0 else slot
        slot += block < 0
        small = block >= 0 and bool(weights) and all(w.coalesced for w in weights)
        unshard_at_entry = block >= 0 and (config.compile or (small and not split))
        again = block >= 0 and structure.recomputes(block, recomputed)
        around = structure.blocks[block].around if block >= 0 else -1
        units[name] = UnitLayout(
            name, weights, where, block, again, trigger_at, unshard_at_entry, around
        )
    embedding = units.get(structure.embedding[0]) if structure.embedding else None
    named = structure.head and structure.head[0]
    owned = (a.unit for a in shardings if any(o.module_name == named for o in a.owners))
    head = next((units[unit] for unit in owned if unit), None)  # tied: the embedding's
    return ChunkLayout(
        policy,
        tuple(units[b.name] for b in structure.blocks),
        embedding,
        head,
        config.reductions_in_flight,
        tuple(u for u in units.values() if u.block < 0 and u not in (embedding, head)),
        _enclosing(structure, weights_of, recomputed, slot, 2 if policy.depth else 1),
        exchanged=max(shape.dense.replicas, shape.experts.replicas) > 1,
        reduce_near=near,
    )


def _enclosing(
    structure: Structure,
    weights_of: Mapping[str, tuple[WeightLayout, ...]],
    recomputed: Collection[int],
    slot: int,
    slots: int,
) -> tuple[EnclosingLayout, ...]:
    """The enclosing blocks; their rests take turns in ``slots`` slots, the first one ``slot``."""
    rests = [around.name for around in structure.enclosing if around.name in weights_of]
    slots = min(slots, len(rests))
    where = {name: slot + i % slots for i, name in enumerate(rests)}
    return tuple(
        EnclosingLayout(
            around.name,
            number,
            UnitLayout(around.name, weights_of.get(around.name, ()), where.get(around.name, -1)),
            around.first,
            around.last,
            around.layer in recomputed,
        )
        for number, around in enumerate(structure.enclosing)
    )


def _near_group(key: str, near: int, assignment: ParameterSharding, size: int) -> int:
    """``near``, the ranks of the near group for the option ``key``.

    Raises:
        ConfigError: a weight group of ``size`` cannot be divided into such near groups.
    """
    if near == 1 or near >= size or size % near:
        fitting = [n for n in range(2, size) if size % n == 0]
        raise ConfigError(
            f"weight_parallel.{key} = {near}: {assignment.name} is sharded over "
            f"{size} ranks, of which a smaller near group is "
            f"{' or '.join(map(str, fitting)) if fitting else 'none'}; choose one of these, or 0 "
            "(for near_ranks, keep_unsharded keeps blocks unsharded)"
        )
    return near


def _weight_layout(
    assignment: ParameterSharding, shape: MeshShape, reduce_near: int
) -> WeightLayout:
    options = assignment.options
    parameter, size = assignment.parameter, shape.axis(assignment.expert).size
    layout = ShardLayout.create(assignment.shape, assignment.dim, size)
    compute = assignment.dtypes.compute
    shard_bytes = layout.shard_numel * compute.itemsize
    sent = assignment.dtypes.reduce if assignment.dtypes.reduce and size > 1 else compute
    small = size > 1 and layout.padded_numel * compute.itemsize <= options.coalesce_bytes
    encoding: Encoding | None = None
    name, dtype = assignment.name, parameter.dtype
    own = options.custom_gather
    # A weight group of one sends nothing, but a class may make something else of its shard.
    if own is not None and (size > 1 or own.sharded is not None):
        encoding = own.encoding(name, layout, dtype, compute)
    elif options.quantize != "none" and assignment.block >= 0 and size > 1 and not small:
        from internsp.schedule.encoding import QuantizedShard

        work = torch.promote_types(dtype, torch.float32)
        encoding = QuantizedShard(name, options.quantize, layout.shard_numel, work, compute)
    held = None if encoding is None else encoding.slot_nbytes
    whole = held or layout.padded_numel * compute.itemsize
    slices = options.near_ranks if assignment.block >= 0 and size > 1 else 0
    near = reduce_near if reduce_near < size else 0  # a group that is near itself sums at once
    groups = size // _near_group("reduce", near, assignment, size) if near else 1
    wide = torch.promote_types(sent, torch.float32)
    return WeightLayout(
        name,
        gather_bytes=(size - 1) * (shard_bytes if encoding is None else encoding.nbytes),
        reduce_bytes=(size - groups) * layout.shard_numel * sent.itemsize,
        far_bytes=(groups - 1) * layout.shard_numel * wide.itemsize,
        slot_bytes=aligned(whole),
        shard_bytes=layout.shard_numel * dtype.itemsize,
        trainable=parameter.requires_grad,
        needs_gather=size > 1 or compute != dtype or WEIGHTS in options.offload or held is not None,
        coalesced=small,
        encoding=encoding,
        gradient_bytes=layout.padded_numel * sent.itemsize,
        expert=assignment.expert and shape.separate,
        dtypes=WeightDtypes(dtype, compute, sent, assignment.autocasts),
        offload=frozenset(options.offload),
        slices=_near_group("near_ranks", slices, assignment, size) if slices else 0,
        unsharded_bytes=whole,
    )
