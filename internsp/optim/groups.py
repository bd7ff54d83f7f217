"""Optimizer groups: which settings in ``param_groups`` each parameter has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

from torch import nn

from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member, trained

ParamGroups = Iterable[dict[str, Any] | nn.Parameter | tuple[str, nn.Parameter]]


def trainable_members(communicator: ISPCommunicator) -> list[Member]:
    """The trainable parameters: replicated ones, then sharded weights in the order of the model."""
    members = communicator.replicated.all_parameters()
    return list(compress(members, trained(members)))


def optimizer_groups(
    communicator: ISPCommunicator, param_groups: ParamGroups | None
) -> tuple[list[dict[str, Any]], dict[Member, int]]:
    """The groups of settings for torch, and the index of each parameter's group.

    A pipeline's chunk may be frozen as a whole: its optimizer then has one group without
    parameters, and takes part in the gradient norm, which all stages compute together.

    Args:
        param_groups: dictionaries with ``"params"``: the model's parameters after ``parallelize``
            (or pairs of name and parameter, as ``named_parameters`` gives), trained or frozen; or
            such parameters without a dictionary, which are one group; ``None``: one group of all
            trained ones, in the order of the model.

    Raises:
        ValueError: for a parameter that does not belong to this communicator, is in two groups, or
            is trainable but in no group (its gradient would never be used or dropped).
    """
    trainable = trainable_members(communicator)
    # In the order of ``model.parameters()``: state is matched by it, and which parameters are
    # replicated differs between meshes.
    in_order, known = dict.fromkeys(communicator.parameters_of.values()), {*trainable}
    every = [member.parameter for member in in_order if member in known]
    given = every if param_groups is None else list(param_groups)
    if not given and communicator.mesh.pipeline == 1:
        raise ValueError(
            "ZeroOptimizer: the model has no trainable parameter: unfreeze some "
            "(requires_grad_(True)), or give those that will be trained later in param_groups"
        )
    dicts = [item for item in given if isinstance(item, dict)]
    if len(dicts) < len(given):  # parameters without a dictionary are one group, as for torch
        if dicts:
            raise ValueError("param_groups holds dictionaries and parameters: give one of the two")
        dicts = [{"params": given}]
    groups: list[dict[str, Any]] = []
    group_index: dict[Member, int] = {}
    for index, group in enumerate(dicts):
        chosen = members_of(communicator, group, f"param_groups[{index}]", group_index)
        group_index |= dict.fromkeys(chosen, index)
        groups.append({**group, "params": [member.parameter for member in chosen]})
    require_grouped(trainable, group_index)
    return groups or [{"params": []}], group_index


def members_of(
    communicator: ISPCommunicator,
    group: dict[str, Any],
    what: str,
    group_index: Mapping[Member, int],
) -> list[Member]:
    """The parameters of one group.

    Args:
        what: the group's name in errors.
        group_index: the groups before it.

    Raises:
        ValueError: a parameter is not this communicator's, or is in two groups.
    """
    by_id = {id(m.parameter): m for m in communicator.replicated.all_parameters()}
    chosen: list[Member] = []
    for parameter in _parameters(group, what):
        member = by_id.get(id(parameter))
        if member is None:
            raise ValueError(
                f"{what} holds a parameter of shape {list(parameter.shape)} that is not this "
                "communicator's; take the parameters from the model after parallelize()"
            )
        if member in group_index:
            before = f"param_groups[{group_index[member]}]"
            raise ValueError(f"{member.name} is in {before} and in {what}")
        if member in chosen:
            raise ValueError(f"{member.name} is in {what} twice")
        chosen.append(member)
    return chosen


def require_grouped(trainable: Iterable[Member], group_index: Mapping[Member, int]) -> None:
    """Check that every trained parameter is in a group.

    Raises:
        ValueError: its gradient would never be used or dropped.
    """
    missing = [member.name for member in trainable if member not in group_index]
    if missing:
        raise ValueError(
            f"trainable parameters in no group: {', '.join(missing)}; add them (to param_groups, "
            "or later by add_param_group), or freeze them (requires_grad_(False))"
        )


def require_unchanged(
    groups: Sequence[dict[str, Any]], group_index: Mapping[Member, int], rank: int
) -> None:
    """Check that groups hold as many parameters as they were given, which the buckets follow.

    Raises:
        ValueError: a program has changed a group's list.
    """
    given = Counter(group_index.values())
    for index, group in enumerate(groups):
        if len(group["params"]) != given[index]:
            raise ValueError(
                f"param_groups[{index}] was given {given[index]} parameters and holds "
                f"{len(group['params'])} on rank {rank}, while its optimizer steps those that it "
                "was given: freeze what is not to be stepped (requires_grad_(False)), add others "
                "by add_param_group"
            )


def _parameters(group: dict[str, Any], what: str) -> list[nn.Parameter]:
    if "params" not in group:
        raise ValueError(f"{what} has no 'params'")
    given = group["params"]
    if isinstance(given, nn.Parameter):
        return [given]
    return [p[1] if isinstance(p, tuple) else p for p in given]
