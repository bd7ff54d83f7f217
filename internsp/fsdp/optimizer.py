"""A program's torch optimizer with its state over all ranks, those of the replicas too (ZeRO)."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch
from torch import nn

from internsp.errors import ConfigError
from internsp.fsdp.attach import ATTRIBUTE, attach, plan_of
from internsp.fsdp.module import FSDPModule

if TYPE_CHECKING:
    from internsp.optim.zero import ZeroOptimizer


def zero_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, max_grad_norm: float | None = None
) -> ZeroOptimizer:
    """``optimizer`` as a :class:`internsp.ZeroOptimizer` with the same groups, settings and state.

    Write ``optimizer = internsp.fsdp.zero_optimizer(model, optimizer)`` below the line that makes
    it, on a mesh of two dimensions. Makes the communicator, as a first forward does. Collective.

    Args:
        max_grad_norm: as of ``clip_grad_norm_``, which has no ``.grad`` to read any more; the
            norm is ``optimizer.grad_norm`` after a step.

    Raises:
        ValueError: ``model`` is no module of ``fully_shard`` or has such an optimizer already, a
            parameter is not sharded, or one that is trained is in no group.
        ConfigError: the mesh has no replicas: the state is over all ranks without this.
        StructureError: a setter was called that needs ``.grad``.
    """
    from internsp.optim.zero import ZeroOptimizer  # few programs need it

    if isinstance(model, FSDPModule) and ATTRIBUTE not in vars(model):
        attach(model)
    found = plan_of(model, "zero_optimizer")
    if found.zero:
        raise ValueError("zero_optimizer: the gradients of this model have a ZeroOptimizer already")
    if found.communicator.mesh.replicas == 1:
        raise ConfigError(
            "internsp.fsdp.zero_optimizer: the mesh has no replicas, so that the state of any "
            "optimizer is over all ranks: leave it out, or give fully_shard a mesh of two "
            "dimensions (replicate, shard)"
        )
    found.require_unchanged()
    takes = inspect.signature(type(optimizer)).parameters
    made = ZeroOptimizer(
        found.communicator, type(optimizer), max_grad_norm=max_grad_norm,
        param_groups=optimizer.param_groups,
        **{name: value for name, value in optimizer.defaults.items() if name in takes},
    )  # fmt: skip
    if optimizer.state:
        made.load_state_dict(optimizer.state_dict())
    optimizer.param_groups = made.param_groups  # for a schedule that was made of it,
    vars(optimizer)["_opt_called"] = True  # which would warn that nothing has stepped
    return made
