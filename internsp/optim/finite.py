"""Finds which parameters' gradients or values are not finite, and on which ranks.

Called only after a check has failed. The check itself is the gradient norm: if one rank's gradient
is not finite, the norm is not finite on any rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.failure.objects import Objects
from internsp.mesh import ParallelMesh
from internsp.optim.bucket import Bucket
from internsp.wp.collectives import all_reduce
from internsp.wp.parameter import Member

_SHOWN = 6  # names in a message


@dataclass(frozen=True)
class NotFinite:
    """Parameters with values that are not finite; the same on every rank.

    Attributes:
        parameters: their names, by stage and in the order of the model.
        ranks: the ranks on which such values arose. This is found from the gradients of replicated
            parameters, before they are all-reduced: nearly every backward passes through one of
            them. Empty where these gradients were finite.
    """

    parameters: tuple[str, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        names = ", ".join(self.parameters[:_SHOWN])
        if len(self.parameters) > _SHOWN:
            names += f" and {len(self.parameters) - _SHOWN} more parameters"
        ranks = ", ".join(map(str, self.ranks))
        on = f" on rank{'s' * (len(self.ranks) > 1)} {ranks}" if ranks else ""
        return f"not finite{on}: {names or 'only the norm of all parameters together'}"


def gather_not_finite(
    mesh: ParallelMesh, names: Sequence[str], bad: Sequence[Tensor], own: Tensor
) -> NotFinite:
    """Combine what the ranks of all stages have found. Collective; blocks.

    Args:
        names: parameters of this rank's stage, the same on all ranks of the stage.
        bad: for each of them, whether it is not finite on this rank.
        own: whether such values arose on this rank.
    """
    stage = mesh.stage_ranks
    found = torch.zeros(len(names) + len(stage), dtype=torch.float64, device=mesh.device)
    if bad:
        found[: len(names)] = torch.stack(list(bad)).to(found.dtype)
    found[len(names) + dist.get_rank(mesh.stage_group)] = own.to(found.dtype)
    work = all_reduce(found, mesh.stage_group)
    if work is not None:
        work.wait()
    flags = [flag > 0 for flag in found.tolist()]
    mine = (
        [name for name, flag in zip(names, flags, strict=False) if flag],
        [rank for rank, flag in zip(stage, flags[len(names) :], strict=True) if flag],
    )
    parts = Objects(mesh.pipeline_group).gather(mine)
    return NotFinite(
        tuple(dict.fromkeys(name for part in parts for name in part[0])),
        tuple(sorted(rank for part in parts for rank in part[1])),
    )


def not_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Whether some element of some tensor is not finite, as a tensor: the host does not wait."""
    found = torch.zeros((), dtype=torch.bool, device=device)
    for tensor in tensors:
        if tensor.is_floating_point():
            found |= ~tensor.isfinite().all().to(device)
    return found


def not_finite_gradients(buckets: Sequence[Bucket], own: Tensor, mesh: ParallelMesh) -> NotFinite:
    """Which gradients, as they are in the ranks' slices, are not finite. Collective; blocks."""
    parts: dict[Member, list[Tensor]] = {m: [] for bucket in buckets for m in bucket.offsets}
    for bucket in buckets:
        if bucket.gradient is not None:
            for segment in bucket.segments:
                parts[segment.member].append(bucket.gradient[segment.start : segment.stop])
    bad = [not_finite(tensors, mesh.device) for tensors in parts.values()]
    return gather_not_finite(mesh, [member.name_in_model for member in parts], bad, own)
