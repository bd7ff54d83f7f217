"""The global gradient norm: every parameter counted once, the same number on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from internsp.base.host import PIECE_BYTES
from internsp.mesh import ParallelMesh
from internsp.optim.bucket import Bucket
from internsp.wp.collectives import all_reduce
from internsp.wp.parameter import Member

N = TypeVar("N", float, Tensor)


def squared_norm(buckets: list[Bucket], mesh: ParallelMesh) -> Tensor:
    """The sum of squares of all gradients of all stages, fp64; not finite if any gradient is not.

    Slices of sharded weights differ between weight ranks and expert ranks, slices of replicated
    parameters do not. Tensor ranks hold the same slices of parameters that are not sharded over
    them, and ranks of one ``zero_replica_group`` hold the same slices of all. Of a weight tied over
    stages the first stage's copy counts. Collective (one number); blocks.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for bucket in buckets:
        if _counts(bucket, mesh) and bucket.gradient is not None:
            parts: Iterable[Tensor] = (bucket.gradient,)
            if bucket.host_sum is not None and bucket.link is not None:
                size = max(PIECE_BYTES // bucket.gradient.element_size(), 1)
                parts = bucket.link.iterate_on_device(bucket.gradient.split(size))
            for part in parts:
                total += torch.linalg.vector_norm(part, dtype=torch.float64).square()
    for group in (mesh.stage_group, mesh.tensor_group, mesh.pipeline_group):
        work = all_reduce(total, group)
        if work is not None:
            work.wait()
    return total


def norm_and_flags(
    buckets: list[Bucket], mesh: ParallelMesh, own: Tensor
) -> tuple[Tensor, list[str]]:
    """:func:`squared_norm` of one stage, and what is not finite, in one pass and one collective.

    Args:
        own: whether such values arose on this rank (:class:`internsp.optim.finite.NotFinite`).

    Returns:
        fp64: the norm's square; for each rank of the stage, and then for each parameter, a number
        above zero if it has such values. And the parameters' names.
    """
    head = torch.zeros(1 + len(mesh.stage_ranks), dtype=torch.float64, device=mesh.device)
    head[1 + dist.get_rank(mesh.stage_group)] = own
    names, each, nothing = list[str](), list[Tensor](), head.new_zeros(())
    for bucket in buckets:
        norms: dict[Member, Tensor] = {}
        if bucket.segments and bucket.gradient is not None:
            norms = dict(zip([s.member for s in bucket.segments], _norms(bucket), strict=True))
        names += [member.name_in_model for member in bucket.offsets]
        each.append(torch.stack([norms.get(member, nothing) for member in bucket.offsets]))
        if _counts(bucket, mesh):
            head[0] += each[-1].square().sum()
    total = torch.cat([head, *(norms.isfinite().logical_not() for norms in each)])
    for part, group in ((total, mesh.stage_group), (total[:1], mesh.tensor_group)):
        work = all_reduce(part, group)
        if work is not None:
            work.wait()
    return total, names


def _norms(bucket: Bucket) -> Sequence[Tensor]:
    """The norm of each segment's gradient, fp64."""
    assert bucket.gradient is not None, "the caller has looked"
    parts = [bucket.gradient[segment.start : segment.stop] for segment in bucket.segments]
    if bucket.host_sum is not None and bucket.link is not None:
        there = bucket.link.iterate_on_device(parts)
        return [torch.linalg.vector_norm(part, dtype=torch.float64) for part in there]
    return torch._foreach_norm(parts, 2, torch.float64)


def _counts(bucket: Bucket, mesh: ParallelMesh) -> bool:
    """Whether this rank counts its slice: others may have the same, or another stage's copy."""
    axis = bucket.axis
    return (
        bucket.counted  # an earlier stage counts a tied weight
        and (bucket.tensor_sharded or not mesh.tensor_rank)
        and axis.replica_rank < axis.zero
        and (axis.rank == 0 or not bucket.replicated)
    )


def clip_factor(norm: N, max_norm: float | None) -> N | float:
    """torch's formula: ``max_norm / (norm + 1e-6)``, at most 1 (NaN stays NaN)."""
    if max_norm is None:
        return 1.0
    factor = max_norm / (norm + 1e-6)
    if isinstance(factor, Tensor):
        return factor.clamp(max=1.0)
    return 1.0 if factor > 1.0 else factor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for dense weights and experts together (a plain loop).

    torch's own takes ``DTensor`` of one mesh only, but experts may be on another mesh. The 2-norm
    is over ``.grad`` of all parameters, each element counted once (for a weight tied over stages
    the first stage's copy); gradients are clipped in place. Collective; on a device the host does
    not wait.

    Args:
        parameters: one, or several; those without a gradient are skipped.
        group: the ranks over which the model is further divided: ``mesh.pipeline_group`` where
            ``parameters`` are those of a pipeline's chunks on this rank.

    Returns:
        The norm before clipping: a plain tensor without dimensions, fp64 (torch's own has the
        gradients' dtype), the same on all ranks.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    by_mesh: dict[tuple[DeviceMesh | None, torch.device], list[Tensor]] = {}
    copies: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:  # may be on the host, where the weight is offloaded
            key = getattr(parameter.grad, "device_mesh", None), _local(parameter.grad).device
            alike = by_mesh.setdefault(key, [])
            member = getattr(parameter, "_member", None)
            (alike if member is None or member.counted else copies).append(parameter.grad)
    kinds = [mesh.device_type if mesh else device for mesh, device in by_mesh]
    squares = torch.zeros((), dtype=torch.float64, device=kinds[0] if kinds else None)
    for (mesh, _), gradients in by_mesh.items():
        if not gradients:  # all of them are copies of tied weights
            continue
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor) and mesh is not None:
            there = norm._local_tensor.to(mesh.device_type)
            norm = DTensor.from_local(there, mesh, norm.placements, run_check=False).full_tensor()
        squares += norm.to(squares).square()
    if group is not None:
        work = all_reduce(squares, group)
        if work is not None:
            work.wait()
    total = squares.sqrt()
    # The factor stays a tensor, even where it is 1: the host need not wait for the device, and a
    # Python number would be rounded to bf16 before it is multiplied with gradients of that dtype.
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for (_, device), gradients in by_mesh.items():
        # On local tensors: for DTensor torch would find out each result's layout, which is slow.
        local = [_local(g) for g in gradients]
        local += [_local(g) for g in copies if _local(g).device == device]
        if local:
            torch._foreach_mul_(local, factor.to(device))
    return total


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
