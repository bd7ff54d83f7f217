"""The mesh of a program whose ``DeviceMesh`` has its meaning by position, as FSDP2's have."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from internsp.errors import MeshError
from internsp.mesh.named_group import new_group
from internsp.mesh.parallel_mesh import ParallelMesh, device_of, machine, make_groups
from internsp.mesh.shape import MeshShape

_KEPT = "_internsp_meshes"
"""Attribute of a program's mesh: the library's groups for it, which end with it."""


class _Kept(dict[str, ParallelMesh]):
    """Empty in a copy or a pickle of the program's mesh: groups are this process's."""

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def mesh_of_program(data: DeviceMesh, others: Sequence[DeviceMesh] = ()) -> ParallelMesh:
    """The groups for ``data``: made at the first call (collective), then the same again.

    Args:
        data: of one dimension, over which weights are sharded, or of two: replicas, and those.
        others: meshes of parameters; one may have a dimension more, of tensor ranks.

    Raises:
        MeshError: a mesh has other dimensions; before any message.
    """
    widest = max((data, *others), key=lambda mesh: mesh.ndim)
    if data.ndim > 2 or widest.ndim > data.ndim + 1:
        raise MeshError(
            f"a mesh of {data.ndim} dimensions, and parameters on one of {widest.ndim} (rank "
            f"{dist.get_rank()}): give fully_shard a mesh of one dimension, or of two (replicate, "
            "shard), and parallelize_module one of one dimension"
        )
    # Two slices of one mesh are two objects, of the same groups.
    kept = vars(data._get_root_mesh()).setdefault(_KEPT, _Kept())
    key = f"{data.mesh.tolist()} {widest.mesh.tolist()}"
    if key not in kept or kept[key].is_closed:
        names = ["replicate", "shard"][-data.ndim :] + ["tensor"] * (widest.ndim - data.ndim)
        if widest.mesh.numel() < dist.get_world_size():
            kept[key] = _of_part(widest, data.ndim)
        else:
            named = DeviceMesh(
                widest.device_type, widest.mesh, mesh_dim_names=tuple(names), _init_backend=False
            )
            kept[key] = ParallelMesh.from_device_mesh(
                named, weight="shard", replicas=tuple({"replicate"} & {*names}),
                tensor=tuple({"tensor"} & {*names}),
            )  # fmt: skip
    return kept[key]


def _of_part(mesh: DeviceMesh, data: int) -> ParallelMesh:
    """The groups for some ranks of the job, as those of a pipeline's stage, made by them alone.

    Other ranks come to their meshes at another time. ``data`` dimensions are of data.
    """
    told = [(str(mesh.get_group(0).group_name), dist.get_rank(), machine())]
    for dim in reversed(range(mesh.ndim)):  # all ranks' reach all, the first rank's first
        group = mesh.get_group(dim)
        parts: list[list[tuple[str, int, str]]] = [[]] * group.size()
        dist.all_gather_object(parts, told, group=group)
        told = [one for part in parts for one in part]

    def make(ranks: list[list[int]], timeout: timedelta) -> tuple[dist.ProcessGroup, None]:
        mine = next(group for group in ranks if dist.get_rank() in group)
        return new_group(mine, told[0][0], timeout), None

    sizes, ranks = mesh.mesh.shape, tuple(mesh.mesh.flatten().tolist())
    tensor = sizes[data] if mesh.ndim > data else 1
    machines = {rank: name for _, rank, name in told}
    shape = MeshShape(len(ranks), sizes[data - 1], tensor=tensor, order=ranks, machines=machines)
    groups = make_groups(shape, timedelta(minutes=5), make)
    return ParallelMesh(shape, dist.get_rank(), device_of(mesh.device_type), groups)
