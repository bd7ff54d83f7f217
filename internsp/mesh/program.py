"""The mesh of a program whose ``DeviceMesh`` has its meaning by position, as FSDP2's have."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from internsp.errors import MeshError
from internsp.mesh.named_group import new_group
from internsp.mesh.parallel_mesh import ParallelMesh, device_of, machine, make_groups
from internsp.mesh.shape import AxisShape, MeshShape

_KEPT = "_internsp_meshes"
"""Attribute of a program's mesh: the library's groups for it, which end with it."""


class _Kept(dict[str, ParallelMesh]):
    """Empty in a copy or a pickle of the program's mesh: groups are this process's."""

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def mesh_of_program(
    data: DeviceMesh, others: Sequence[DeviceMesh] = (), experts: DeviceMesh | None = None,
    *, sharded: bool = True,
) -> ParallelMesh:  # fmt: skip
    """The groups for ``data``: made at the first call (collective), then the same again.

    Args:
        data: of one dimension, over which weights are sharded, or of two: replicas, and those.
        others: meshes of parameters; they may have more dimensions, of tensor ranks.
        experts: such a mesh over which other weights are sharded.
        sharded: whether weights are sharded; else the only dimension of ``data`` is of replicas.

    Raises:
        MeshError: ``experts`` has other ranks; before any message.
    """
    widest = max((data, *others), key=lambda mesh: mesh.ndim)
    over = widest.ndim > data.ndim
    own = {} if experts is None else _axis_of_experts(widest.mesh, experts.mesh)
    if own and over:  # as the programs of torchtitan have them
        own["experts_over_tensor"] = True
    # Two slices of one mesh are two objects, of the same groups.
    kept = vars(data._get_root_mesh()).setdefault(_KEPT, _Kept())
    key = f"{data.mesh.tolist()} {sharded} {widest.mesh.tolist()} {own}"
    if key not in kept or kept[key].is_closed:
        names = ["replicate", "shard"][-data.ndim :] if sharded else ["replicate"]
        names += ["tensor"] * over
        if widest.mesh.numel() < dist.get_world_size() or own.get("experts_over_tensor"):
            kept[key] = _of_part(widest, data.ndim, data.shape[-1] if sharded else 1, own)
        else:
            ranks = widest.mesh.flatten(data.ndim) if over else widest.mesh
            named = DeviceMesh(
                widest.device_type, ranks, mesh_dim_names=tuple(names), _init_backend=False
            )
            kept[key] = ParallelMesh.from_device_mesh(
                named, weight=tuple({"shard"} & {*names}), replicas=tuple({"replicate"} & {*names}),
                tensor=tuple({"tensor"} & {*names}), **own,
            )  # fmt: skip
    return kept[key]


def _axis_of_experts(all_ranks: torch.Tensor, own: torch.Tensor) -> dict[str, Any]:
    """The degrees of experts on the ranks ``own``, by their names in :class:`MeshShape`.

    Ranks that are not in it, or in another one like it, own other experts.
    """
    among, size = all_ranks.flatten(), own.shape[-1]
    owners = max(1, among.numel() // own.numel())
    for near in ("expert_weight", "expert") if owners * own.numel() == among.numel() else ():
        axis = AxisShape(among.numel(), size, owners, 1, near == "expert")
        grid = axis.factored(among)[0].transpose(0, 1)  # owner x replica x weight
        if any(torch.equal(ranks, own.view(-1, size)) for ranks in grid):
            return {"expert_weight": size, "expert": owners, "near_experts": near}
    raise MeshError(
        f"parameters are sharded over ranks {own.tolist()}, others over those of "
        f"{all_ranks.tolist()}: make the former of every n-th of the latter, or of neighbors "
        "among them, as meshes of experts are"
    )


def _of_part(mesh: DeviceMesh, data: int, weight: int, experts: dict[str, Any]) -> ParallelMesh:
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

    ranks = tuple(mesh.mesh.flatten().tolist())
    tensor = prod(mesh.mesh.shape[data:])
    machines = {rank: name for _, rank, name in told}
    shape = MeshShape(len(ranks), weight, tensor=tensor, order=ranks, machines=machines, **experts)
    groups = make_groups(shape, timedelta(minutes=5), make)
    return ParallelMesh(shape, dist.get_rank(), device_of(mesh.device_type), groups)
