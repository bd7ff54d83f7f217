"""What a torch optimizer of a user's own needs before it steps sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from internsp.errors import StructureError
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member


def refuse_optimizer(optimizer: torch.optim.Optimizer, stepped: Sequence[nn.Parameter]) -> None:
    """Refuse an optimizer that cannot step the sharded parameters ``stepped``, before its step.

    All but these are assumed to step a DTensor elementwise, as they would the full tensor.

    Raises:
        StructureError: the optimizer concatenates all parameters, or needs unsharded matrices.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise StructureError(
            "torch.optim.LBFGS lays all parameters in one vector, which parameters sharded over "
            "ranks cannot be: use an optimizer that works parameter by parameter (AdamW, SGD, ...)"
        )
    # torch's Adafactor, or that of transformers. Its statistics fail within DTensor; Muon would sum
    # its products over ranks in bf16, with other results on each mesh, perhaps also on replicas.
    adafactor = "Adafactor" in [base.__name__ for base in type(optimizer).__mro__]
    for parameter in stepped if adafactor or isinstance(optimizer, torch.optim.Muon) else ():
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        sharded = any(
            isinstance(placement, Shard) and mesh.size(dim) > 1
            for dim, placement in enumerate(placements)
        )
        if adafactor or sharded:
            name = type(optimizer).__name__
            raise StructureError(
                f"{name} steps whole matrices, and parameters (one of shape "
                f"{list(parameter.shape)}) are sharded over ranks: its numbers would not be those "
                "of one process. Give it to a ZeroOptimizer, which brings each matrix together on "
                f"one rank: internsp.ZeroOptimizer(communicator, {name}, ...), in a program of "
                "FSDP2 internsp.fsdp.zero_optimizer(model, *optimizers)"
            )


def lay_out_alike(optimizer: torch.optim.Optimizer, stepped: Sequence[nn.Parameter]) -> None:
    """Give gradients and state the strides of their parameters' local tensors.

    torch's fused kernels take elements at the same offset for the same element (seen with torch
    2.13). A parameter that is sharded on another dimension than the first one lies in memory with
    that dimension first; a gradient that autograd made from the parameter itself, or state that was
    loaded, may not.
    """
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for parameter in stepped if fused else ():
        local = parameter._local_tensor  # type: ignore[attr-defined]
        for value in (parameter.grad, *optimizer.state.get(parameter, {}).values()):
            own = getattr(value, "_local_tensor", None)
            if own is None or own.shape != local.shape or own.stride() == local.stride():
                continue
            value._local_tensor = torch.empty_like(local, dtype=own.dtype).copy_(own)


def place_scalars(
    optimizer: torch.optim.Optimizer,
    scalars: Sequence[Member],
    known: dict[type, frozenset[str]],
) -> None:
    """Make state that is like a parameter without dimensions a ``DTensor`` like it.

    ``set_optimizer_state_dict`` of full values takes a moment without dimensions for a value such
    as the step count, and leaves it a plain tensor, which torch's optimizers cannot step together
    with a ``DTensor``.

    Args:
        known: names of the state that is like a parameter, of classes seen before; added to.

    Raises:
        StructureError: they cannot be found from the group's settings.
    """
    kind: Any = type(optimizer)
    for member in scalars:
        if member.parameter not in optimizer.state:
            continue
        state = optimizer.state[member.parameter]
        plain = {name for name, value in state.items() if _is_plain_scalar(value)} - {"step"}
        if plain and kind not in known:
            known[kind] = _names_like(member, optimizer)
        for name in plain and plain & known[kind]:
            state[name] = member.wrap(state[name].to(member.device))


def _is_plain_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.dim()


def _names_like(member: Member, optimizer: torch.optim.Optimizer) -> frozenset[str]:
    from internsp.base.stand_in import StateNames, settings_of  # rarely needed

    like = torch.zeros(2, dtype=member.dtype, device=member.device)
    groups, kind = optimizer.param_groups, type(optimizer)
    own = [group for group in groups if any(p is member.parameter for p in group["params"])]
    try:
        return frozenset(StateNames(like, kind, settings_of(own[0])).slices)
    except Exception as error:
        raise StructureError(
            f"{kind.__name__} has plain tensors as state of {member.name}, which has no "
            f"dimensions, on rank {dist.get_rank()}, and no second one could be made to see which "
            f"of them are like the parameter ({error}): load DTensor, as its state_dict() has them"
        ) from error


def prepared(
    communicator: ISPCommunicator,
    optimizer: torch.optim.Optimizer,
    stepped: Sequence[nn.Parameter],
    known: dict[type, frozenset[str]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Prepare a step of ``optimizer`` that is about to write ``stepped`` of one model.

    Args:
        known: see :func:`place_scalars`.
        args: the optimizer, then the closure, unless ``kwargs`` has it.

    Returns:
        The arguments of the step, whose closure, if there is one, is followed by the same.
    """

    def prepare() -> None:
        communicator.placeholders.require_finished(stepped)
        if not communicator.state.consumer.is_optimizer:  # which steps slices of its own
            lay_out_alike(optimizer, stepped)
            place_scalars(optimizer, communicator.replicated.scalars, known)
        if communicator.state.handles or communicator.events.full_params_in:
            communicator.events.require_shards()
            communicator.state.wait_for_gathers()

    refuse_optimizer(optimizer, stepped)
    prepare()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return args, kwargs

    def closed() -> Any:
        loss = closure()
        prepare()
        return loss

    if "closure" in kwargs:
        return args, kwargs | {"closure": closed}
    return (args[0], closed, *args[2:]), kwargs
