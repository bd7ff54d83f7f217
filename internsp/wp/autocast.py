"""In which dtype a linear layer's weight travels, where ``torch.autocast`` decides it (WP-1).

What is active where the model, or a block, is entered holds for all weights there, used or not: a
rank whose data leave one unused gathers and reduces it in the dtype of the others (WP-2). Autocast
around a part of a block is followed where a weight is used (:func:`follow`): then all ranks must
use it. What is gathered ahead takes the dtype of the last time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from internsp.wp.parameter import ShardedParameter
from internsp.wp.slots import Unit


def active(device_type: str) -> torch.dtype | None:
    """The dtype that autocast computes in, here and now; ``None``: it is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def follow(*weights: ShardedParameter) -> None:
    """Before a use of ``weights``, whose dtype autocast may decide (``weight.autocasts``)."""
    now = active(weights[0].device.type)
    for weight in weights:
        _lower(weight, now)


def _lower(weight: ShardedParameter, dtype: torch.dtype | None) -> None:
    wanted = dtype or weight.base_compute_dtype
    if weight.autocasts and wanted is not weight.compute_dtype:
        weight.use_dtype(wanted)


class Autocast:
    """What was active at the entries of a model and of its blocks.

    Args:
        weights: all of the model's, for their dtypes.
        blocks: theirs are looked at again at each block's entry.
    """

    def __init__(
        self, weights: Sequence[ShardedParameter], blocks: Sequence[Unit], device_type: str
    ) -> None:
        self._weights, self._blocks, self._device_type = weights, blocks, device_type
        self._model: torch.dtype | None = None
        self._now: dict[Unit, torch.dtype | None] = {}
        self._graph: dict[Unit, torch.dtype | None] = {}  # of the last forward with gradients

    def enter_model(self) -> None:
        """Before the first gather of a forward."""
        now = active(self._device_type)
        if now != self._model:
            self._model = now
            self._now.clear()
            self._set(self._weights, now)

    def enter_block(self, unit: Unit) -> bool:
        """Whether what was gathered of ``unit`` so far may have another dtype than is wanted."""
        now = active(self._device_type)
        if torch.is_grad_enabled():
            self._graph[unit] = now
        return self._change(unit, now)

    def begin_backward(self) -> None:
        """Before its first gather: evaluations since the forward may have had another dtype."""
        for unit in self._blocks:
            if unit in self._graph:
                self._change(unit, self._graph[unit])

    def _change(self, unit: Unit, dtype: torch.dtype | None) -> bool:
        if self._now.get(unit, self._model) == dtype:
            return False
        self._now[unit] = dtype
        self._set(unit.weights, dtype)
        return True

    @staticmethod
    def _set(weights: Iterable[ShardedParameter], dtype: torch.dtype | None) -> None:
        for weight in weights:
            _lower(weight, dtype)
