"""A process group of some ranks, made by them alone, whose name they know without a message."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d


def new_group(
    ranks: Sequence[int], mesh: str, made: dict[tuple[int, ...], int], timeout: timedelta
) -> dist.ProcessGroup:
    """A group of these global ranks. Collective over them; blocks.

    torch itself names such a group by how many groups a process has made: after a program's
    ``new_group([0])``, which only rank 0 counts, its ranks would wait for each other under
    different names until the timeout. And where the program has bound the default group to a
    device, torch splits its communicator, which waits for all ranks of the world: the group gets
    a communicator of its own.

    Args:
        mesh: a name that the ranks share and no other mesh has: that of its group of a stage with
            all tensor ranks.
        made: how many groups of the same ranks the mesh has made; counted up.
    """
    made[tuple(ranks)] = number = made.get(tuple(ranks), 0) + 1
    name = f"{mesh}, {ranks}, {number}"
    naming, splitting = distributed_c10d._process_group_name, distributed_c10d._get_split_source
    distributed_c10d._process_group_name = lambda *_, **__: name  # type: ignore[assignment]
    distributed_c10d._get_split_source = lambda _: None  # type: ignore[assignment]
    try:
        return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    finally:
        distributed_c10d._process_group_name = naming
        distributed_c10d._get_split_source = splitting
