"""Values that a program hands in for a parameter, as this rank's own part of them."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from internsp.errors import LayoutError
from internsp.wp.parameter import ShardedParameter
from internsp.wp.replicated import ReplicatedParameter

Member = ShardedParameter | ReplicatedParameter


def own_part(member: Member, values: Tensor, what: str = "") -> Tensor:
    """This rank's part of ``values``, like the parameter's local tensor.

    No message, except for a ``DTensor`` that is placed otherwise, which all ranks gather together.

    Args:
        values: whole (in the parameter's own shape, the same on all ranks), a ``DTensor``, or this
            rank's part itself.
        what: what they are, for errors; by default the parameter.

    Raises:
        LayoutError: they have another shape, or are on the meta device.
    """
    parameter = member.parameter
    spec, local = parameter._spec, parameter._local_tensor  # type: ignore[attr-defined]
    shape, found = parameter.shape, values.shape
    fits = found == shape or (not isinstance(values, DTensor) and found == local.shape)
    if not fits or values.is_meta:
        given = "values on the meta device" if fits else f"the shape {list(found)}"
        raise LayoutError(
            f"{what or member.name} on rank {dist.get_rank()} was given {given}: it takes whole "
            f"values {list(shape)}, this rank's part {list(local.shape)}, or a DTensor "
            f"{list(shape)}"
        )
    if isinstance(values, DTensor):
        if values.placements == spec.placements and values.device_mesh == spec.mesh:
            return values._local_tensor.detach()
        values = values.full_tensor()
    elif found != shape:
        return values.detach()
    if isinstance(member, ShardedParameter):
        return member.rows_of(values.detach()).movedim(0, member.layout.dim)
    return member.own(values.detach())


def like_storage(member: Member, part: Tensor) -> Tensor:
    """``part``, like the local tensor, as a tensor like ``member.storage``."""
    made = part.new_zeros(member.storage.shape, device=member.storage.device)
    member.local(made).copy_(part)
    return made
