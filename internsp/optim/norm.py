"""The global gradient norm: every parameter counted once, the same number on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from internsp.mesh import ParallelMesh
from internsp.optim.bucket import Bucket
from internsp.optim.finite import Marks
from internsp.wp.collectives import all_reduce

N = TypeVar("N", float, Tensor)


def norm_and_flags(
    buckets: Sequence[Bucket], mesh: ParallelMesh, own: Tensor, marks: Marks, code: float
) -> Tensor:
    """The square of all gradients' norm, over all stages, and what is not finite. Collective.

    Slices of sharded weights differ between weight ranks and expert ranks, slices of replicated
    parameters do not. Tensor ranks hold the same slices of parameters that are not sharded over
    them, and ranks of one ``zero_replica_group`` hold the same slices of all. Of a weight tied over
    stages the first stage's copy counts.

    Args:
        own: whether such values arose on this rank (:class:`internsp.optim.finite.NotFinite`).
        code: a number that all ranks get to know.

    Returns:
        fp64: the norm's square; then for each of ``marks`` a number above zero if it has values
        that are not finite; then the code of each rank.
    """
    nothing = torch.zeros((), dtype=torch.float64, device=mesh.device)
    counted, each = [nothing], [nothing] * (marks.stop - marks.start)
    places, last = marks.places, marks.stop - marks.start - 1
    for bucket in buckets:
        if bucket.segments and (gradient := bucket.gradient) is not None:
            norms = _norms(bucket, gradient)
            for segment, norm in zip(bucket.segments, norms, strict=True):
                at = places.get(segment.member, last)
                each[at] = norm if each[at] is nothing else each[at] + norm
            counted += norms if bucket.counted else ()
    codes = 1 + len(marks.all)
    found = nothing.new_zeros(codes + len(marks.ranks))
    found[0] = torch.stack(counted).square().sum()
    found[1 + marks.rank] = own
    found[codes + marks.rank] = code
    found[1 + marks.start : 1 + marks.stop] = torch.stack(each).isfinite().logical_not()
    parts = (found, mesh.stage_group), (found[:1], mesh.tensor_group), (found, mesh.pipeline_group)
    for part, group in parts:
        work = all_reduce(part, group)
        if work is not None:
            work.wait()
    return found


def _norms(bucket: Bucket, gradient: Tensor) -> Sequence[Tensor]:
    """The norm of each segment's part of ``gradient``."""
    parts = [gradient[segment.start : segment.stop] for segment in bucket.segments]
    link = None if bucket.host_sum is None else bucket.link
    where = gradient.device if link is None else link.device
    # A device adds block by block, and few have units for fp64.
    wide = torch.float64 if where.type == "cpu" else gradient.dtype
    if link is None:
        return torch._foreach_norm(parts, 2, wide)
    return [torch.linalg.vector_norm(part, dtype=wide) for part in link.iterate_on_device(parts)]


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
