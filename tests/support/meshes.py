"""Meshes of the calling ranks, cached: creating process groups takes longer than most cases."""

from __future__ import annotations

import functools
from typing import Any

from internsp.mesh import ParallelMesh


@functools.cache
def mesh_of(
    weight: int = 1,
    sequence: int = 1,
    pipeline: int = 1,
    timeout: int = 30,
    device: str = "cpu",
    **degrees: Any,
) -> ParallelMesh:
    """The mesh with these degrees. Collective on first use; kept until the process ends."""
    return ParallelMesh.create(
        weight, sequence, pipeline, device_type=device, timeout_seconds=timeout, **degrees
    )
