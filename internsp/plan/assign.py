"""Pure: which unit every parameter of a model belongs to, and on which dimension it is cut.

Both :func:`internsp.parallelize` and ``internsp plan`` ask it, so that a plan cannot differ from
what runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from internsp.config import PlanRule, WeightParallelConfig
from internsp.config.names import within
from internsp.dtensor.tensor_parallel import largest_part, own_part
from internsp.errors import LayoutError, StructureError
from internsp.packed import OwnGather
from internsp.plan.blocks import Structure, did_you_mean
from internsp.plan.dtypes import WeightDtypes
from internsp.plan.rules import BLOCK_KEYS, MODULE_KEYS, NO_RULES, Rules

EMBEDDING_CUTS = {"vocabulary": 0, "hidden": 1}
PATTERNS = ("experts", "own_dtype")
"""Options of ``weight_parallel`` that name parameters by :func:`within`."""
WEIGHT_KEYS = frozenset(PlanRule.model_fields) - BLOCK_KEYS - MODULE_KEYS - {"match"}


@dataclass(frozen=True)
class Owner:
    """One place where a module holds a parameter.

    Attributes:
        others: further names of the module, where several modules hold it.
    """

    module_name: str
    module: nn.Module
    name: str
    others: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The parameter's fully qualified name at this place."""
        return f"{self.module_name}.{self.name}" if self.module_name else self.name


@dataclass(frozen=True)
class WeightOptions:
    """How one cut weight travels: as configured for all, or as a rule of the plan says.

    Attributes:
        coalesce_bytes: up to so many unsharded it shares collectives with its neighbors.
        offload: what of it lies in host memory.
        quantize: what its shards are rounded to for their all-gather: ``none``, ``int8``, ``fp8``.
        quantize_min_elements: of fewer elements it is not rounded.
        reshard_after_forward: near ranks that keep slices of it after the first gather of a step.
        own: what a user's functions send in the place of its shards.
    """

    coalesce_bytes: int
    offload: tuple[str, ...]
    reshard_after_forward: int
    quantize: str
    quantize_min_elements: int
    own: OwnGather | None = None

    @classmethod
    def of(cls, config: WeightParallelConfig, said: Mapping[str, Any], name: str) -> WeightOptions:
        """What ``said`` of one weight says, and ``config`` of the others.

        Raises:
            StructureError: a rule names functions for its all-gather, and another quantizes it.
        """
        options = {f.name: getattr(config, f.name) for f in fields(cls) if f.name != "own"}
        if config.granularity == "module":
            options["coalesce_bytes"] = 0
        options |= {key: value for key, value in said.items() if key in options}
        quantized = said.get("quantize", "none") != "none"
        own = OwnGather.of(said)
        if own is not None and quantized:
            raise StructureError(
                f"weight_parallel.plan: rules give {name} a pre_all_gather and quantize = "
                f"{said['quantize']!r}: one of the two decides what travels"
            )
        if own is not None or quantized:  # named, and so whatever its size
            options |= {"quantize_min_elements": 0, "coalesce_bytes": -1}
        return cls(**options, own=own)


@dataclass(frozen=True)
class Assignment:
    """Where a parameter goes.

    Attributes:
        owners: all places that share it; the first names it.
        unit: name of its unit, or ``None``: small, replicated.
        block: index of its block, -1 outside the blocks.
        dim: the dimension that is cut.
        expert: whether it is an expert's, and cut (if it is) along the mesh's axis of experts.
        dtypes: what it is gathered, reduced and accumulated in.
        autocasts: whether autocast decides its compute dtype (a linear layer's weight, or that of
            a module with the attribute ``autocasts``).
        options: how it travels.
    """

    parameter: nn.Parameter
    owners: tuple[Owner, ...]
    unit: str | None
    block: int
    dim: int
    expert: bool
    autocasts: bool
    dtypes: WeightDtypes
    options: WeightOptions

    @property
    def name(self) -> str:
        """Fully qualified, of the first owner."""
        return self.owners[0].full_name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what the weight group cuts: this tensor rank's part, where there are several."""
        return tuple(own_part(self.parameter).shape)


