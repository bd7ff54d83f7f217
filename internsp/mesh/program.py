"""The mesh of a program whose ``DeviceMesh`` has its meaning by position, as FSDP2's have."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from internsp.errors import MeshError
from internsp.mesh.parallel_mesh import ParallelMesh

_KEPT = "_internsp_meshes"
"""Attribute of a program's mesh: the library's groups for it, which end with it."""


def mesh_of_program(data: DeviceMesh, others: Sequence[DeviceMesh] = ()) -> ParallelMesh:
    """The groups for ``data``: made at the first call (collective), then the same again.

    Args:
        data: of one dimension, over which weights are sharded, or of two: replicas, and those.
        others: meshes of parameters; one may have a dimension more, of tensor ranks.

    Raises:
        MeshError: a mesh lacks ranks, or has other dimensions; before any message.
    """
    widest = max((data, *others), key=lambda mesh: mesh.ndim)
    names = ["replicate", "shard"][-data.ndim :] + ["tensor"] * (widest.ndim - data.ndim)
    world, rank = dist.get_world_size(), dist.get_rank()
    if data.ndim > 2 or widest.ndim > data.ndim + 1:
        raise MeshError(
            f"a mesh of {data.ndim} dimensions, and parameters on one of {widest.ndim} (rank "
            f"{rank}): give fully_shard a mesh of one dimension, or of two (replicate, shard), and "
            "parallelize_module one of one dimension"
        )
    if widest.mesh.numel() != world:
        raise MeshError(
            f"the mesh has {widest.mesh.numel()} of {world} ranks (rank {rank}): give fully_shard "
            "a mesh of all ranks, or of all but the tensor ranks; for pipeline stages make an "
            "internsp.Pipeline (docs/howto/pipeline.md)"
        )
    kept: dict[str, ParallelMesh] = vars(data).setdefault(_KEPT, {})
    key = str(widest.mesh.tolist())
    if key not in kept or kept[key].is_closed:
        named = DeviceMesh(
            widest.device_type, widest.mesh, mesh_dim_names=tuple(names), _init_backend=False
        )
        kept[key] = ParallelMesh.from_device_mesh(
            named, weight="shard", replicas=tuple({"replicate"} & {*names}),
            tensor=tuple({"tensor"} & {*names}),
        )  # fmt: skip
    return kept[key]
