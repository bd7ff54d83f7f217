"""Refuses options that would have no effect on a model and its mesh (WP-17). Pure.

An option counts as set where it differs from its default. A threshold that no weight reaches has
its effect, and so has an option of a group of one rank: a configuration for many ranks runs on one.
What contradicts another option, whatever the model, is in :mod:`internsp.config.combinations`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from internsp.base.sizes import human
from internsp.config import WeightParallelConfig
from internsp.config.combinations import OWN_DECIDES
from internsp.errors import ConfigError, StructureError
from internsp.mesh.shape import MeshShape
from internsp.structure.assign import ParameterSharding
from internsp.structure.blocks import Structure
from internsp.structure.dtypes import DTYPES
from internsp.structure.rules import (
    BLOCK_KEYS,
    FROM_CONFIG,
    MODULE_KEYS,
    SHARDED_KEYS,
    MatchedRule,
)

OF_SHARDED = (
    "memory_pool", "prefetch_depth", "granularity", "gather_before_modules", "near_ranks",
    "keep_unsharded", "reductions_in_flight", "reduce_dtype", "quantize", "offload",
    "reduce",
)  # fmt: skip
"""Options of ``weight_parallel`` that act on sharded parameters only.

Not ``trigger``: without the right one a model is refused for which no trigger is found.
"""
_OF_CASTS = {"compute_dtype", "output_dtype", "cast_inputs"}


def require_effect(
    shardings: Sequence[ParameterSharding],
    structure: Structure,
    config: WeightParallelConfig,
    shape: MeshShape,
    own_communicator: bool = False,
) -> None:
    """Check that every option that is set has an effect on the complete model.

    Args:
        own_communicator: a communicator of the user's own gathers the weights.

    Raises:
        ConfigError: an option of ``weight_parallel`` has none; names it, and the remedy.
        StructureError: the same of a key of one of its rules.
    """
    facts = _Facts(shardings, structure, config, shape)
    for key, why in _without_effect(facts):
        value = getattr(config, key)
        raise ConfigError(f"weight_parallel.{key} = {value!r} has no effect: {why}")
    for matched in structure.rules.matched:
        if matched.origin != FROM_CONFIG:
            continue
        own = [s for s in shardings if any(matched.applies_to(o.full_name) for o in s.owners)]
        blocks = [i for i, b in enumerate(structure.blocks) if matched.applies_to(b.name)]
        found = (matched, facts, own, blocks)
        for key, why in chain(_acts_on_nothing(*found), _changes_nothing(*found)):
            raise StructureError(f"{matched}: {key} {why}")
        # A user's communicator decides when weights are gathered and freed.
        for key in sorted(matched.rule.options().keys() & {*BLOCK_KEYS, "near_ranks"}):
            if own_communicator:
                raise StructureError(f"{matched}: {key} {OWN_DECIDES}")


@dataclass(frozen=True)
class _Facts:
    """What was decided about a model."""

    shardings: Sequence[ParameterSharding]
    structure: Structure
    config: WeightParallelConfig
    shape: MeshShape

    @property
    def sharded(self) -> list[ParameterSharding]:
        return [s for s in self.shardings if s.unit is not None]

    @property
    def in_blocks(self) -> list[ParameterSharding]:
        return [s for s in self.sharded if s.block >= 0]

    @property
    def has_expert_axis(self) -> bool:
        return self.shape.expert > 1 or self.shape.expert_weight is not None

    def rules_of(self, sharding: ParameterSharding, keys: Collection[str]) -> Collection[str]:
        """Which of ``keys`` rules set for a parameter."""
        names = [o.full_name for o in sharding.owners]
        return self.structure.rules.options_for(names, keys).keys()

    def keeps(self, block: int) -> bool | None:
        """Whether a rule keeps a block unsharded; ``None``: no rule says so."""
        return self.structure.blocks[block].rule_options.get("keep_unsharded")


def _without_effect(facts: _Facts) -> Iterator[tuple[str, str]]:
    """Options of ``weight_parallel`` that are set and have no effect, and why."""
    config = facts.config
    if not facts.sharded:
        for key in filter(config.asks, OF_SHARDED):
            yield key, (
                "no parameter of the model is sharded: lower min_shard_elements "
                f"({config.min_shard_elements}), or leave the option out"
            )
    if config.asks("expert_parameters") and config.expert_parameters and not facts.has_expert_axis:
        yield "expert_parameters", (
            "the mesh has no axis for experts; make it with expert_weight (or expert), or leave "
            "the option out"
        )
    if not facts.in_blocks:
        for key in filter(config.asks, ("quantize", "near_ranks", "keep_unsharded")):
            if getattr(config, key):
                yield key, "no block has a sharded parameter; leave it out"
    if config.quantize != "none" and (why := _nothing_to_quantize(facts)):
        yield "quantize", why
    blocks = range(len(facts.structure.blocks))
    if config.keep_unsharded and all(facts.keeps(block) is not None for block in blocks):
        yield "keep_unsharded", "rules decide it for every block; leave one of them out"
    if config.keep_unsharded == "all" and config.near_ranks:
        yield "near_ranks", (
            'all blocks stay unsharded (keep_unsharded = "all"), so that none is gathered from '
            "slices; leave one of them out"
        )
    sizes = {facts.shape.axis(s.expert).size for s in facts.sharded}
    near = config.reduce
    if isinstance(near, int) and near and 1 < max(sizes, default=1) <= near:
        yield "reduce", (
            f"the weight group has {max(sizes)} ranks, all of them near, and gradients are summed "
            "at once; leave it out"
        )
    if config.grad_dtype is not None and not any(
        _widens(s, config.grad_dtype) for s in facts.shardings
        if not facts.rules_of(s, {"grad_dtype"})
    ):  # fmt: skip
        yield "grad_dtype", "no parameter is narrower, and .grad has the parameter's dtype at least"
    casting = any(m.rule.options().keys() & _OF_CASTS for m in facts.structure.rules.matched)
    uncast = config.compute_dtype is None and "compute_dtype" not in config.model_fields_set
    if not config.cast_inputs and uncast and not casting:
        yield "cast_inputs", "nothing is cast without weight_parallel.compute_dtype; set that, too"


def _nothing_to_quantize(facts: _Facts) -> str:
    """Why ``weight_parallel.quantize`` quantizes no weight, also where it is sharded over ranks;
    empty if it quantizes some."""
    own = [s for s in facts.in_blocks if s.options.custom_gather is None]  # by no class, no rule
    free = [s for s in own if not facts.rules_of(s, {"quantize"})]
    if not free:
        return "rules or classes say what every weight of the blocks is gathered as; leave it out"
    for sharding in free:
        size, length = facts.shape.axis(sharding.expert).size, sharding.shape[sharding.dim]
        padded = math.prod(sharding.shape) // max(length, 1) * (-(-length // size) * size)
        if padded * sharding.dtypes.compute.itemsize > sharding.options.coalesce_bytes:
            return ""
    largest = max(free, key=lambda s: math.prod(s.shape))
    nbytes = human(math.prod(largest.shape) * largest.dtypes.compute.itemsize)
    return (
        "no sharded weight of a block is larger than coalesce_bytes "
        f"({facts.config.coalesce_bytes}), other than those of which rules say what they are "
        f"gathered as; the largest is {largest.name} ({nbytes}). Lower it, or name weights in a "
        "rule with quantize, which takes them whatever their size"
    )


def _widens(sharding: ParameterSharding, dtype: str) -> bool:
    own = sharding.parameter.dtype
    return torch.promote_types(own, DTYPES[dtype]) != own


def _acts_on_nothing(
    matched: MatchedRule, facts: _Facts, own: Sequence[ParameterSharding], blocks: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Keys of a rule that matches nothing of their kind."""
    sharded = [s for s in own if s.unit is not None]
    named = ", ".join(block.name for block in facts.structure.blocks)
    for key in matched.rule.options():
        if key in MODULE_KEYS:
            if not matched.modules:
                yield key, "is for modules, and the rule matches none"
            continue
        what, there = "a parameter", matched.parameters > 0 or key == "compute_dtype"
        if key in BLOCK_KEYS:
            what, there = "a block", bool(blocks)
        elif key in ("quantize", "near_ranks"):
            plain = [s for s in sharded if not hasattr(s.parameter, "fsdp_pre_all_gather")]
            what, there = "a sharded parameter in a block, plain", any(s.block >= 0 for s in plain)
        elif key in SHARDED_KEYS:
            owned = key == "axis" and facts.shape.expert > 1
            what, there = "a sharded parameter", bool(sharded) or owned
        if not there:
            yield key, (
                f"has no effect: what the rule matches is not {what}, and contains none; blocks "
                f"are {named}"
            )


