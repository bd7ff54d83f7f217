"""Decides for every parameter its unit and the dimension on which it is sharded. Pure.

Both :func:`internsp.parallelize` and ``internsp plan`` call it, so that a plan cannot differ from
what runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torch import nn

from internsp.base.names import ancestors, did_you_mean, within
from internsp.config import PlanRule, WeightParallelConfig
from internsp.dtensor.tensor_parallel import largest_part, own_part
from internsp.errors import LayoutError, StructureError
from internsp.structure.blocks import Structure
from internsp.structure.dtypes import WeightDtypes
from internsp.structure.rules import BLOCK_KEYS, MODULE_KEYS, NO_RULES, Rules

if TYPE_CHECKING:  # loaded where a rule names functions, or a class has them
    from internsp.schedule.extended import ExtendedGather
    from internsp.schedule.packed import CustomAllGather
    from internsp.structure.own_class import Extend

WEIGHT_KEYS = frozenset(PlanRule.model_fields) - BLOCK_KEYS - MODULE_KEYS - {"match"}


@dataclass(frozen=True)
class ParameterOwner:
    """A module that holds a parameter, and the parameter's name in it.

    Attributes:
        others: further names of the module, where several modules hold the module.
    """

    module_name: str
    module: nn.Module
    name: str
    others: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The parameter's fully qualified name in this module."""
        return f"{self.module_name}.{self.name}" if self.module_name else self.name


@dataclass(frozen=True)
class WeightOptions:
    """Options of one sharded weight's collectives, from its plan rules or the configuration.

    Attributes:
        coalesce_bytes: a weight of at most so many unsharded bytes shares collectives with its
            neighbors.
        offload: which of its shard, gradient sum and optimizer state are in host memory.
        near_ranks: near ranks that keep slices of it after the first gather of a step.
        quantize: to what its shards are quantized for the all-gather: ``none``, ``int8``, ``fp8``.
        custom_gather: a user's functions, or those of the weight's class, that pack the shard
            before its all-gather and unpack the gathered bytes after it.
    """

    coalesce_bytes: int
    offload: tuple[str, ...]
    near_ranks: int
    quantize: str
    custom_gather: CustomAllGather | ExtendedGather | None = None

    @classmethod
    def of(
        cls, config: WeightParallelConfig, rule_options: Mapping[str, Any], name: str
    ) -> WeightOptions:
        """The options of weight ``name``: ``rule_options``, or else those of ``config``.

        Raises:
            StructureError: a rule names functions for its all-gather, and another quantizes it.
        """
        options = {
            f.name: getattr(config, f.name) for f in fields(cls) if f.name != "custom_gather"
        }
        if config.granularity == "module":
            options["coalesce_bytes"] = 0
        options |= {key: value for key, value in rule_options.items() if key in options}
        quantized = rule_options.get("quantize", "none") != "none"
        own = None
        if "pre_all_gather" in rule_options:
            from internsp.schedule.packed import CustomAllGather

            own = CustomAllGather.of(rule_options)
        if own is not None and quantized:
            raise StructureError(
                f"weight_parallel.rules: rules give {name} a pre_all_gather and quantize = "
                f"{rule_options['quantize']!r}: only one of the two can pack the shard"
            )
        if own is not None or quantized:  # a rule names it, whatever its size
            options["coalesce_bytes"] = -1
        return cls(**options, custom_gather=own)


@dataclass(frozen=True)
class ParameterSharding:
    """How a parameter is sharded: its unit, dimension, dtypes and options.

    Attributes:
        owners: all modules that share it; the first gives its name.
        unit: name of its unit; ``None``: small, and therefore replicated.
        block: index of its block, -1 outside the blocks.
        dim: the sharded dimension.
        expert: whether it is an expert's; if sharded, then along the mesh's axis of experts.
        dtypes: in which it is gathered, reduced and accumulated.
        autocasts: whether autocast decides its compute dtype (a linear layer's weight, or that of
            a module with the attribute ``autocasts``).
        options: of its collectives.
    """

    parameter: nn.Parameter
    owners: tuple[ParameterOwner, ...]
    unit: str | None
    block: int
    dim: int
    expert: bool
    autocasts: bool
    dtypes: WeightDtypes
    options: WeightOptions

    @property
    def name(self) -> str:
        """Its fully qualified name in the first owner."""
        return self.owners[0].full_name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that the weight group shards: this tensor-parallel rank's part of the parameter."""
        return tuple(own_part(self.parameter).shape)


