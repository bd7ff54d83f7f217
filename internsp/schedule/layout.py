"""Pure: how a weight is sharded, padded and packed.

A weight ``[n, ...]`` is sharded on one dimension, over ``W`` ranks, into ``ceil(n / W)`` rows a
rank. Only the global tail is padded, so that a gather of the padded shards *is* the padded
unsharded weight, in one piece::

    n = 5, W = 4    rank 0: r0 r1   rank 1: r2 r3   rank 2: r4 --   rank 3: -- --
    gathered slot   r0 r1 r2 r3 r4 -- -- --         unsharded = the first 5 rows, contiguous

If the sharded dimension is not the first, the shard is stored with that dimension first, and the
unsharded weight is a transposed view of the slot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from internsp.errors import LayoutError

ALIGNMENT = 16  # bytes, of tensors in a flat buffer, as NCCL and vector loads want it


@dataclass(frozen=True)
class ShardLayout:
    """Pure arithmetic of one sharded weight.

    Attributes:
        shape: shape of the unsharded weight.
        dim: the sharded dimension (not negative).
        size: ranks in the weight group.
    """

    shape: tuple[int, ...]
    dim: int
    size: int

    @classmethod
    def create(cls, shape: tuple[int, ...], dim: int, size: int) -> ShardLayout:
        """Normalize ``dim`` (negative counts from the end).

        Raises:
            LayoutError: when ``dim`` is out of range.
        """
        if not -len(shape) <= dim < len(shape):
            raise LayoutError(f"cannot shard dimension {dim} of a weight of shape {list(shape)}")
        # In a group of one the shard lies in memory as the unsharded weight does.
        return cls(tuple(shape), dim % len(shape) if size > 1 else 0, size)

    @cached_property
    def front(self) -> tuple[int, ...]:
        """Shape of the unsharded weight with the sharded dimension first."""
        return (self.shape[self.dim], *self.shape[: self.dim], *self.shape[self.dim + 1 :])

    @cached_property
    def rows(self) -> int:
        """Rows of every padded shard."""
        return math.ceil(self.shape[self.dim] / self.size)

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of the padded shard, sharded dimension first."""
        return (self.rows, *self.front[1:])

    @cached_property
    def padded(self) -> bool:
        """Whether the tail of the gathered weight is padding."""
        return self.size * self.rows != self.shape[self.dim]

    @cached_property
    def shard_numel(self) -> int:
        """Elements of the padded shard."""
        return math.prod(self.shard_shape)

    @cached_property
    def padded_numel(self) -> int:
        """Elements of the padded unsharded weight: what a slot holds and a gather moves."""
        return self.size * self.shard_numel

    def valid_rows(self, rank: int) -> int:
        """Rows of ``rank``'s shard that are not padding (may be zero)."""
        return min(max(self.shape[self.dim] - rank * self.rows, 0), self.rows)

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """``rank``'s rows of an unsharded tensor: a view, no padding, sharded dimension first."""
        start = min(rank * self.rows, self.shape[self.dim])
        return whole.movedim(self.dim, 0).narrow(0, start, self.valid_rows(rank))

    def unsharded_view(self, padded: Tensor) -> Tensor:
        """The unsharded weight as a view of the flat, padded, gathered elements."""
        rows = padded[: self.padded_numel].view(self.size * self.rows, *self.front[1:])
        return rows[: self.shape[self.dim]].movedim(0, self.dim)

    def pack(self, gradient: Tensor, out: Tensor) -> None:
        """Write an unsharded gradient into ``out`` (flat, padded) with a zero tail."""
        flat = out.view(self.size * self.rows, *self.front[1:])
        flat[: self.shape[self.dim]].copy_(gradient.movedim(self.dim, 0))
        flat[self.shape[self.dim] :].zero_()

    def add(self, gradient: Tensor, out: Tensor) -> None:
        """Add an unsharded gradient to ``out``, which :meth:`pack` has written."""
        flat = out.view(self.size * self.rows, *self.front[1:])
        flat[: self.shape[self.dim]].add_(gradient.movedim(self.dim, 0))

    def in_rows(self, gradient: Tensor) -> bool:
        """Whether ``gradient``'s memory has the rows of the shards one after another."""
        return self.dim == 0 and gradient.is_contiguous()


def laid_out(numels: Sequence[int], itemsize: int, ranks: int) -> tuple[list[int], int]:
    """Lay out tensors one after another in a flat buffer, which ``ranks`` ranks share equally.

    Returns:
        The first element of each, and the elements of a slice; all aligned.
    """
    step = max(ALIGNMENT // itemsize, 1)
    starts, end = [], 0
    for numel in numels:
        starts.append(end)
        end += math.ceil(numel / step) * step
    return starts, math.ceil(end / (step * ranks)) * step
