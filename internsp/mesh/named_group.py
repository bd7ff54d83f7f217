"""Groups that a mesh makes late, by their ranks alone, whose name they know without a message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh


def new_group(ranks: Sequence[int], mesh: str, timeout: timedelta) -> dist.ProcessGroup:
    """A group of these global ranks. Collective over them; blocks.

    torch itself names such a group by how many groups a process has made: after a program's
    ``new_group([0])``, which only rank 0 counts, its ranks would wait for each other under
    different names until the timeout. And where the program has bound the default group to a
    device, torch splits its communicator, which waits for all ranks of the world: the group gets
    a communicator of its own.

    Args:
        mesh: a name that the ranks share, and no ranks beside them.
    """
    taken = {*distributed_c10d._world.pg_names.values()}  # also those of ended groups
    name = next(new for n in count(1) if (new := f"{mesh}, {ranks}, {n}") not in taken)
    naming, splitting = distributed_c10d._process_group_name, distributed_c10d._get_split_source
    distributed_c10d._process_group_name = lambda *_, **__: name  # type: ignore[assignment]
    distributed_c10d._get_split_source = lambda _: None  # type: ignore[assignment]
    try:
        return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    finally:
        distributed_c10d._process_group_name = naming
        distributed_c10d._get_split_source = splitting


def reading_mesh(
    of: DeviceMesh, replica_rank: int, replicas: bool, add_group: Callable[[list[int]], Any]
) -> DeviceMesh:
    """The first dimension of ``of`` alone, or all others, over groups of their own."""
    names = (of.mesh_dim_names or ())[:1] if replicas else (of.mesh_dim_names or ())[1:]
    groups = [of.get_group(name) for name in names]
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    return DeviceMesh.from_group(
        [
            group if len(own) == 1 else add_group(own)
            for group, own in zip(groups, ranks, strict=True)
        ],
        of.device_type,
        mesh=torch.tensor(ranks[0]) if replicas else of.mesh[replica_rank],
        mesh_dim_names=tuple(f"{name}_read" for name in names),
    )  # fmt: skip
