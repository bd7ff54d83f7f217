"""Groups of a sequence that is sharded by heads and by positions."""

from __future__ import annotations

import torch.distributed as dist


def groups(
    size: int, ring: int, near: str = "heads"
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's groups of ``size`` ranks: those sharing heads, and the ring. Collective."""
    shares = size // ring
    rows = [[n * shares + i for i in range(shares)] for n in range(ring)]
    columns = [[n * shares + i for n in range(ring)] for i in range(shares)]
    if near == "ring":
        rows = [[i * ring + n for i in range(shares)] for n in range(ring)]
        columns = [[i * ring + n for n in range(ring)] for i in range(shares)]
    heads, _ = dist.new_subgroups_by_enumeration(rows)
    around, _ = dist.new_subgroups_by_enumeration(columns)
    return heads, around