def owners_of(model: nn.Module) -> dict[nn.Parameter, tuple[ParameterOwner, ...]]:
    """The modules that hold each parameter, in the order of registration."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    found: dict[nn.Parameter, tuple[ParameterOwner, ...]] = {}
    for module, (module_name, *others) in names.items():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owner = ParameterOwner(module_name, module, name, tuple(others))
                found[parameter] = (*found.get(parameter, ()), owner)
    return found


def plan_sharding(
    model: nn.Module,
    structure: Structure,
    config: WeightParallelConfig,
    expert: int = 1,
    extend: Extend | None = None,
) -> list[ParameterSharding]:
    """Decide the sharding of every parameter of ``model`` that no rule ignores.

    Args:
        expert: number of ranks that own different experts. With several, an expert's parameter
            cannot be replicated over all ranks, so that even a small one is sharded.
        extend: takes parameters of a class with all-gather functions; ``None``: they are refused.

    Returns:
        One entry a parameter, in the order of registration.

    Raises:
        StructureError: when an expert's weight is shared with another module, or two rules of the
            plan set the same option of one parameter.
    """
    found = []
    for parameter, owners in owners_of(model).items():
        rule_options = structure.rules.options_for([o.full_name for o in owners], WEIGHT_KEYS)
        if not rule_options.get("ignore"):
            made = _sharding(parameter, owners, structure, config, expert, rule_options, extend)
            found.append(made)
    require_own_experts(model, found, expert)
    return found


def require_own_experts(
    model: nn.Module, shardings: Iterable[ParameterSharding], expert: int
) -> None:
    """Check that the model declares on how many ranks its experts are, if not all on each.

    The declaration is the attribute ``expert_ranks`` of the module that holds experts, or of one
    above it. A model that knows of no other ranks computes all tokens with what it has: without the
    check each owner's experts would train as a model of their own.

    Args:
        expert: number of ranks that own different experts.

    Raises:
        StructureError: a model declares another number; without a declaration it is 1.
    """
    for sharding in shardings:
        if not sharding.expert:
            continue
        around = map(model.get_submodule, (*ancestors(sharding.owners[0].module_name), ""))
        own = (getattr(module, "expert_ranks", None) for module in around)
        declared = next((ranks for ranks in own if ranks is not None), 1)
        if declared == expert:
            continue
        name = sharding.name
        if declared == 1:
            raise StructureError(
                f"the mesh has expert = {expert}, ranks that own different experts, but the model "
                f"does not declare that it sends tokens to the owners of {name} (nor is it an "
                "internsp.MixtureOfExperts, or called by transformers' ExpertsInterface). Make the "
                "mesh with expert = 1 and shard all experts over expert_weight; or, for a model "
                "that exchanges tokens over mesh.expert_group itself, set expert_ranks = "
                "mesh.expert on the module that does so (docs/howto/experts.md)"
            )
        raise StructureError(
            f"the model declares expert_ranks = {declared!r} for {name}, but the mesh has "
            f"expert = {expert}: build the model for the mesh's expert degree, or the mesh for "
            "the model's"
        )


def _sharding(
    parameter: nn.Parameter,
    owners: tuple[ParameterOwner, ...],
    structure: Structure,
    config: WeightParallelConfig,
    expert: int,
    rule_options: Mapping[str, Any],
    extend: Extend | None,
) -> ParameterSharding:
    first = owners[0]
    options = WeightOptions.of(config, rule_options, first.full_name)
    own = is_expert([o.full_name for o in owners], config, rule_options)
    dtypes = WeightDtypes.of(parameter, config, rule_options)
    least = rule_options.get("min_shard_elements", config.min_shard_elements)
    fewest = 1 if "min_shard_elements" in rule_options else 2  # dimensions
    small = parameter.ndim < fewest or math.prod(largest_part(parameter)) < least
    of_class = hasattr(parameter, "fsdp_pre_all_gather")
    if of_class:
        from internsp.structure.own_class import functions_of  # few models have any

        made = functions_of(first, parameter, own, expert, options, config, dtypes, extend)
        options = WeightOptions(-1, (), 0, "none", made)
    if small and not of_class and not (own and expert > 1):
        return ParameterSharding(parameter, owners, None, -1, 0, own, False, dtypes, options)
    if parameter.ndim == 0:
        raise StructureError(
            f"{first.full_name} is an expert's and a scalar: it cannot be sharded, and with "
            f"expert = {expert} it is not the same on all ranks; give it a dimension"
        )
    blocks = {block_of(place, structure) for o in owners for place in (o.module_name, *o.others)}
    # A weight shared by several blocks, or by a block and the outside, is a root unit: unsharded in
    # a slot of its own from the model's entry to the end of backward, as no block is its last user.
    block = blocks.pop() if len(blocks) == 1 else -1
    root_unit = first.full_name if blocks else first.module_name
    unit = structure.blocks[block].name if block >= 0 else root_unit
    if block < 0 and not blocks:  # in no unit: a rest of an enclosing block
        around = {enclosing_block_of(o.module_name, structure) for o in owners}
        number = around.pop()
        if around:
            unit = first.full_name
        elif number >= 0:
            unit = structure.enclosing[number].name
    dim: int = rule_options.get("shard_dim", getattr(first.module, "shard_dim", 0))
    if not -parameter.ndim <= dim < parameter.ndim:
        raise LayoutError(
            f"cannot shard dimension {dim} of {first.full_name}, of shape {list(parameter.shape)}"
        )
    dim %= parameter.ndim
    if of_class and dim:
        raise LayoutError(
            f"{first.full_name} is a {type(parameter).__name__} with fsdp_pre_all_gather, of which "
            "shards are rows: leave out shard_dim"
        )
    autocasts = getattr(first.module, "autocasts", isinstance(first.module, nn.Linear))
    autocasts = autocasts and not of_class
    return ParameterSharding(parameter, owners, unit, block, dim, own, autocasts, dtypes, options)


def is_expert(
    names: Collection[str], config: WeightParallelConfig, rule_options: Mapping[str, Any]
) -> bool:
    """Whether a parameter is an expert's, by a rule's ``axis`` or else by its ``names``.

    Raises:
        StructureError: ``weight_parallel.expert_parameters`` matches one of its names and not
            another.
    """
    if "axis" in rule_options:
        return bool(rule_options["axis"] == "experts")
    matched = {any(within(name, pattern) for pattern in config.expert_parameters) for name in names}
    if len(matched) > 1:
        raise StructureError(
            "an expert's weight is shared with another module "
            f"({', '.join(names)}), but experts may be sharded along an axis of "
            "their own: untie it, or change weight_parallel.expert_parameters"
        )
    return matched.pop()


def experts_among(names: Iterable[str], config: WeightParallelConfig, rules: Rules) -> set[str]:
    """Names of experts' parameters among ``names``."""
    return {
        name for name in names if is_expert([name], config, rules.options_for([name], {"axis"}))
    }


