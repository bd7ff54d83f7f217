"""Whose parameters: which group of settings each one belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member

ParamGroups = Iterable[dict[str, Any] | nn.Parameter | tuple[str, nn.Parameter]]


def members(communicator: ISPCommunicator) -> list[Member]:
    """Everything trainable: replicated parameters, then cut weights in the order of the model."""
    found: list[Member] = [*communicator.replicated.members, *communicator.replicated.sharded]
    return [member for member in found if member.requires_grad]


def assign(
    communicator: ISPCommunicator, param_groups: ParamGroups | None
) -> tuple[list[dict[str, Any]], dict[Member, int]]:
    """Settings groups for torch, and each parameter's place among them.

    A pipeline's chunk may be frozen as a whole: its optimizer has one group without parameters,
    and takes part in the norm, which all stages compute together.

    Args:
        param_groups: dictionaries with ``"params"``: the model's parameters after ``parallelize``
            (or pairs of name and parameter, as ``named_parameters`` gives), or these themselves
            for one group; ``None``: one group of all.

    Raises:
        ValueError: for a parameter that is not this communicator's, stands in two groups, or is
            trainable but in none (its gradient would pile up).
    """
    trainable = members(communicator)
    if not trainable and communicator.mesh.pipeline == 1:
        raise ValueError("ZeroOptimizer: the model has no trainable parameter")
    given = [m.parameter for m in trainable] if param_groups is None else list(param_groups)
    wanted = [item for item in given if isinstance(item, dict)]
    if len(wanted) < len(given):  # parameters alone are one group, as for torch
        if wanted:
            raise ValueError("param_groups holds dictionaries and parameters: give one of the two")
        wanted = [{"params": given}]
    by_id = {id(m.parameter): m for m in trainable}
    groups: list[dict[str, Any]] = []
    place: dict[Member, int] = {}
    for index, group in enumerate(wanted):
        chosen = _parameters(group, index)
        for parameter in chosen:
            member = by_id.get(id(parameter))
            if member is None:
                raise ValueError(
                    f"param_groups[{index}] holds a parameter of shape {list(parameter.shape)} "
                    "that is frozen or not this communicator's; take the parameters from the "
                    "model after parallelize()"
                )
            if member in place:
                raise ValueError(f"{member.name} is in param_groups {place[member]} and {index}")
            place[member] = index
        groups.append({**group, "params": chosen})
    forgotten = [m.name for m in trainable if m not in place]
    if forgotten:
        raise ValueError(
            f"trainable parameters in no group: {', '.join(forgotten)}; add them, or freeze them "
            "(requires_grad_(False)) before parallelize()"
        )
    return groups or [{"params": []}], place


def _parameters(group: dict[str, Any], index: int) -> list[nn.Parameter]:
    if "params" not in group:
        raise ValueError(f"param_groups[{index}] has no 'params'")
    given = group["params"]
    if isinstance(given, nn.Parameter):
        return [given]
    return [p[1] if isinstance(p, tuple) else p for p in given]
