"""``Slices``: a rank's slice of one kind of optimizer state, as index ranges of the whole tensor.

State lies in flat slices over the replicas of a shard (:mod:`internsp.optim.bucket`), which end
anywhere in a row. Such a slice is a few boxes of the whole tensor::

    shape [4, 5], elements 3 to 16      . . . X X        [0:1, 3:5]
                                        X X X X X        [1:3, 0:5]
                                        X X X X X
                                        X X . . .        [3:4, 0:2]

so that ``torch.distributed.checkpoint`` writes what a rank has without any communication, and any
mesh reads its own ranges of it.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from internsp.errors import LayoutError
from internsp.wp.parameter import Member, ShardedParameter

Box = tuple[tuple[int, ...], tuple[int, ...], int]
"""Offsets, sizes, and the index of the box's first element in the slice."""


class Region:
    """The part of an unsharded parameter that the elements ``start`` to ``stop`` of a member's
    storage cover.

    Attributes:
        shape: of the unsharded parameter.
        dim: the dimension that comes first in storage.
        boxes: the range as boxes, with dimensions in the order of storage.
        offsets: each box's offsets in the unsharded parameter.
    """

    def __init__(self, member: Member, start: int, stop: int) -> None:
        parameter: Any = member.parameter
        _, origin = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        self.shape: torch.Size = parameter.shape
        self.dim = member.layout.dim if isinstance(member, ShardedParameter) else 0
        self.boxes = boxes(tuple(member.storage.shape), start, stop)
        self.offsets: list[tuple[int, ...]] = []
        for own, _, _ in self.boxes:
            at = list(own)
            if at:
                at.insert(self.dim, at.pop(0))
            self.offsets.append(tuple(a + o for a, o in zip(at, origin, strict=True)))

    def box_views(self, values: Tensor) -> dict[tuple[int, ...], Tensor]:
        """Views of the boxes of ``values`` (1-D, the range), by their offsets."""
        parts = [
            values[first : first + math.prod(sizes)].view(sizes) for _, sizes, first in self.boxes
        ]
        moved = [part.movedim(0, self.dim) for part in parts] if self.dim else parts
        return dict(zip(self.offsets, moved, strict=True))


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The elements ``start`` to ``stop`` (row-major) of a tensor of ``shape`` as boxes, in
    order."""
    if start >= stop:
        return []
    if not shape:
        return [((), (), 0)]
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # complete rows
    found: list[Box] = []
    if first > last:  # within one row
        return _boxes_in_row(shape, last, start, stop, start)
    if start < first * inner:
        found += _boxes_in_row(shape, first - 1, start, first * inner, start)
    if first < last:
        sizes = (last - first, *shape[1:])
        found.append(((first, *(0 for _ in shape[1:])), sizes, first * inner - start))
    if last * inner < stop:
        found += _boxes_in_row(shape, last, last * inner, stop, start)
    return found


def _boxes_in_row(
    shape: tuple[int, ...], row: int, start: int, stop: int, origin: int
) -> list[Box]:
    inner = math.prod(shape[1:])
    return [
        ((row, *offsets), (1, *sizes), first + start - origin)
        for offsets, sizes, first in boxes(shape[1:], start - row * inner, stop - row * inner)
    ]


class Slices(Tensor):
    """A tensor of which this rank holds the boxes in :attr:`parts`; it has no values of its own.

    ``torch.distributed.checkpoint`` saves and fills the parts.

    Attributes:
        parts: views of the live values, by their offsets.
    """

    parts: dict[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(cls, shape: torch.Size, like: Tensor, parts: dict[tuple[int, ...], Tensor]) -> Any:
        """See the class; ``like`` gives dtype and device."""
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made.parts = parts
        return made

    @classmethod
    def of(cls, region: Region, values: Tensor) -> Slices:
        """``values`` (1-D) as this rank's part of ``region``."""
        made: Slices = cls(region.shape, values, region.box_views(values))
        return made

    def new_empty(self, *_: Any, **options: Any) -> Slices:
        """The same slices; ``dcp.async_save`` then gives them a copy of :attr:`parts`."""
        made: Slices = type(self)(self.shape, self, self.parts)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Slices({list(self.shape)}, {self.dtype}, at {list(self.parts)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Raises ``LayoutError``: this rank has only parts of the tensor."""
        # No TypeError: of an operator (``+``) torch would make one without this text.
        raise LayoutError(
            f"{func} of a rank's slices of optimizer state: take their parts, or "
            "ZeroOptimizer.state_dict(), which gathers them"
        )

    # the interface of torch.distributed.checkpoint (torch.distributed._checkpointable)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), part.size()),
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.size(),
                ),
            )
            for offsets, part in self.parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(o), p.size()) for o, p in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, "__create_write_items__ and __create_chunk_list__ give it"
        return self.parts[tuple(index.offset)]
