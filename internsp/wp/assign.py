"""Pure: which unit every parameter of a model belongs to, and on which dimension it is cut.

Both :func:`internsp.parallelize` and ``internsp plan`` ask it, so that a plan cannot differ from
what runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from internsp.config import WeightParallelConfig
from internsp.errors import StructureError
from internsp.wp.blocks import Structure

EMBEDDING_CUTS = {"vocabulary": 0, "hidden": 1}


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
        autocasts: whether autocast decides its compute dtype (a linear layer's weight, or that of
            a module with the attribute ``autocasts``).
    """

    parameter: nn.Parameter
    owners: tuple[Owner, ...]
    unit: str | None
    block: int
    dim: int
    autocasts: bool

    @property
    def name(self) -> str:
        """Fully qualified, of the first owner."""
        return self.owners[0].full_name


def assign(
    model: nn.Module, structure: Structure, config: WeightParallelConfig
) -> list[Assignment]:
    """Every parameter of ``model``, in the order of registration.

    Raises:
        StructureError: when a block's weight is shared with another unit, or the model is
            parallel already.
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
    return [_assign(parameters[key], tuple(o), structure, config) for key, o in shared.items()]


def _assign(
    parameter: nn.Parameter,
    owners: tuple[Owner, ...],
    structure: Structure,
    config: WeightParallelConfig,
) -> Assignment:
    first = owners[0]
    if parameter.ndim < 2 or parameter.numel() < config.min_shard_elements:
        return Assignment(parameter, owners, None, -1, 0, False)
    blocks = {_block_of(o.module_name, structure) for o in owners}
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
    return Assignment(parameter, owners, unit, block, dim, autocasts)


def _block_of(module_name: str, structure: Structure) -> int:
    for i, block in enumerate(structure.blocks):
        if module_name == block.name or module_name.startswith(block.name + "."):
            return i
    return -1
