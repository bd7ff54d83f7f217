"""Groups of a sequence that is cut by heads and by positions."""

from __future__ import annotations

import torch.distributed as dist


def groups(size: int, ring: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Of ``size`` ranks, this one's that share heads, and those with the same heads. Collective."""
    shares = size // ring
    heads, _ = dist.new_subgroups_by_enumeration(
        [[n * shares + i for i in range(shares)] for n in range(ring)]
    )
    around, _ = dist.new_subgroups_by_enumeration(
        [[n * shares + i for n in range(ring)] for i in range(shares)]
    )
    return heads, around
