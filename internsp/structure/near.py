"""Which ranks of a weight group sum gradients first, where its ranks are on several machines. Pure.

For ``weight_parallel.reduce = "auto"``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from internsp.mesh.shape import MeshShape
from internsp.structure.assign import ParameterSharding


def near_of(shardings: Sequence[ParameterSharding], shape: MeshShape) -> int:
    """:func:`ranks_near` for the dtype in which most of the gradients travels."""
    sent = Counter[torch.dtype]()
    for one in shardings:
        if one.unit is not None:
            sent[one.dtypes.reduce or one.dtypes.compute] += one.parameter.numel()
    return ranks_near(shape, max(sent, key=sent.__getitem__, default=torch.float32))


def ranks_near(shape: MeshShape, sent: torch.dtype) -> int:
    """Neighbors whose gradients are best summed before they leave their machine; 0: none are.

    The largest number into which all weight groups divide, so that each part is on one machine; 0
    where every group is. Sums travel in 4 bytes at least: two ranks save none of two bytes.

    Args:
        shape: with the machine of each rank.
        sent: in which most of a gradient travels.
    """
    machines, kinds = shape.machines or {}, ("weight", "expert_weight")[: 1 + shape.separate]
    groups = [group for kind in kinds for group in shape.ranks(kind)]

    def apart(group: list[int], near: int) -> bool:
        parts = [group[first : first + near] for first in range(0, len(group), near)]
        return any(len({machines[rank] for rank in part}) > 1 for part in parts)

    def fits(near: int) -> bool:
        return not any(len(g) % near or apart(g, near) for g in groups if len(g) > near)

    if not machines or not any(apart(group, len(group)) for group in groups):
        return 0
    least = 2 if sent.itemsize < 4 else 1  # and one rank alone is no group
    return next(filter(fits, range(max(map(len, groups)) // 2, least, -1)), 0)