def places_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """The names of each module: several of one that several modules hold."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(name)
    return found


def assign(
    model: nn.Module, structure: Structure, config: WeightParallelConfig, expert: int = 1
) -> list[Assignment]:
    """Every parameter of ``model``, in the order of registration, but those that a rule ignores.

    Args:
        expert: ranks that own different experts. Of several, what is replicated over all ranks
            cannot be an expert's, so that even a small one is cut.

    Raises:
        StructureError: when an expert's weight is shared with another module, or two rules of the
            plan say the same of one.
    """
    shared: dict[int, list[Owner]] = {}
    parameters: dict[int, nn.Parameter] = {}
    places = places_of(model)
    for module, (module_name, *others) in places.items():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            owner = Owner(module_name, module, name, tuple(others))
            parameters[id(parameter)] = parameter
            shared.setdefault(id(parameter), []).append(owner)
    found = []
    for key, owners in shared.items():
        said = structure.rules.say([o.full_name for o in owners], WEIGHT_KEYS)
        if not said.get("ignore"):
            of = _assign(parameters[key], tuple(owners), structure, config, expert, said)
            found.append(of)
    return found


def _assign(
    parameter: nn.Parameter,
    owners: tuple[Owner, ...],
    structure: Structure,
    config: WeightParallelConfig,
    expert: int,
    said: Mapping[str, Any],
) -> Assignment:
    first = owners[0]
    options = WeightOptions.of(config, said, first.full_name)
    own = is_expert([o.full_name for o in owners], config, said)
    # Of a shared weight one name is enough: it has one dtype.
    as_is = any(within(o.full_name, pattern) for o in owners for pattern in config.own_dtype)
    dtypes = WeightDtypes.of(parameter, config, as_is, said)
    elements = math.prod(largest_part(parameter))
    small = parameter.ndim < 2 or elements < config.min_shard_elements
    if "replicate_below" in said:
        small = elements * parameter.element_size() < said["replicate_below"]
        small = small or parameter.ndim == 0
    if small and not (own and expert > 1):
        return Assignment(parameter, owners, None, -1, 0, own, False, dtypes, options)
    if parameter.ndim == 0:
        raise StructureError(
            f"{first.full_name} is an expert's and a scalar: it cannot be cut, and with expert = "
            f"{expert} it is not the same on all ranks; give it a dimension"
        )
    blocks = {block_of(place, structure) for o in owners for place in (o.module_name, *o.others)}
    # What several blocks share, or a block and the outside, lies beside them: whole in a slot of
    # its own from the model's entry to the end of its backward, since no block is its last user.
    block = blocks.pop() if len(blocks) == 1 else -1
    beside = first.full_name if blocks else first.module_name
    unit = structure.blocks[block].name if block >= 0 else beside
    if block < 0 and not blocks:  # in no unit: of an enclosing block that is its rest
        around = {around_of(o.module_name, structure) for o in owners}
        number = around.pop()
        if around:
            unit = first.full_name
        elif number >= 0:
            unit = structure.enclosing[number].name
    dim = _dim(parameter, first, config, said)
    autocasts = getattr(first.module, "autocasts", isinstance(first.module, nn.Linear))
    return Assignment(parameter, owners, unit, block, dim, own, autocasts, dtypes, options)


def _dim(
    parameter: nn.Parameter, first: Owner, config: WeightParallelConfig, said: Mapping[str, Any]
) -> int:
    """The dimension that is cut: a rule's, the module's own (``shard_dim``), or the first."""
    dim: int = getattr(first.module, "shard_dim", 0)
    if isinstance(first.module, nn.Embedding):
        dim = EMBEDDING_CUTS[config.embedding_cut]
    dim = said.get("shard_dim", dim)
    if not -parameter.ndim <= dim < parameter.ndim:
        raise LayoutError(
            f"cannot cut dimension {dim} of {first.full_name}, of shape {list(parameter.shape)}"
        )
    return dim % parameter.ndim


def require_effect(assignments: Iterable[Assignment], structure: Structure) -> None:
    """Each rule of the plan has something to act on (:meth:`Rules.require_effect`)."""
    cut = [o.full_name for a in assignments if a.unit is not None for o in a.owners]
    structure.rules.require_effect(cut, [n for b in structure.blocks for n, _ in b.modules])


def is_expert(
    names: Collection[str], config: WeightParallelConfig, said: Mapping[str, Any]
) -> bool:
    """Whether a parameter is an expert's, by what rules say of it or by its ``names``.

    Raises:
        StructureError: by one of its names it is, by another it is not.
    """
    if "axis" in said:
        return bool(said["axis"] == "experts")
    matched = {any(within(name, pattern) for pattern in config.experts) for name in names}
    if len(matched) > 1:
        raise StructureError(
            "an expert's weight is shared with another module "
            f"({', '.join(names)}), but experts may be cut along an axis of "
            "their own: untie it, or change weight_parallel.experts"
        )
    return matched.pop()


def experts_among(names: Iterable[str], config: WeightParallelConfig, rules: Rules) -> set[str]:
    """Those of the parameters ``names`` that are experts'."""
    return {name for name in names if is_expert([name], config, rules.say([name], {"axis"}))}


def require_patterns_matched(names: Iterable[str], config: WeightParallelConfig) -> None:
    """Each pattern of :data:`PATTERNS` matches something, unless it is the default (WP-7).

    Raises:
        StructureError: one matches no parameter; lists the modules that may be meant.
    """
    names = list(names)
    for option in PATTERNS:
        given: tuple[str, ...] = getattr(config, option)
        if given == type(config).model_fields[option].default:
            continue
        for pattern in given:
            if not any(within(name, pattern) for name in names):
                parts = [part for name in names for part in name.split(".") if not part.isdigit()]
                meant = did_you_mean(pattern, [*parts, *_owners(names)])
                raise StructureError(
                    f"weight_parallel.{option}: {pattern!r} matches no parameter{meant}; "
                    f"candidates: {', '.join(_owners(names))}"
                )


def require_experts(
    names: Iterable[str], config: WeightParallelConfig, rules: Rules = NO_RULES
) -> None:
    """For a mesh with an axis for experts: the parameters ``names`` have some (WP-7).

    Raises:
        StructureError: none matches; lists the modules that may be meant.
    """
    names = list(names)
    if experts_among(names, config, rules):
        return
    raise StructureError(
        "the mesh has an axis for experts (expert_weight or expert), but no parameter's name "
        f"matches weight_parallel.experts = {list(config.experts)}; candidates: "
        f"{', '.join(_owners(names))}"
    )


def _owners(names: Iterable[str]) -> list[str]:
    """Modules that hold the parameters ``names``, with ``*`` for numbers."""
    modules = {re.sub(r"\.\d+(?=\.|$)", ".*", name.rpartition(".")[0]) for name in names}
    return sorted(modules - {""})


def block_of(module_name: str, structure: Structure) -> int:
    """Index of the unit in which a module lies, -1 outside of them."""
    for i, block in enumerate(structure.blocks):
        for name, _ in block.modules:
            if module_name == name or module_name.startswith(name + "."):
                return i
    return -1


def around_of(module_name: str, structure: Structure) -> int:
    """Number of the enclosing block in which a module lies, -1 outside of them."""
    for number, around in enumerate(structure.enclosing):
        if module_name == around.name or module_name.startswith(around.name + "."):
            return number
    return -1
