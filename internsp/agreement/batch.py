"""Whether the ranks of a sequence group train on the same batch, of which each has a part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.errors import LayoutError
from internsp.mesh import ParallelMesh
from internsp.sp.layout import SequenceLayout
from internsp.wp.parameter import bits_of

_LOOKED_AT = 3  # forwards: programs that draw by the wrong rank do so from the first on


class SameBatch:
    """Looks at the layouts that a model of a sequence group is called with, in its first forwards.

    Each look is one message of 16 bytes that is waited for; data drawn by the process's rank, or
    positions that are dealt otherwise, are there from the first batch on.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._group, self._device = mesh.sequence_group, mesh.device
        self._left = _LOOKED_AT if self._group is not None and mesh.sequence > 1 else 0

    def look(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Collective over the sequence group, in the first forwards that are given a layout.

        Raises:
            LayoutError: on every rank of it, where two were given other batches.
        """
        if not self._left:
            return
        layout = next(_layouts(args, kwargs), None)
        if layout is None:
            return
        self._left -= 1
        assert self._group is not None, "there is something left to look at"
        said = f"ranges {layout.ranges}, documents {layout.documents.rows}"
        given = {"ids": layout.all_ids, "tokens": layout.total_valid_tokens}
        require_same_batch(given, said, self._group, self._device)


def _layouts(args: Any, kwargs: Mapping[str, Any]) -> Iterator[SequenceLayout]:
    yield from (x for x in (*args, *kwargs.values()) if isinstance(x, SequenceLayout))


def require_same_batch(
    given: Mapping[str, Any], state: str, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Every rank of a sequence group has the same batch, in the same state. Collective; blocks.

    Raises:
        LayoutError: on every rank, where two were given another.
    """
    tensors = {name: x for name, x in sorted(given.items()) if isinstance(x, Tensor)}
    said = [f"{name} {list(x.shape)} {x.dtype}" for name, x in tensors.items()]
    said += [f"{k} = {v}" for k, v in sorted(given.items()) if isinstance(v, bool | int | None)]
    said.append(state)
    digest = int.from_bytes(hashlib.sha256("\n".join(said).encode()).digest()[:7], "big")
    first = torch.tensor(digest, device=device)
    contents = torch.stack([first, *(_checksum(x).to(device) for x in tensors.values())])
    both = torch.stack([first, contents.sum()])
    everyone = [torch.empty_like(both) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, both, group=group)
    found = [tuple(x) for x in torch.stack(everyone).tolist()]
    if len(set(found)) == 1:
        return
    other = next(rank for rank, x in enumerate(found) if x != found[0])
    what = "other values" if found[other][0] == found[0][0] else "inputs of other shapes or names"
    raise LayoutError(
        f"rank {other} of the sequence group was given {what} than rank 0 of it (this is rank "
        f"{dist.get_rank(group)}, with {', '.join(said):.300}): give every rank of a sequence "
        "group the same whole batch, and draw other data by mesh.data_rank, not by the process's "
        "rank"
    )


def _checksum(x: Tensor) -> Tensor:
    """Of the bits of ``x``, by position where it is of integers."""
    x = x.detach()
    if x.is_floating_point():
        return bits_of(x.contiguous()).sum(dtype=torch.int64)
    flat = x.reshape(-1)
    piece = max(1024, flat.numel() // 256)  # of a long sequence nothing else is made whole
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, flat.numel(), piece):
        part = flat[start : start + piece].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + len(part), device=x.device) * 2654435761
        total += (part * weights).sum()
    return total
