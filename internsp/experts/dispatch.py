"""How tokens meet their experts: all here (:func:`local`), or at the experts' owners.

Where weights are gathered (``expert_weight``), every rank has all experts when it computes, so
that gathered experts are dispatched locally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from internsp.errors import LayoutError
from internsp.experts.exchange import Message, OwnerGroup, exchange_counts
from internsp.experts.routes import Copies, collect, spread, tied

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Experts that are here: ``hidden [n, h]``, ``index [n, k]``, ``weights [n, k]`` -> ``[n, h]``."""

Dispatch = Callable[[Compute, Tensor, Tensor, Tensor, Callable[[], Any]], tuple[Tensor, Any]]
"""Computes tokens by their experts, wherever these are: the weighted sum of each token's experts,
as one process with all experts computes it, and what the last argument returns.

- compute: the experts of this rank, by their local numbers.
- hidden: tokens ``[T, h]``; other ranks may have another ``T``, or none.
- index: ``[T, k]``, each token's experts among all; -1 where it has fewer, for experts that know
  it.
- weights: ``[T, k]``, each expert's weight.
- meanwhile: what may be computed while tokens travel.
"""


def local(
    compute: Compute, hidden: Tensor, index: Tensor, weights: Tensor, meanwhile: Callable[[], Any]
) -> tuple[Tensor, Any]:
    """A :data:`Dispatch` of experts that are all here, as on one process."""
    return compute(hidden, index, weights), meanwhile()


_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_OUT_OF_RANGE, _SHAPES = 1, 2  # faults that an owner tells the others


class Exchanged:
    """A :data:`Dispatch`: tokens travel to the owners of their experts, and results back.

    Each token travels once to each rank that owns at least one of its experts, with its ``k``
    numbers and weights; the owner sums what its experts make of it and sends one row back.

    Args:
        group: the owners.
        name: of the module that holds the experts.
        experts: number of experts of all owners; each has the same number, in order.
        parameters: this rank's experts' parameters, as they are now.
        lowest: number of an expert that is in range: -1 where it means none, or 0.
    """

    def __init__(
        self,
        group: OwnerGroup,
        name: str,
        experts: int,
        parameters: Callable[[], Iterable[nn.Parameter]],
        lowest: int,
    ) -> None:
        self.group, self.name, self.experts = group, name, experts
        self.each, self.lowest = experts // group.size, lowest
        self._parameters = parameters

    @torch.compiler.disable  # sizes of its messages differ between ranks (WP-2, WP-13)
    def __call__(
        self,
        compute: Compute,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        meanwhile: Callable[[], Any],
    ) -> tuple[Tensor, Any]:
        """See :data:`Dispatch`. Collective over the owners; blocks.

        Raises:
            LayoutError: on every owner, if one of them has numbers out of range or wrong shapes.
        """
        trains = torch.is_grad_enabled() and any(
            t.requires_grad for t in (hidden, weights, *self._parameters())
        )
        fits = _fits(hidden, index, weights)
        table, chosen = self._table(hidden, index, weights, trains) if fits else (None, index)
        if table is None:
            table = torch.zeros(self.group.size, 9, dtype=torch.int64, device=hidden.device)
            table[:, 8] = _SHAPES
        sent, arrived = exchange_counts(table, self.group, self.name)
        if any(row[4:] != sent[0][4:] or row[8] for row in (*sent, *arrived)):
            raise self._refusal(sent, arrived, hidden, index, weights)
        send, receive = [row[0] for row in sent], [row[0] for row in arrived]
        copies, _ = Copies.of(chosen, sum(send), sent[0][3], by_column=True)
        message = Message(
            spread(hidden, copies), spread(weights, copies), index[copies.source],
            self.group, send, receive, self.name, "tokens",
        )  # fmt: skip
        own = meanwhile()
        rows, of_rows, numbers = message.wait()
        done = self._computed(compute, rows, of_rows, numbers, arrived)
        if trains:
            done = tied(done, () if done.requires_grad and len(done) else (rows, of_rows))
        no_weights = done.detach()[:, :0]
        back = Message(
            done, no_weights, numbers[:, :0], self.group, receive, send, self.name, "results"
        )
        return collect(back.wait()[0], copies), own

    def _table(
        self, hidden: Tensor, index: Tensor, weights: Tensor, trains: bool
    ) -> tuple[Tensor, Tensor]:
        """What this rank tells each owner, int64 ``[owners, 9]``, and whose experts a token chose.

        For each owner: rows; pairs of a row and an expert; the most pairs of a row. The same for
        all: the most owners of a row, the width, ``k``, dtypes, whether a backward follows, fault.
        """
        owners = self.group.size
        safe, some = index.clamp(0, self.experts - 1), index >= 0
        pairs = torch.zeros(len(hidden), owners, dtype=torch.int64, device=hidden.device)
        pairs.scatter_add_(1, safe // self.each, some.long())
        chosen = pairs > 0
        table = pairs.new_zeros(owners, 9)
        table[:, 0], table[:, 1] = chosen.sum(0), pairs.sum(0)
        if len(hidden):
            table[:, 2], table[:, 3] = pairs.amax(0), chosen.sum(1).amax()
        dtypes = 8 * _FLOATS.index(hidden.dtype) + _FLOATS.index(weights.dtype)
        facts = (hidden.shape[1], index.shape[1], dtypes, int(trains))
        table[:, 4:8] = torch.tensor(facts, device=hidden.device)
        outside = (index < self.lowest) | (index >= self.experts)
        table[:, 8] = _OUT_OF_RANGE * outside.any()
        return table, chosen

    def _computed(
        self,
        compute: Compute,
        rows: Tensor,
        weights: Tensor,
        numbers: Tensor,
        arrived: Sequence[Sequence[int]],
    ) -> Tensor:
        """Partial sums ``[n, h]`` of this rank's experts for the rows that have arrived."""
        count = sum(row[1] for row in arrived)
        if not count:
            return torch.zeros_like(rows)
        mine = numbers // self.each == self.group.rank
        copies, slot = Copies.of(mine, count, max(row[2] for row in arrived), by_column=False)
        local = numbers[copies.source, slot].long() - self.group.rank * self.each
        # One expert a row: not every experts' implementation knows a number for "none of mine".
        done = compute(spread(rows, copies), local[:, None], weights[copies.source, slot][:, None])
        return collect(done, copies).to(rows.dtype)

    def _refusal(
        self,
        sent: Sequence[Sequence[int]],
        arrived: Sequence[Sequence[int]],
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
    ) -> LayoutError:
        """The error for a fault of this rank or of another one, or for ranks that differ."""
        own = dist.get_rank()
        ranks = dist.get_process_group_ranks(self.group.process_group)
        if sent[0][8] == _OUT_OF_RANGE:
            low, high = index.min().item(), index.max().item()
            return LayoutError(
                f"{self.name} on rank {own} was given numbers of experts from {low} to {high}, but "
                f"there are {self.experts}: its router must return 0 to {self.experts - 1}"
            )
        if sent[0][8] == _SHAPES:
            return LayoutError(
                f"{self.name} on rank {own} was given tokens {_about(hidden)}, index "
                f"{_about(index)} and weights {_about(weights)}: it takes floating tokens [T, h], "
                "whole numbers [T, k] and floating weights [T, k]"
            )
        for rank, row in zip(ranks, arrived, strict=True):
            if row[8]:
                what = "numbers of experts out of range" if row[8] == _OUT_OF_RANGE else "shapes"
                return LayoutError(
                    f"{self.name}: rank {rank} was given {what} that it refuses (this is rank "
                    f"{own}); its own error says more"
                )
        rank, row = next(
            (r, a) for r, a in zip(ranks, arrived, strict=True) if a[4:] != sent[0][4:]
        )
        return LayoutError(
            f"{self.name} was given {_facts(sent[0])} on rank {own}, but {_facts(row)} on rank "
            f"{rank}: tokens that are exchanged must have one width, one number of experts a "
            "token, the same dtypes, and a backward on all ranks or on none"
        )


def _fits(hidden: Tensor, index: Tensor, weights: Tensor) -> bool:
    floats = hidden.dtype in _FLOATS and weights.dtype in _FLOATS
    whole = not index.is_floating_point() and not index.is_complex() and index.dtype != torch.bool
    shapes = hidden.dim() == index.dim() == 2 and index.shape == weights.shape
    return floats and whole and shapes and len(hidden) == len(index)


def _about(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def _facts(row: Sequence[int]) -> str:
    dtypes = [str(_FLOATS[code]).removeprefix("torch.") for code in divmod(row[6], 8)]
    after = "a backward follows" if row[7] else "no backward follows"
    return f"tokens [T, {row[4]}] of {dtypes[0]}, weights [T, {row[5]}] of {dtypes[1]}, {after}"