def require_patterns_matched(names: Iterable[str], config: WeightParallelConfig) -> None:
    """Check that patterns of ``weight_parallel.expert_parameters``, unless default, match (WP-7).

    Raises:
        StructureError: a pattern matches no parameter; lists the modules that may be meant.
    """
    names = list(names)
    usual = type(config).model_fields["expert_parameters"].default
    for pattern in config.expert_parameters if config.expert_parameters != usual else ():
        if not any(within(name, pattern) for name in names):
            parts = [part for name in names for part in name.split(".") if not part.isdigit()]
            meant = did_you_mean(pattern, [*parts, *_owner_candidates(names)])
            raise StructureError(
                f"weight_parallel.expert_parameters: {pattern!r} matches no parameter{meant}; "
                f"candidates: {', '.join(_owner_candidates(names))}"
            )


def require_experts(
    names: Iterable[str], config: WeightParallelConfig, rules: Rules = NO_RULES
) -> None:
    """Check that ``names`` include experts' parameters, for a mesh with an experts axis (WP-7).

    Raises:
        StructureError: none is an expert's; lists the modules that may be meant.
    """
    names = list(names)
    if experts_among(names, config, rules):
        return
    raise StructureError(
        "the mesh has an axis for experts (expert_weight or expert), but no parameter's name "
        f"matches weight_parallel.expert_parameters = {list(config.expert_parameters)}; "
        "candidates: "
        f"{', '.join(_owner_candidates(names))}"
    )


def _owner_candidates(names: Iterable[str]) -> list[str]:
    """Modules that hold the parameters ``names``, with ``*`` for numbers."""
    modules = {re.sub(r"\.\d+(?=\.|$)", ".*", name.rpartition(".")[0]) for name in names}
    return sorted(modules - {""})


def block_of(module_name: str, structure: Structure) -> int:
    """Index of the unit that contains a module; -1: none does."""
    return _first_around(module_name, structure.unit_of)


def enclosing_block_of(module_name: str, structure: Structure) -> int:
    """Index of the enclosing block that contains a module; -1: none does."""
    return _first_around(module_name, structure.enclosing_of)


def _first_around(module_name: str, number_of: Mapping[str, int]) -> int:
    """The lowest number of the module or of one around it; -1: none has one.

    Each name is looked up, since models have thousands of blocks.
    """
    around = (name for name in ancestors(module_name) if name in number_of)
    return min(map(number_of.__getitem__, around), default=-1)
