"""Which rows go where: pure arithmetic on the chosen experts, without messages and without loops
over experts.

Rows are copied to several places (:func:`spread`) and results of several places are summed
(:func:`collect`); each is the other's adjoint. Sums are taken in a fixed order by gathers, since
``index_add`` on a device adds in an order of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Copies:
    """Copies of rows: where each copy comes from, and where the copies of a row are.

    Attributes:
        source: ``[copies]``, the row of each copy.
        places: ``[rows, m]``, the copies of each row; ``copies`` where a row has fewer than ``m``.
    """

    source: Tensor
    places: Tensor

    @classmethod
    def of(cls, chosen: Tensor, count: int, most: int, by_column: bool) -> tuple[Copies, Tensor]:
        """One copy of row ``r`` for each column ``c`` where ``chosen[r, c]``.

        Args:
            chosen: bool ``[rows, columns]``.
            count: how many are true, as the host knows it.
            most: the largest number of true columns of a row.
            by_column: copies are sorted by column and then by row, or else by row.

        Returns:
            The copies, and each copy's column ``[copies]``.
        """
        if by_column:
            column, row = torch.nonzero_static(chosen.t(), size=count).unbind(1)
        else:
            row, column = torch.nonzero_static(chosen, size=count).unbind(1)
        slot = chosen.cumsum(1)[row, column] - 1
        places = row.new_full((chosen.shape[0], most), count)
        places[row, slot] = torch.arange(count, device=row.device)
        return cls(row, places), column


def spread(rows: Tensor, copies: Copies) -> Tensor:
    """``[rows, ...]`` -> ``[copies, ...]``, differentiable."""
    made: Tensor = _Spread.apply(rows, copies)
    return made


def collect(made: Tensor, copies: Copies) -> Tensor:
    """``[copies, ...]`` -> ``[rows, ...]``, the sum of each row's copies; differentiable."""
    rows: Tensor = _Collect.apply(made, copies)
    return rows


def _collected(made: Tensor, copies: Copies) -> Tensor:
    """Sums in fp32 or wider, by one gather for each of the most copies that a row has."""
    count, places = len(copies.source), copies.places
    if not places.shape[1] or not count:
        return made.new_zeros(places.shape[0], *made.shape[1:])
    padded = torch.cat([made, made.new_zeros(1, *made.shape[1:])])
    total = padded[places[:, 0]]
    if places.shape[1] > 1:
        total = total.to(torch.promote_types(made.dtype, torch.float32))
        for column in places.unbind(1)[1:]:
            total += padded[column]
    return total.to(made.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return rows[copies.source]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _collected(grads[0], ctx.copies), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return _collected(made, copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.copies.source], None


def tied(made: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """``made``, marked as the same point of the graph on every rank.

    Every rank's graph must hold every message, or the others wait for gradients. So where ``made``
    does not depend on what has arrived, its backward still runs that of ``sources``, with zeros.
    And torch ends a recompute after the last saved tensor, which a rank without tokens would reach
    earlier: all save one here, behind what arrives and before what is sent back.

    Args:
        sources: tensors that have arrived; none where ``made`` depends on them.
    """
    if not made.requires_grad and not any(source.requires_grad for source in sources):
        sources = (torch.zeros((), device=made.device, requires_grad=True),)
    result: Tensor = _Tied.apply(made, *sources)
    return result


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, *sources: Tensor) -> Tensor:
        ctx.shapes = [(source.shape, source.dtype) for source in sources]
        ctx.save_for_backward(made.new_empty(0))
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        _ = ctx.saved_tensors  # a recompute that has not begun begins here, on every rank
        zeros = (grads[0].new_zeros((), dtype=kind).expand(shape) for shape, kind in ctx.shapes)
        return (grads[0], *zeros)
