"""The global gradient norm: every parameter counted once, on every rank the same number."""

from __future__ import annotations

import torch
from torch import Tensor

from internsp.mesh import ParallelMesh
from internsp.optim.bucket import Bucket
from internsp.wp.collectives import all_reduce


def squared_norm(buckets: list[Bucket], mesh: ParallelMesh) -> Tensor:
    """The sum of squares of all gradients of all stages, fp64, not finite if any of them is not.

    Slices of cut weights differ between weight ranks, those of small parameters do not; ranks of
    one ``zero_replica_group`` hold the same slices. Collective (one number); blocks.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    first_replica = mesh.replica_rank < mesh.zero
    for bucket in buckets:
        counts = first_replica and (mesh.weight_rank == 0 or not bucket.small)
        if counts and bucket.gradient is not None:
            total += torch.linalg.vector_norm(bucket.gradient, dtype=torch.float64).square()
    for group in (mesh.stage_group, mesh.pipeline_group):
        work = all_reduce(total, group)
        if work is not None:
            work.wait()
    return total


def clip_factor(norm: float, max_norm: float | None) -> float:
    """torch's formula: ``max_norm / (norm + 1e-6)``, at most 1 (NaN stays NaN)."""
    if max_norm is None:
        return 1.0
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor
