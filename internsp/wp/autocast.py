"""The dtype in which a linear layer's weight is gathered under ``torch.autocast`` (WP-1).

The autocast dtype at the pre-forward of the model, or of a block, holds for all weights there, used
or not: a rank whose data leave a weight unused gathers and reduces it in the same dtype as the
others (WP-2). Autocast around a part of a block is looked at when a weight is used
(:func:`follow`); then all ranks must use that weight. A prefetched weight is gathered in the dtype
of its last use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from internsp.wp.parameter import ShardedParameter
from internsp.wp.slots import Unit


def active(device_type: str) -> torch.dtype | None:
    """The dtype that autocast computes in now; ``None`` if it is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def follow(*weights: ShardedParameter) -> None:
    """Set the dtypes of ``weights`` before their use, where autocast decides them
    (``weight.autocasts``)."""
    _set(weights, active(weights[0].device.type))


def _set(weights: Iterable[ShardedParameter], dtype: torch.dtype | None) -> None:
    for weight in weights:
        wanted = dtype or weight.base_compute_dtype
        if weight.autocasts and wanted is not weight.compute_dtype:
            weight.compute_in(wanted)


class Autocast:
    """The autocast dtype at the pre-forward of a model and of each of its blocks.

    Args:
        weights: all sharded weights of the model; their dtypes are set.
        blocks: the blocks; autocast is looked at again at the pre-forward of each.
    """

    def __init__(
        self, weights: Sequence[ShardedParameter], blocks: Sequence[Unit], device_type: str
    ) -> None:
        self._weights, self._blocks, self._device_type = weights, blocks, device_type
        self._model: torch.dtype | None = None
        self._now: dict[Unit, torch.dtype | None] = {}
        self._graph: dict[Unit, torch.dtype | None] = {}  # in the last forward with gradients

    def enter_model(self) -> None:
        """Look at autocast before the first gather of a forward."""
        now = active(self._device_type)
        if now != self._model:
            self._model = now
            self._now.clear()
            _set(self._weights, now)

    def pre_forward(self, unit: Unit) -> bool:
        """Look at autocast at a block's pre-forward.

        Returns:
            Whether weights of ``unit`` may be in their slot in another dtype than is wanted now.
        """
        now = active(self._device_type)
        if torch.is_grad_enabled():
            self._graph[unit] = now
        return self._change(unit, now)

    def root_pre_backward(self) -> None:
        """Restore the dtypes of the last forward with gradients, before backward's first gather:
        evaluations in between may have changed them."""
        for unit in self._blocks:
            if unit in self._graph:
                self._change(unit, self._graph[unit])

    def _change(self, unit: Unit, dtype: torch.dtype | None) -> bool:
        if self._now.get(unit, self._model) == dtype:
            return False
        self._now[unit] = dtype
        _set(unit.weights, dtype)
        return True
