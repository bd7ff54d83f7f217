"""A program's torch optimizer with its state over all ranks, those of the replicas too (ZeRO)."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from internsp.errors import ConfigError
from internsp.fsdp.attach import ATTRIBUTE, attach, plan_of
from internsp.fsdp.module import FSDPModule

if TYPE_CHECKING:
    from internsp.optim.zero import ZeroOptimizer


def zero_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *others: torch.optim.Optimizer,
    max_grad_norm: float | None = None,
) -> ZeroOptimizer:
    """``optimizer`` as a :class:`internsp.ZeroOptimizer` with the same groups, settings and state.

    Write ``optimizer = internsp.fsdp.zero_optimizer(model, optimizer)`` below the line that makes
    it, on a mesh of two dimensions, or on any with an optimizer of whole matrices (Muon), which
    steps each on one rank. Makes the communicator, as a first forward does. Collective.

    Args:
        others: more optimizers of this model, which the one that is returned steps, too: before
            their first steps.
        max_grad_norm: as of ``clip_grad_norm_``, which has no ``.grad`` to read any more; the
            norm is ``optimizer.grad_norm`` after a step.

    Raises:
        ValueError: ``model`` is no module of ``fully_shard`` or has such an optimizer already, a
            parameter is not sharded, or one that is trained is in no group, or one of several
            optimizers has state.
        ConfigError: the mesh has no replicas: the state is over all ranks without this.
        StructureError: a trained parameter has a class of its own; or a setter was called that
            needs ``.grad``, or gives weights other divisors: experts on a mesh of their own need
            the factor of the others.
    """
    from internsp.optim.methods import is_known_whole_matrix  # few programs need them
    from internsp.optim.zero import ZeroOptimizer

    if isinstance(model, FSDPModule) and ATTRIBUTE not in vars(model):
        attach(model)
    found = plan_of(model, "zero_optimizer")
    if found.zero:
        raise ValueError("zero_optimizer: the gradients of this model have a ZeroOptimizer already")
    every = (optimizer, *others)
    whole = any(is_known_whole_matrix(type(each)) for each in every)
    mesh = found.communicator.mesh
    if mesh.dense.replicas == mesh.experts.replicas == 1 and not whole:
        raise ConfigError(
            "internsp.fsdp.zero_optimizer: the mesh has no replicas, so that the state of any "
            "optimizer is over all ranks: leave it out, or give fully_shard a mesh of two "
            "dimensions (replicate, shard)"
        )
    if others and any(each.state for each in every):
        raise ValueError("zero_optimizer: give several optimizers before their first steps")
    found.require_unchanged()
    groups = list(optimizer.param_groups)
    for other in others:
        own = {"optimizer": type(other)}
        groups += [_taken(other, group) | own for group in other.param_groups]
    made = ZeroOptimizer(
        found.communicator, type(optimizer), max_grad_norm=max_grad_norm, param_groups=groups,
        **_taken(optimizer, optimizer.defaults),
    )  # fmt: skip
    if optimizer.state:
        made.load_state_dict(optimizer.state_dict())
    fresh = iter(made.param_groups)
    for each in every:  # for a schedule that was made of it,
        each.param_groups = [{**group, **next(fresh)} for group in each.param_groups]
        vars(each)["_opt_called"] = True  # which would warn that nothing has stepped
    made.param_groups = [group for each in every for group in each.param_groups]
    return made


def _taken(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a group, and those settings that its class is called with."""
    known = {"params", "param_names", *inspect.signature(type(optimizer)).parameters}
    return {name: value for name, value in settings.items() if name in known}
