"""Parameters of a class with all-gather functions of its own (:mod:`internsp.wp.extended`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from internsp.base.bits import plain_parts
from internsp.config import WeightParallelConfig
from internsp.errors import StructureError
from internsp.schedule.extended import ExtendedGather
from internsp.structure.dtypes import WeightDtypes

if TYPE_CHECKING:  # it imports this module where a model has such parameters
    from internsp.structure.assign import ParameterOwner, WeightOptions

Extend = Callable[["ParameterOwner", nn.Parameter, bool, bool, WeightDtypes], ExtendedGather]
"""Shards a parameter of a class with all-gather functions of its own: first owner, parameter,
whether it is an expert's, whether shards lie in host memory, dtypes."""


def functions_of(
    owner: ParameterOwner, parameter: nn.Parameter, own: bool, expert: int,
    options: WeightOptions, config: WeightParallelConfig, dtypes: WeightDtypes,
    extend: Extend | None,
) -> ExtendedGather:  # fmt: skip
    """The functions of such a parameter.

    Args:
        own: it is an expert's; ``expert``: the number of ranks that own different ones.
        options: of the rules and the configuration.
        extend: ``None``: it cannot be taken.

    Raises:
        StructureError: it, or an option, cannot be taken.
    """
    name, kind = owner.full_name, type(parameter).__name__
    empty = any(part.is_meta for part in plain_parts(parameter))
    if extend is None or empty or (own and expert > 1):
        raise StructureError(
            f"{name} is a {kind} with fsdp_pre_all_gather, which only ranks can call, on values: "
            "no plan, run or pipeline of internsp takes it, nor the meta device, nor owners of "
            "experts (expert = 1 shards all of them). Call internsp.parallelize in a loop of your "
            "own, or hold a plain parameter"
        )
    if options.custom_gather is not None:
        raise StructureError(
            f"weight_parallel.rules: a rule gives {name} a pre_all_gather, which its class "
            f"{kind} has already (fsdp_pre_all_gather): leave one out"
        )
    hosted = "weights" in options.offload
    require_slots(name, kind, options.near_ranks, hosted and parameter.requires_grad, config)
    return extend(owner, parameter, own, hosted, dtypes)


def require_slots(
    name: str, kind: str, near: int, hosted: bool, config: WeightParallelConfig
) -> None:
    """Check what needs other slots than those of the chunk.

    Args:
        kind: its class.
        near: near ranks that would keep slices of it.
        hosted: it is trained, and its shard would lie in host memory.

    Raises:
        StructureError: they cannot be had.
    """
    if near or hosted or not config.memory_pool:
        raise StructureError(
            f"{name} is a {kind} with fsdp_pre_all_gather, of which no slices are kept, no trained "
            "shard in host memory, and no memory of its own: leave out near_ranks "
            "(reshard_after_forward as a number of ranks), offload of weights (CPUOffloadPolicy) "
            "and memory_pool = false"
        )
