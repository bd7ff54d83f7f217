"""Slices of unsharded weights within a near group (``weight_parallel.near_ranks``).

The first all-gather of a block in a step runs over the whole weight group; when it has completed,
each rank keeps one of ``n`` slices of every unsharded weight, in the dtype of the all-gather. Later
all-gathers of the step (of backward, recompute, and further micro-batches within ``unchanged()``)
run within the near group of ``n`` neighbors, over the fast links (ZeRO++'s hpZ, arXiv 2306.10209;
FSDP2's ``reshard_after_forward = n``; LayerZeRO's low-precision slice)::

    weight group      0   1   2   3        shards  [a] [b] [c] [d]
    near groups of 2  0   1 | 2   3        slices  [ab] [cd] | [ab] [cd]

The gather queue decides which all-gathers use slices, by what every rank has gathered. A forward
reuses no slices of the step before, as it reuses no contents of slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from internsp.mesh import WeightAxis
from internsp.wp.collectives import Collectives
from internsp.wp.parameter import ShardedParameter, VersionAndDtype
from internsp.wp.slots import MemoryPool


class NearSlices:
    """This rank's slices of the weights of one chunk.

    Args:
        weights: the weights with ``slices``.
        gathers: collectives within the near group, by weight axis and number of ranks.
        pool: the slots from which slices are copied.
    """

    def __init__(
        self,
        weights: Iterable[ShardedParameter],
        gathers: Mapping[tuple[WeightAxis, int], Collectives],
        pool: MemoryPool,
    ) -> None:
        self._pool = pool
        self._gathers = gathers
        self._memory = {  # for the widest dtype of an all-gather; autocast's is narrower
            weight: torch.empty(
                weight.layout.padded_numel // weight.slices * weight.compute_dtype.itemsize,
                dtype=torch.uint8,
                device=pool.device,
            )
            for weight in weights
        }
        self._slice_versions: dict[ShardedParameter, VersionAndDtype] = {}
        self._in_flight: set[ShardedParameter] = set()  # all-gathers over the whole group

    @property
    def nbytes(self) -> int:
        """Bytes of all slices."""
        return sum(memory.nbytes for memory in self._memory.values())

    def add_in_flight(self, weights: Sequence[ShardedParameter]) -> None:
        """Record that an all-gather over the whole group is launched for ``weights``."""
        self._in_flight.update(weight for weight in weights if weight.slices)

    def from_whole_group(self, weight: ShardedParameter) -> bool:
        """Whether the weight's all-gather, in flight or just completed, is over the whole group."""
        return not weight.slices or weight in self._in_flight

    def save_slices(self, weights: Sequence[ShardedParameter]) -> None:
        """Copy this rank's slices out of the slot after an all-gather over the whole group."""
        for weight in weights:
            if weight not in self._in_flight:
                continue
            self._in_flight.discard(weight)
            assert weight.used_version is not None, "its all-gather has completed"
            slot = self._pool.slots[weight.unit.slot]
            if slot.streams.active:
                slot.streams.read(weight)
            index = weight.rank % weight.slices
            slices = weight.in_slot.flat.view(weight.slices, -1)
            self._slice_view(weight).copy_(slices[index])
            self._slice_versions[weight] = weight.used_version

    def collectives(self, weight: ShardedParameter) -> Collectives:
        """The collectives of the weight's near group."""
        return self._gathers[weight.axis, weight.slices]

    def slice_of(self, weight: ShardedParameter) -> Tensor:
        """This rank's slice, its input of the near group's all-gather; sets ``used_version``."""
        weight.used_version = self._slice_versions[weight]  # the version of the slice
        return self._slice_view(weight)

    def reset(self) -> None:
        """Forget all-gathers in flight, after a failure."""
        self._in_flight.clear()

    def _slice_view(self, weight: ShardedParameter) -> Tensor:
        count = weight.layout.padded_numel // weight.slices * weight.compute_dtype.itemsize
        return self._memory[weight][:count].view(weight.compute_dtype)
