"""``full_tensor()`` of a weight in a forward: an all-gather, whose backward is a reduce-scatter.

It runs where the program reads the weight, and backward where autograd comes to it, while gathers
and reductions of the pass are in flight. Which of these are launched before depends on the rank's
data, where only some ranks run the weight's module: so it has groups of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from internsp.base.autograd import no_second_derivatives
from internsp.dtensor.placed import dtensor_like, grad_dtype
from internsp.mesh import ParallelMesh
from internsp.wp.parameter import ShardedParameter


def read_whole(member: ShardedParameter, mesh: ParallelMesh, factor: int) -> Tensor:
    """The unsharded parameter. Collective over its weight group; blocks.

    Args:
        factor: divides the sum over ranks that is its gradient.
    """
    whole: Tensor = _Whole.apply(member.parameter, member, mesh, factor)  # type: ignore[no-untyped-call]
    return whole


class _Whole(torch.autograd.Function):

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, parameter: Any, member: ShardedParameter, mesh: ParallelMesh, factor: int
    ) -> Tensor:
        ctx.member, ctx.mesh, ctx.factor = member, mesh, factor
        member.wait_until_ready()
        if member.meet is not None:
            member.meet(f"full_tensor() or redistribute() of {member.name}")
        local, there = parameter._local_tensor, mesh.reading_mesh(member.axis)
        shard = DTensor.from_local(
            local.to(there.device_type), there, _placements(member)[1:], run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
        whole: Tensor = shard.full_tensor()
        return whole.clone() if whole.data_ptr() == local.data_ptr() else whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        if torch.is_grad_enabled():
            no_second_derivatives()
        member: ShardedParameter = ctx.member
        parameter: Any = member.parameter
        if member.meet is not None:
            member.meet(f"the gradient of full_tensor() of {member.name}", everyone=True)
        own = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        # No layer is tensor parallel here, so that tensor ranks compute the same.
        there, placements = ctx.mesh.reading_mesh(member.axis), _placements(member)
        names = member.axis.param_mesh.mesh_dim_names or ()
        each = [Replicate() if name == "tensor" else Partial() for name in names[1:]]
        part = _placed(own, there, each, placements[1:])
        replicas = ctx.mesh.reading_mesh(member.axis, replicas=True)
        total = _placed(part, replicas, [Partial()], placements[:1])
        like = parameter._local_tensor
        total = (total / ctx.factor).to(device=like.device, dtype=grad_dtype(parameter))
        return dtensor_like(parameter, total), None, None, None


def _placements(member: ShardedParameter) -> list[Placement]:
    """On the library's mesh; a program's own parameter may lie on another (``adopt``)."""
    return member.axis.placements(Shard(member.layout.dim))


def _placed(
    own: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], wanted: Sequence[Placement]
) -> Tensor:
    """This rank's part of a tensor that the ranks of ``mesh`` hold as ``placements``, as wanted."""
    parts = DTensor.from_local(own, mesh, placements, run_check=False)
    found: Tensor = parts.redistribute(placements=wanted).to_local()
    return found
