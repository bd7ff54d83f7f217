"""Optimizer groups: which settings in ``param_groups`` each parameter has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member

ParamGroups = Iterable[dict[str, Any] | nn.Parameter | tuple[str, nn.Parameter]]


def trainable_members(communicator: ISPCommunicator) -> list[Member]:
    """The trainable parameters: replicated ones, then sharded weights in the order of the model."""
    found: list[Member] = [*communicator.replicated.members, *communicator.replicated.sharded]
    return [member for member in found if member.requires_grad]


def optimizer_groups(
    communicator: ISPCommunicator, param_groups: ParamGroups | None
) -> tuple[list[dict[str, Any]], dict[Member, int]]:
    """The groups of settings for torch, and the index of each parameter's group.

    A pipeline's chunk may be frozen as a whole: its optimizer then has one group without
    parameters, and takes part in the gradient norm, which all stages compute together.

    Args:
        param_groups: dictionaries with ``"params"``: the model's parameters after ``parallelize``
            (or pairs of name and parameter, as ``named_parameters`` gives); or such parameters
            without a dictionary, which are one group; ``None``: one group of all.

    Raises:
        ValueError: for a parameter that does not belong to this communicator, is in two groups, or
            is trainable but in no group (its gradient would never be used or dropped).
    """
    trainable = trainable_members(communicator)
    if not trainable and communicator.mesh.pipeline == 1:
        raise ValueError("ZeroOptimizer: the model has no trainable parameter")
    given = [m.parameter for m in trainable] if param_groups is None else list(param_groups)
    dicts = [item for item in given if isinstance(item, dict)]
    if len(dicts) < len(given):  # parameters without a dictionary are one group, as for torch
        if dicts:
            raise ValueError("param_groups holds dictionaries and parameters: give one of the two")
        dicts = [{"params": given}]
    by_id = {id(m.parameter): m for m in trainable}
    groups: list[dict[str, Any]] = []
    group_index: dict[Member, int] = {}
    for index, group in enumerate(dicts):
        chosen = _parameters(group, index)
        for parameter in chosen:
            member = by_id.get(id(parameter))
            if member is None:
                raise ValueError(
                    f"param_groups[{index}] holds a parameter of shape {list(parameter.shape)} "
                    "that is frozen or not this communicator's; take the parameters from the "
                    "model after parallelize()"
                )
            if member in group_index:
                raise ValueError(
                    f"{member.name} is in param_groups {group_index[member]} and {index}"
                )
            group_index[member] = index
        groups.append({**group, "params": chosen})
    missing = [m.name for m in trainable if m not in group_index]
    if missing:
        raise ValueError(
            f"trainable parameters in no group: {', '.join(missing)}; add them, or freeze them "
            "(requires_grad_(False)) before parallelize()"
        )
    return groups or [{"params": []}], group_index


def _parameters(group: dict[str, Any], index: int) -> list[nn.Parameter]:
    if "params" not in group:
        raise ValueError(f"param_groups[{index}] has no 'params'")
    given = group["params"]
    if isinstance(given, nn.Parameter):
        return [given]
    return [p[1] if isinstance(p, tuple) else p for p in given]
