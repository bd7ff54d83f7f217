"""Pure: which unit every parameter of a model belongs to, and on which dimension it is cut.

Both :func:`internsp.parallelize` and ``internsp plan`` ask it, so that a plan cannot differ from
what runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import DTensor

from internsp.config import WeightParallelConfig
from internsp.errors import StructureError
from internsp.plan.blocks import Structure, did_you_mean
from internsp.plan.dtypes import WeightDtypes

EMBEDDING_CUTS = {"vocabulary": 0, "hidden": 1}
PATTERNS = ("experts", "own_dtype")
"""Options of ``weight_parallel`` that name parameters by :func:`within`."""


@dataclass(frozen=True)
class Owner:
    """One place where a module holds a parameter."""

    module_name: str
    module: nn.Module
    name: str

    @property
    def full_name(self) -> str:
        """The parameter's fully qualified name at this place."""
        return f"{self.module_name}.{self.name}" if self.module_name else self.name


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
    """

    parameter: nn.Parameter
    owners: tuple[Owner, ...]
    unit: str | None
    block: int
    dim: int
    expert: bool
    autocasts: bool
    dtypes: WeightDtypes

    @property
    def name(self) -> str:
        """Fully qualified, of the first owner."""
        return self.owners[0].full_name


def assign(
    model: nn.Module, structure: Structure, config: WeightParallelConfig, expert: int = 1
) -> list[Assignment]:
    """Every parameter of ``model``, in the order of registration.

    Args:
        expert: ranks that own different experts. Of several, what is replicated over all ranks
            cannot be an expert's, so that even a small one is cut.

    Raises:
        StructureError: when a block's weight is shared with another unit, an expert's with
            another module, or the model is parallel already.
    """
    shared: dict[int, list[Owner]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            owner = Owner(module_name, module, name)
            if isinstance(parameter, DTensor):
                raise StructureError(
                    f"{owner.full_name} is a DTensor already: parallelize a model once, and do "
                    "not combine it with FSDP"
                )
            parameters[id(parameter)] = parameter
            shared.setdefault(id(parameter), []).append(owner)
    return [
        _assign(parameters[key], tuple(o), structure, config, expert) for key, o in shared.items()
    ]


def _assign(
    parameter: nn.Parameter,
    owners: tuple[Owner, ...],
    structure: Structure,
    config: WeightParallelConfig,
    expert: int,
) -> Assignment:
    first = owners[0]
    own = _is_expert(owners, config.experts)
    # Of a shared weight one name is enough: it has one dtype.
    as_is = any(within(o.full_name, pattern) for o in owners for pattern in config.own_dtype)
    dtypes = WeightDtypes.of(parameter, config, as_is)
    small = parameter.ndim < 2 or parameter.numel() < config.min_shard_elements
    if small and not (own and expert > 1):
        return Assignment(parameter, owners, None, -1, 0, own, False, dtypes)
    if parameter.ndim == 0:
        raise StructureError(
            f"{first.full_name} is an expert's and a scalar: it cannot be cut, and with expert = "
            f"{expert} it is not the same on all ranks; give it a dimension"
        )
    blocks = {block_of(o.module_name, structure) for o in owners}
    if len(blocks) > 1:
        raise StructureError(
            f"{first.full_name} is shared between blocks or with the outside "
            f"({', '.join(o.full_name for o in owners)}): a block's weights must be its own; "
            "untie it, or keep it small (weight_parallel.min_shard_elements)"
        )
    block = blocks.pop()
    dim: int = getattr(first.module, "shard_dim", 0)
    if isinstance(first.module, nn.Embedding):
        dim = EMBEDDING_CUTS[config.embedding_cut]
    unit = structure.blocks[block].name if block >= 0 else first.module_name
    autocasts = getattr(first.module, "autocasts", isinstance(first.module, nn.Linear))
    return Assignment(parameter, owners, unit, block, dim, own, autocasts, dtypes)


def _is_expert(owners: tuple[Owner, ...], patterns: Sequence[str]) -> bool:
    matched = {any(within(o.full_name, pattern) for pattern in patterns) for o in owners}
    if len(matched) > 1:
        raise StructureError(
            "an expert's weight is shared with another module "
            f"({', '.join(o.full_name for o in owners)}), but experts may be cut along an axis of "
            "their own: untie it, or change weight_parallel.experts"
        )
    return matched.pop()


def within(name: str, pattern: str) -> bool:
    """Whether consecutive parts of a dotted name match a pattern's parts."""
    parts, wanted = name.split("."), pattern.split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(fnmatchcase, parts[i : i + len(wanted)], wanted)) for i in starts)


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


def require_experts(names: Iterable[str], config: WeightParallelConfig) -> None:
    """For a mesh with an axis for experts: the parameters ``names`` have some (WP-7).

    Raises:
        StructureError: none matches; lists the modules that may be meant.
    """
    names = list(names)
    if any(within(name, pattern) for name in names for pattern in config.experts):
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
    """Index of the block in which a module lies, -1 outside the blocks."""
    for i, block in enumerate(structure.blocks):
        if module_name == block.name or module_name.startswith(block.name + "."):
            return i
    return -1
