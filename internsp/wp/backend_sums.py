"""Reductions by the backend's own reduce-scatter (``weight_parallel.reduce = "backend"``).

Gradients are added on their way, in the dtype in which they travel (``reduce_dtype``), and a rank
receives their sum instead of every rank's part: on NCCL as many bytes, without the memory for the
parts. On gloo it is an all-reduce, of twice the bytes (design.md 8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from internsp.wp.collectives import Collectives, Handle


class BackendSums:
    """What a :class:`GradientReducer` asks of a gradient group's collectives, summed on the way."""

    received = 1

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def reduce_scatter(
        self, output: Tensor, input: Tensor, unit: str, weights: Mapping[str, int], phase: str
    ) -> Handle:
        """As :meth:`Collectives.reduce_scatter`; ``output`` ``[part]`` receives the sum."""
        send = self._collectives.transport.reduce_scatter
        return self._collectives.reduce_scatter(output, input, unit, weights, phase, send)

    def wait(self, handle: Handle, unit: str, weight: str, phase: str) -> None:
        """See :meth:`Collectives.wait`."""
        self._collectives.wait(handle, unit, weight, phase)

    def total(self, output: Tensor, input: Tensor, shape: Sequence[int] = (-1,)) -> Tensor:
        """What has arrived, in fp32 or wider, in memory of its own."""
        wide = torch.promote_types(output.dtype, torch.float32)
        return output.to(wide, copy=True).view(*shape)
