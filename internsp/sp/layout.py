"""The sequence layout: what a rank of a sequence group holds of one batch. Made once a batch.

Labels and positions are made from the whole sequence *before* it is cut, so that the last token of
a shard is trained against the first of the next shard, and never against the next document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from internsp.errors import LayoutError
from internsp.sp.dispatch import cut, order_of
from internsp.sp.ranges import Ranges, Seen

IGNORE_INDEX = -100


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents packed into a batch; attention never crosses from one to another.

    Attributes:
        lengths: per row, the lengths of its documents in tokens; each row sums to ``length``.
        length: tokens of a row, ``S``.
        cu_seqlens: ``[documents + 1]`` int32, starts of the documents in the flattened batch
            ``[B * S]`` and its end, as variable-length kernels take them.
        longest: tokens of the longest document.
    """

    lengths: tuple[tuple[int, ...], ...]
    length: int
    cu_seqlens: Tensor
    longest: int

    @classmethod
    def create(
        cls, starts: Sequence[Sequence[int]], length: int, device: torch.device | str | None = None
    ) -> Documents:
        """From the starts of the documents of each row, 0 included.

        Raises:
            LayoutError: starts that do not begin with 0, do not rise, or lie outside the row.
        """
        rows = []
        for row, given in enumerate(starts):
            edges = [int(start) for start in given] + [length]
            if edges[0] != 0 or any(a >= b for a, b in pairwise(edges)):
                raise LayoutError(
                    f"Boundaries of row {row} must begin with 0, rise and stay below the length "
                    f"{length}; got {list(given)}."
                )
            rows.append(tuple(b - a for a, b in pairwise(edges)))
        flat = [size for sizes in rows for size in sizes]
        ends = torch.tensor([0, *flat], dtype=torch.int64).cumsum(0).to(torch.int32)
        return cls(tuple(rows), length, ends.to(device), max(flat))

    @property
    def whole_rows(self) -> bool:
        """Whether every row is a single document."""
        return all(len(sizes) == 1 for sizes in self.lengths)

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """``lengths``, of one row only where all rows have the same."""
        return self.lengths[:1] if len(set(self.lengths)) == 1 else self.lengths

    def to(self, device: torch.device | str) -> Documents:
        """The same documents, with ``cu_seqlens`` on ``device``."""
        return replace(self, cu_seqlens=self.cu_seqlens.to(device))


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """One rank's share of a batch, and what it must know of the whole.

    Attributes:
        length: tokens of the whole sequence, ``S``.
        sizes: tokens of each rank, ``s`` of this one; they may differ, and be zero.
        ranges: of each rank, the half-open ranges of the sequence that it holds, in that order.
        input_ids: ``[B, s]`` int64, this rank's tokens.
        all_ids: ``[B, S]`` int64, those of all ranks, for a model that cuts them itself.
        positions: ``[B, s]`` int64, position of each token within its document.
        labels: ``[B, s]`` int64, ``ignore_index`` where there is nothing to predict.
        valid_tokens: labels of this rank that count.
        total_valid_tokens: labels of the whole sequence group's batch that count; every rank
            knows it without communication.
        boundaries: per row, the starts of its documents.
        documents: the same for attention kernels.
        rank, size: place in the sequence group.
    """

    length: int
    sizes: tuple[int, ...]
    ranges: tuple[Ranges, ...] = field(repr=False)
    input_ids: Tensor = field(repr=False)
    all_ids: Tensor = field(repr=False)
    positions: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    valid_tokens: int
    total_valid_tokens: int
    boundaries: tuple[tuple[int, ...], ...] = field(repr=False)
    documents: Documents = field(repr=False)
    rank: int
    size: int
    ignore_index: int = IGNORE_INDEX

    @classmethod
    def create(
        cls,
        ids: Tensor,
        *,
        rank: int = 0,
        size: int = 1,
        boundaries: Sequence[Sequence[int]] | None = None,
        labels: Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
        ring: int = 1,
        balance: str = "auto",
        causal: bool = True,
        window: int | None = None,
    ) -> SequenceLayout:
        """Cut a batch for ``rank`` of ``size`` ranks. Pure: no communication.

        Args:
            ids: ``[B, S]`` integers, the whole batch, equal on all ranks of the group.
            ring: of the ranks, over how many attention is cut by positions (``mesh.ring``); the
                others share heads.
            balance: how positions are dealt to the ranks of a ring (:mod:`internsp.sp.dispatch`):
                ``contiguous``, ``zigzag``, ``level`` or ``auto``. With a ring of one they follow
                one another.
            causal, window: of the model's attention, which ``balance`` levels.
            boundaries: per row, the starts of its documents, 0 included; None: one document a row.
            labels: ``[B, S]``, already aligned (``labels[t]`` is what position ``t`` predicts).
                None: the next token of the same document, ``ignore_index`` at its end.

        Raises:
            LayoutError: shapes, ranks or boundaries that do not fit.
        """
        if ids.dim() != 2 or 0 in ids.shape:
            raise LayoutError(f"Token ids must be [B, S] and not empty, got {list(ids.shape)}.")
        if not 0 <= rank < size:
            raise LayoutError(f"Rank {rank} is not one of the {size} ranks of the sequence group.")
        if labels is not None and labels.shape != ids.shape:
            raise LayoutError(
                f"Labels must have the shape of the ids, {list(ids.shape)}, got "
                f"{list(labels.shape)}."
            )
        batch, length = ids.shape
        starts = tuple(tuple(row) for row in boundaries or [(0,)] * batch)
        if len(starts) != batch:
            raise LayoutError(f"{batch} rows of ids, but boundaries of {len(starts)} rows.")
        documents = Documents.create(starts, length, ids.device)
        positions = _positions(documents, ids.device)
        if labels is None:
            labels = _next_tokens(ids, positions, ignore_index)
        seen = Seen(causal, window, documents.rows)
        ranges = cut(length, size, ring, balance, seen)
        sizes = tuple(sum(stop - start for start, stop in held) for held in ranges)
        held = ranges[rank]
        mine = taken(labels, held).to(torch.int64)
        return cls(
            length=length,
            sizes=sizes,
            ranges=ranges,
            input_ids=taken(ids, held).to(torch.int64).contiguous(),
            all_ids=ids.to(torch.int64),
            positions=taken(positions, held).contiguous(),
            labels=mine.contiguous(),
            valid_tokens=int((mine != ignore_index).sum()),
            total_valid_tokens=int((labels != ignore_index).sum()),
            boundaries=starts,
            documents=documents,
            rank=rank,
            size=size,
            ignore_index=ignore_index,
        )

    def own(self, whole: Tensor) -> Tensor:
        """What this rank holds of ``whole [B, S, ...]``: ``[B, s, ...]``."""
        return taken(whole, self.ranges[self.rank])

    @property
    def all_positions(self) -> Tensor:
        """``[B, S]`` int64, those of all ranks; made anew."""
        return _positions(self.documents, self.input_ids.device)

    def to(self, device: torch.device | str) -> SequenceLayout:
        """The same layout with its tensors on ``device``."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            all_ids=self.all_ids.to(device),
            positions=self.positions.to(device),
            labels=self.labels.to(device),
            documents=self.documents.to(device),
        )


def taken(whole: Tensor, held: Ranges, dim: int = 1) -> Tensor:
    """The positions of some ranges out of all on ``dim``; a view where it is one range."""
    pieces = [whole.narrow(dim, start, stop - start) for start, stop in held]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [whole.narrow(dim, 0, 0)], dim)


def in_order(gathered: Tensor, ranges: Sequence[Ranges], dim: int = 1) -> Tensor:
    """In the order of the sequence, what all ranks hold on ``dim``, rank after rank."""
    order = order_of(ranges)
    if order is None:
        return gathered
    return gathered.index_select(dim, torch.tensor(order, device=gathered.device))


def _positions(documents: Documents, device: torch.device) -> Tensor:
    """``[B, S]``: 0, 1, 2, ... from the start of each document."""
    rows = [torch.cat([torch.arange(size) for size in sizes]) for sizes in documents.lengths]
    return torch.stack(rows).to(device)


def _next_tokens(ids: Tensor, positions: Tensor, ignore_index: int) -> Tensor:
    """Ids shifted left by one; a position followed by the start of a document predicts nothing."""
    labels = torch.full_like(ids, ignore_index, dtype=torch.int64)
    labels[:, :-1] = ids[:, 1:].masked_fill(positions[:, 1:] == 0, ignore_index)
    return labels
