"""The state of parameters without dimensions, as torch's helpers load it into a plain loop.

``set_optimizer_state_dict`` of full values takes a moment without dimensions for a value such as
the step count, and leaves it a plain tensor, which torch's optimizers cannot step together with a
``DTensor``. Before a step such a moment becomes a ``DTensor`` like its parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from internsp.errors import StructureError
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member

Alive = Callable[[], ISPCommunicator | None]


def convert_state_before_steps(communicator: ISPCommunicator) -> None:
    """Register the hook, if the model has parameters without dimensions."""
    if any(not member.shape for member in communicator.replicated.members):
        known: dict[type, set[str]] = {}
        hook = partial(_before_step, weakref.ref(communicator), known)
        register_optimizer_step_pre_hook(hook)


def _before_step(
    alive: Alive, known: dict[type, set[str]], optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    communicator = alive()
    if communicator is None or communicator.state.consumer.is_optimizer:
        return
    scalars = {id(m.parameter): m for m in communicator.replicated.members if not m.shape}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            member = scalars.get(id(parameter))
            if member is None or parameter not in optimizer.state:
                continue
            state = optimizer.state[parameter]
            plain = {name for name, value in state.items() if _is_plain_scalar(value)} - {"step"}
            if not plain:
                continue
            if type(optimizer) not in known:
                known[type(optimizer)] = _names(member, type(optimizer), group)
            for name in plain & known[type(optimizer)]:
                state[name] = member.wrap(state[name].to(member.device))


def _is_plain_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.dim()


def _names(member: Member, cls: Any, group: dict[str, Any]) -> set[str]:
    """The names of the state that is like the parameter.

    Raises:
        StructureError: it cannot be made from the group's settings.
    """
    # Rarely needed, so not loaded before.
    from internsp.base.stand_in import StateNames, settings_of

    like = torch.zeros(2, dtype=member.dtype, device=member.device)
    try:
        return set(StateNames(like, cls, settings_of(group)).slices)
    except Exception as error:
        raise StructureError(
            f"{cls.__name__} has plain tensors as state of {member.name}, which has no "
            f"dimensions, on rank {dist.get_rank()}, and no second one could be made to see which "
            f"of them are like the parameter ({error}): load DTensor, as its state_dict() has them"
        ) from error
