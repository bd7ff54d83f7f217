"""Hooks that refuse or handle what users do to a parallel model and would silently go wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from internsp.base.autograd import compiled
from internsp.dtensor.mixed import read_each
from internsp.dtensor.parameter import ShardParameter
from internsp.dtensor.placed import dtensor_like
from internsp.errors import GradientError, StructureError
from internsp.modules.parameters import weights_of
from internsp.modules.supported import is_compiled
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member

_tensor: Any = torch.Tensor
_hooks = _tensor._backward_hooks.__get__
_accumulated = _tensor._post_accumulate_grad_hooks.__get__


def require_no_gradient_hooks(
    model: nn.Module, communicator: ISPCommunicator
) -> Callable[..., None]:
    """A forward pre-hook that refuses compiled modules, and gradient hooks on parameters that the
    taker of gradients does not call."""
    first, members = [True], communicator.replicated.all_parameters()

    def check(*_: Any) -> None:
        if first:  # later compiled modules are found when they are called
            for name, module in model.named_modules():
                if is_compiled(module):
                    raise compiled(name or "the model")
            first.clear()
        noted = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
        if noted is not None and len(noted.param_to_acc_grad_map):
            for member in members:  # its hook is on a node, which shows none
                if hasattr(member.parameter, "_in_backward_optimizers"):
                    raise _hooked(member)
        parameters = [member.parameter for member in members]
        hooks, accumulated = read_each(_hooks, parameters), read_each(_accumulated, parameters)
        if not any(hooks) and not any(accumulated):
            return
        for member, one, other in zip(members, hooks, accumulated, strict=True):
            if other and not one and communicator.state.consumer.take_hooks(member):
                continue
            if one or other:
                raise _hooked(member)

    return check


def _hooked(member: Member) -> GradientError:
    return GradientError(
        f"{member.name} has a gradient hook, which autograd would call without a gradient: that "
        "exists when its reduction is finished, after backward. Remove the hook and read .grad "
        "when backward() has returned, or hook the modules' outputs"
    )


STEPPED: WeakKeyDictionary[ISPCommunicator, dict[type, frozenset[str]]] = WeakKeyDictionary()
"""By each model's communicator, what :func:`internsp.modules.steps.place_scalars` knows."""


@torch._disable_dynamo  # of a step that a program compiles, it runs as it is
def before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Pre-hook of every torch optimizer's step: refuse or wait, if it steps our parameters.

    Returns:
        The arguments of the step, where the gradients come from a closure among them.

    Raises:
        StructureError: the optimizer was created before ``parallelize``, and would step nothing.
    """
    communicators = list(STEPPED)
    if not communicators:
        return None
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        replaced = getattr(parameter, "replaced", None)
        if replaced is not None:
            raise StructureError(
                f"the optimizer that steps on rank {dist.get_rank()} has {replaced} as it was "
                "before parallelize(), which nothing trains any more: make the optimizer after it"
            )
    ids = {id(p) for p in parameters if isinstance(p, ShardParameter)}
    if not ids:  # as of the slices that a ZeroOptimizer steps, bucket by bucket
        return None
    for communicator in communicators:
        members = communicator.replicated.all_parameters()
        stepped = [member.parameter for member in members if id(member.parameter) in ids]
        if stepped:  # else it writes no shard that a gather in flight reads
            from internsp.modules.steps import prepared

            known = STEPPED[communicator]
            args, kwargs = prepared(communicator, optimizer, stepped, known, args, kwargs)
    return args, kwargs


@torch._disable_dynamo
def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Post-hook of every torch optimizer's step: unsharded weights that it made stale are not used
    again."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for counter in {p._member.stepped for p in parameters if isinstance(p, ShardParameter)}:
        counter.steps += 1


# Once for all models: one for each would stay, and be called, when its model is gone.
register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)


def before_load(
    communicator: ISPCommunicator, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Pre-hook of ``load_state_dict`` of a module: convert values to ``DTensor`` like parameters.

    Raises:
        LayoutError: a value has another shape.
    """
    if communicator.events.full_params_in:
        return
    for name in weights_of(module):
        values = state.get(prefix + name)
        member = communicator.parameters_of[module, name]
        if isinstance(values, Tensor) and values is not member.parameter:
            state[prefix + name] = dtensor_like(member.parameter, member.part_of(values))


def after_load(communicator: ISPCommunicator, module: nn.Module, *_: Any) -> None:
    """Post-hook of a module's ``load_state_dict``: undo ``assign=True``, but keep the new values.

    Parameters that were replaced are put back with the values loaded, so that optimizers keep
    stepping them. Full tensors are sharded. Their gradients are dropped: torch's new parameters
    have none.
    """
    if communicator.events.full_params_in:  # full parameters, written back to shards later
        return
    for name in weights_of(module):
        member = communicator.parameters_of[module, name]
        given = module._parameters.get(name)
        if given is not None and given is not member.parameter:
            member.load(given)
            module._parameters[name] = member.parameter
            member.parameter.grad = None
        member.invalidate()


def keep_parameters_in_place(
    model: nn.Module, parameters_of: Mapping[tuple[nn.Module, str], Member]
) -> None:
    """Make ``model.to()``, ``cpu()``, ``half()`` and similar methods refuse to change parameters.

    torch would replace the parameter objects that the library created. Buffers are moved and cast
    as usual.
    """
    by_module: dict[nn.Module, list[Member]] = {model: []}
    for (module, _), member in parameters_of.items():
        by_module.setdefault(module, []).append(member)
    all_members = list(dict.fromkeys(parameters_of.values()))
    for module, own in by_module.items():
        module._apply = partial(  # type: ignore[method-assign]
            _apply_to_buffers, module, all_members if module is model else own
        )


def _apply_to_buffers(
    module: nn.Module,
    members: Sequence[Member],
    fn: Callable[[Tensor], Tensor],
    recurse: bool = True,
) -> nn.Module:
    """``nn.Module._apply`` for buffers and children only.

    Raises:
        StructureError: ``fn`` would change a parameter.
    """
    kinds: dict[tuple[torch.dtype, torch.device, int], Member] = {}
    for member in members:
        kinds.setdefault((member.dtype, member.parameter.device, len(member.shape)), member)
    for (dtype, device, dim), member in kinds.items():  # memory_format needs 4 or 5 dimensions
        probe = torch.empty((2,) * dim, dtype=dtype, device=device)
        if fn(probe) is not probe or (probe.is_shared() and device.type == "cpu"):
            raise StructureError(
                f"{member.name} on rank {dist.get_rank()} was to be moved or cast (model.to(), "
                "half(), to_empty(), share_memory(), ...), but a parallel model's parameters stay "
                "where parallelize() has put them: move or cast the model before, or set "
                "weight_parallel.compute_dtype; internsp.initialize fills one from the meta device"
            )
    if recurse:
        for child in module.children():
            child._apply(fn)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module