def _changes_nothing(
    matched: MatchedRule, facts: _Facts, own: Sequence[ParameterSharding], blocks: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Keys of a rule whose value leaves everything that the rule matches as it is."""
    options = matched.rule.options()
    if options.get("axis") == "experts" and not facts.has_expert_axis:
        yield "axis", (
            '= "experts" has no effect: the mesh has no axis for experts; make it with '
            "expert_weight (or expert), or leave it out"
        )
    grad = options.get("grad_dtype")
    if grad is not None and not any(_widens(s, grad) for s in own):
        yield "grad_dtype", (
            f'= "{grad}" has no effect: no parameter that the rule matches is narrower, and .grad '
            "has the parameter's dtype at least"
        )
    replaced = [facts.structure.blocks[b].rule_options.get("gather_before_modules") for b in blocks]
    if blocks and all(replaced) and options.get("gather_before") not in (None, "attention"):
        text = "has no effect beside gather_before_modules, which replace it: leave one out"
        yield "gather_before", text
    sharded = [s for s in own if s.unit is not None]
    packed = [s.options.coalesce_bytes < 0 for s in sharded]
    if options.get("coalesce_bytes") and sharded and all(packed):
        yield "coalesce_bytes", (
            "has no effect: what rules quantize or pack shares no collectives; leave it out"
        )
    inside = [s for s in own if s.block >= 0]
    if options.get("near_ranks") and inside:
        everything = facts.config.keep_unsharded == "all"
        keeps = [facts.keeps(s.block) for s in inside]
        if all(everything if kept is None else kept for kept in keeps):
            yield "near_ranks", (
                "has no effect: the blocks stay unsharded, so that no gather follows; leave it out"
            )
    if options.get("keep_unsharded") and not any(s.block in blocks for s in facts.in_blocks):
        yield "keep_unsharded", "has no effect: the blocks have no sharded parameter; leave it out"
    for key, end in (("forward_prefetch", max), ("backward_prefetch", min)):
        last = end(range(len(facts.structure.blocks)))
        follows = key == "forward_prefetch" and facts.structure.head is not None
        if options.get(key) and set(blocks) == {last} and not follows:
            yield key, "has no effect: no block comes after the matched one; leave it out"
