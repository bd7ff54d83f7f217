"""A process group of some ranks, made by them alone, whose name they know without a message."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d


def new_group(ranks: Sequence[int], name: str, timeout: timedelta) -> dist.ProcessGroup:
    """The group ``name`` of these global ranks. Collective over them; blocks.

    torch itself names such a group by how many groups a process has made: after a program's
    ``new_group([0])``, which only rank 0 counts, its ranks would wait for each other under
    different names until the timeout.

    Args:
        name: the same on these ranks, and never used before in the process.
    """
    naming = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *_, **__: name  # type: ignore[assignment]
    try:
        return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    finally:
        distributed_c10d._process_group_name = naming
