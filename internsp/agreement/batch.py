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

_AT_ONCE = 3  # forwards: programs that draw by the wrong rank do so from the first on


class SameBatch:
    """Compares the layouts that the ranks of a sequence group call a model with.

    Each look is one message of 16 bytes. In the first forwards it is waited for at once: data drawn
    by the process's rank, or positions that are dealt otherwise, are there from the first batch on.
    Later it travels beside the forward, and its answer is read at the end of the backward, before
    an optimizer steps (:meth:`settle`), or without a backward at the next forward. On a device the
    host would have to wait for that answer, so there only the first forwards are compared.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._group, self._device = mesh.sequence_group, mesh.device
        self._alone = self._group is None or mesh.sequence == 1
        self._at_once = _AT_ONCE
        self._asked: Question | None = None

    def look(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Collective over the sequence group, in forwards that are given a layout.

        Raises:
            LayoutError: on every rank of it, where two were given other batches.
        """
        if self._alone or not (self._at_once or self._device.type == "cpu"):
            return
        self.settle()
        layout = next(_layouts(args, kwargs), None)
        if layout is None:
            return
        assert self._group is not None, "there are other ranks to be asked"
        said = f"ranges {layout.ranges}, documents {layout.documents.rows}"
        given = {"ids": layout.all_ids, "tokens": layout.total_valid_tokens}
        self._asked = Question(given, said, self._group, self._device)
        if self._at_once:
            self._at_once -= 1
            self.settle()

    def settle(self) -> None:
        """Read the answer of the last look, if it was not.

        Raises:
            LayoutError: as :meth:`look`.
        """
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.require_same()

    def forget(self, earlier: bool) -> None:
        """A pass has failed: nothing is read of it."""
        self._asked = None


def _layouts(args: Any, kwargs: Mapping[str, Any]) -> Iterator[SequenceLayout]:
    yield from (x for x in (*args, *kwargs.values()) if isinstance(x, SequenceLayout))


def require_same_batch(
    given: Mapping[str, Any], state: str, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Every rank of a sequence group has the same batch, in the same state. Collective; blocks.

    Raises:
        LayoutError: on every rank, where two were given another.
    """
    Question(given, state, group, device).require_same()


class Question:
    """Whether every rank of a sequence group has the same batch. Collective; under way once made.

    Args:
        given: tensors and numbers, by name.
        state: what else must be the same, in words.
    """

    def __init__(
        self, given: Mapping[str, Any], state: str, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        tensors = {name: x for name, x in sorted(given.items()) if isinstance(x, Tensor)}
        said = [f"{name} {list(x.shape)} {x.dtype}" for name, x in tensors.items()]
        said += [f"{k} = {v}" for k, v in sorted(given.items()) if isinstance(v, bool | int | None)]
        said.append(state)
        digest = int.from_bytes(hashlib.sha256("\n".join(said).encode()).digest()[:7], "big")
        first = torch.tensor(digest, device=device)
        contents = torch.stack([first, *(_checksum(x).to(device) for x in tensors.values())])
        both = torch.stack([first, contents.sum()])
        self._said, self._group = said, group
        self._everyone = [torch.empty_like(both) for _ in range(dist.get_world_size(group))]
        self._work = dist.all_gather(self._everyone, both, group=group, async_op=True)

    def require_same(self) -> None:
        """Wait for the other ranks' answers.

        Raises:
            LayoutError: on every rank, where two were given another.
        """
        assert self._work is not None, "this rank is of the group"
        self._work.wait()
        found = [tuple(x) for x in torch.stack(self._everyone).tolist()]
        if len(set(found)) == 1:
            return
        other = next(rank for rank, x in enumerate(found) if x != found[0])
        alike = found[other][0] == found[0][0]
        what = "other values" if alike else "inputs of other shapes or names"
        raise LayoutError(
            f"rank {other} of the sequence group was given {what} than rank 0 of it (this is rank "
            f"{dist.get_rank(self._group)}, with {', '.join(self._said):.300}): give every rank of "
            "a sequence group the same whole batch, and draw other data by mesh.data_rank, not by "
            "the process's rank"
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
