"""Slices of unsharded weights within a near group (``weight_parallel.reshard_after_forward``).

The first all-gather of a step brings a block's weights from the whole weight group; as it arrives,
each rank keeps one part of ``n`` of every unsharded weight, in the dtype that it was gathered in.
Later gathers of the step, those of backward, recompute and further micro-batches within
``unchanged()``, come from the near group of ``n`` neighbors, over the fast links (ZeRO++'s hpZ,
arXiv 2306.10209; FSDP2's ``reshard_after_forward = n``; LayerZeRO's low-precision slice)::

    weight group      0   1   2   3        shards  [a] [b] [c] [d]
    near groups of 2  0   1 | 2   3        slices  [ab] [cd] | [ab] [cd]

When a gather comes from slices is decided in the queue, by what every rank has gathered alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from internsp.mesh import WeightAxis
from internsp.wp.collectives import Collectives
from internsp.wp.parameter import ShardedParameter, Tag
from internsp.wp.slots import MemoryPool


class NearSlices:
    """This rank's slices of the weights of one chunk.

    Args:
        weights: those with ``slices``.
        gathers: within the near group, by axis and number of its ranks.
    """

    def __init__(
        self,
        weights: Iterable[ShardedParameter],
        gathers: Mapping[tuple[WeightAxis, int], Collectives],
        pool: MemoryPool,
    ) -> None:
        self._pool = pool
        self._gathers = gathers
        self._memory = {  # of the largest dtype it is gathered in; autocast makes it narrower
            weight: torch.empty(
                weight.layout.padded_numel // weight.slices * weight.compute_dtype.itemsize,
                dtype=torch.uint8,
                device=pool.device,
            )
            for weight in weights
        }
        self._shown: dict[ShardedParameter, Tag] = {}
        self._coming: set[ShardedParameter] = set()  # from the whole group, not arrived

    @property
    def nbytes(self) -> int:
        """Of all slices."""
        return sum(memory.nbytes for memory in self._memory.values())

    def expect(self, weights: Sequence[ShardedParameter]) -> None:
        """A gather of the whole group is launched."""
        self._coming.update(weight for weight in weights if weight.slices)

    def comes(self, weight: ShardedParameter) -> bool:
        """Whether its gather that is in flight, or has arrived now, is the whole group's."""
        return not weight.slices or weight in self._coming

    def keep(self, weights: Sequence[ShardedParameter]) -> None:
        """A gather has arrived in the slot: keep this rank's slices of it."""
        for weight in weights:
            if weight not in self._coming:
                continue
            self._coming.discard(weight)
            assert weight.shown is not None, "its gather has arrived"
            slot = self._pool.slots[weight.unit.slot]
            if slot.streams.active:
                slot.streams.read(weight)
            part = weight.rank % weight.slices
            whole = slot.flat(weight.unit, weight).view(weight.slices, -1)
            self._of(weight).copy_(whole[part])
            self._shown[weight] = weight.shown

    def collectives(self, weight: ShardedParameter) -> Collectives:
        """Of its near group."""
        return self._gathers[weight.axis, weight.slices]

    def slice(self, weight: ShardedParameter) -> Tensor:
        """What this rank sends of it to its near group."""
        weight.shown = self._shown[weight]  # of what the slice was made of
        return self._of(weight)

    def discard(self) -> None:
        """After a failure: nothing is on its way."""
        self._coming.clear()

    def _of(self, weight: ShardedParameter) -> Tensor:
        count = weight.layout.padded_numel // weight.slices * weight.compute_dtype.itemsize
        return self._memory[weight][:count].view(weight.compute_dtype)
