"""The sequence layout: which tokens of one batch a rank of a sequence group holds. Made for each
batch.

Labels and positions of a rank's tokens are computed from the token ids of the whole sequence, so
that the last token of a shard predicts the first token of the next shard, and never a token of the
next document. Apart from token ids (and labels that a caller gives), no tensor here has the length
of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from internsp.base.accelerator import copy_to
from internsp.errors import LayoutError
from internsp.mesh.sequence import SequenceAxes
from internsp.sp.dispatch import rank_ranges
from internsp.sp.ranges import MaskSpec, Ranges, count_positions

IGNORE_INDEX = -100
_COUNTED = 1 << 16  # positions whose labels exist at once where they are counted alone


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
        cls, starts: Sequence[Sequence[int]], length: int, device: torch.device | str = "cpu"
    ) -> Documents:
        """Make it from the starts of the documents of each row, 0 included.

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
        return cls(tuple(rows), length, copy_to(device, ends), max(flat))

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """``lengths``; only one row where all rows are equal."""
        return self.lengths[:1] if len(set(self.lengths)) == 1 else self.lengths


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """One rank's shard of a batch, and what the rank must know about the whole batch.

    Attributes:
        length: tokens of the whole sequence, ``S``.
        sizes: tokens of each rank (this rank's is ``s``); they may differ, and be zero.
        ranges: for each rank, the half-open ranges of the sequence that it holds, in that order.
        input_ids: ``[B, s]`` int64, this rank's tokens.
        all_ids: ``[B, S]`` int64, the tokens of all ranks, for a model that shards them itself.
        positions: ``[B, s]`` int64, position of each token within its document.
        labels: ``[B, s]`` int64, ``ignore_index`` where there is nothing to predict.
        valid_tokens: labels of this rank that count.
        total_valid_tokens: labels of the whole sequence group's batch that count; every rank
            knows it without communication.
        boundaries: per row, the starts of its documents.
        documents: the same, in the form that attention kernels take.
        rank, size: this rank's number in the sequence group, and the group's size.
        axes: which ranks of the group share heads, and which are a ring.
        row_keys: ``[B]`` int64, a key for each row, from which dropout computes its masks
            (:mod:`internsp.layers.dropout`); None: not given.
        all_labels: ``[B, S]``, the labels of all ranks where they were given; None: they follow
            from the tokens, the documents and ``ignored``.
        ignored: per row, the ranges that are not to be predicted.
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
    axes: SequenceAxes
    ignore_index: int = IGNORE_INDEX
    row_keys: Tensor | None = field(default=None, repr=False)
    all_labels: Tensor | None = field(default=None, repr=False)
    ignored: tuple[Ranges, ...] = field(default=(), repr=False)

    @property
    def size(self) -> int:
        """Ranks of the sequence group."""
        return self.axes.size

    @classmethod
    def create(
        cls,
        ids: Tensor,
        *,
        rank: int = 0,
        size: int = 1,
        boundaries: Sequence[Sequence[int]] | None = None,
        labels: Tensor | None = None,
        ignored: Sequence[Sequence[tuple[int, int]]] | None = None,
        ignore_index: int = IGNORE_INDEX,
        ring: int = 1,
        near: str = "heads",
        balance: str = "auto",
        causal: bool = True,
        window: int | None = None,
        row_keys: Tensor | None = None,
    ) -> SequenceLayout:
        """Shard a batch for ``rank`` of ``size`` ranks. Pure: no communication.

        Args:
            ids: ``[B, S]`` integers, the whole batch, equal on all ranks of the group.
            ring: number of ranks of a ring, over which attention is sharded by positions
                (``mesh.ring``); ``size / ring`` ranks exchange heads.
            near: which of the two groups consists of neighboring ranks (``mesh.near``).
            balance: how positions are distributed over the ranks of a ring
                (:mod:`internsp.sp.dispatch`): ``contiguous``, ``zigzag``, ``level`` or ``auto``.
                With a ring of one, each rank holds one range.
            causal, window: the mask of the model's attention, whose cost ``balance`` equalizes.
            boundaries: per row, the starts of its documents, 0 included; None: one document a row.
            labels: ``[B, S]``, already aligned (``labels[t]`` is what position ``t`` predicts).
                None: the next token of the same document, ``ignore_index`` at its end.
            ignored: instead of ``labels``: per row, half-open ranges of tokens that are not to be
                predicted (prompts, padding), ascending and disjoint.
            row_keys: ``[B]`` int64, for a model with dropout, the same on all ranks of the group:
                ``internsp.row_keys(seed, numbers)`` of the rows' numbers in the
                order of the data.

        Raises:
            LayoutError: shapes, ranks, boundaries or ranges that do not fit.
        """
        if ids.dim() != 2 or 0 in ids.shape:
            raise LayoutError(f"Token ids must be [B, S] and not empty, got {list(ids.shape)}.")
        if ids.is_floating_point() or ids.is_complex():
            raise LayoutError(f"Token ids must be integers, got {ids.dtype}.")
        if window is not None and window < 1:
            raise LayoutError(f"A window of {window} hides every key; give 1 or more, or None.")
        if not 0 <= rank < size:
            raise LayoutError(f"Rank {rank} is not one of the {size} ranks of the sequence group.")
        if labels is not None and labels.shape != ids.shape:
            raise LayoutError(
                f"Labels must have the shape of the ids, {list(ids.shape)}, got "
                f"{list(labels.shape)}."
            )
        batch, length = ids.shape
        if row_keys is not None and (row_keys.dtype, row_keys.shape) != (torch.int64, (batch,)):
            raise LayoutError(
                f"{batch} rows of ids need {batch} row keys of int64, got {row_keys.dtype} "
                f"{list(row_keys.shape)}."
            )
        starts = tuple(tuple(row) for row in boundaries or [(0,)] * batch)
        if len(starts) != batch:
            raise LayoutError(f"{batch} rows of ids, but boundaries of {len(starts)} rows.")
        documents = Documents.create(starts, length, ids.device)
        spec = MaskSpec(causal, window, documents.rows)
        axes = SequenceAxes.create(size, ring, near)
        ranges = rank_ranges(length, axes, balance, spec)
        sizes = tuple(map(count_positions, ranges))
        held = ranges[rank]
        index = indices(held, ids.device)
        without = _check_ignored(ignored, batch, length, labels)
        if labels is None:
            targets = partial(_next_tokens, ids, starts, without, ignore_index)
            mine = targets(index)
            ends = ((at, min(at + _COUNTED, length)) for at in range(0, length, _COUNTED))
            pieces = (torch.arange(*span, device=ids.device) for span in ends)
            total = int(sum((targets(piece) != ignore_index).sum() for piece in pieces))
        else:
            mine = select_ranges(labels, held).to(torch.int64)
            total = int((labels != ignore_index).sum())
        return cls(
            length=length,
            sizes=sizes,
            ranges=ranges,
            input_ids=select_ranges(ids, held).to(torch.int64).contiguous(),
            all_ids=ids.to(torch.int64),
            positions=_positions(starts, index),
            labels=mine.contiguous(),
            valid_tokens=int((mine != ignore_index).sum()),
            total_valid_tokens=total,
            boundaries=starts,
            documents=documents,
            rank=rank,
            axes=axes,
            ignore_index=ignore_index,
            row_keys=row_keys,
            all_labels=labels,
            ignored=tuple(tuple((a, b) for a, b in row) for row in without),
        )

    def own(self, whole: Tensor) -> Tensor:
        """This rank's positions ``[B, s, ...]`` of a tensor ``whole [B, S, ...]``."""
        return select_ranges(whole, self.ranges[self.rank])

    @property
    def index(self) -> Tensor:
        """``[s]`` int64, the indices of this rank's tokens in the whole sequence; a new tensor."""
        return indices(self.ranges[self.rank], self.input_ids.device)

    @property
    def all_positions(self) -> Tensor:
        """``[B, S]`` int64, the positions of the tokens of all ranks; a new tensor."""
        return _positions(self.boundaries, indices(((0, self.length),), self.input_ids.device))

    def to(self, device: torch.device | str) -> SequenceLayout:
        """The same layout with its tensors on ``device``."""
        cu_seqlens = copy_to(device, self.documents.cu_seqlens)
        return replace(
            self,
            input_ids=copy_to(device, self.input_ids),
            all_ids=copy_to(device, self.all_ids),
            positions=copy_to(device, self.positions),
            labels=copy_to(device, self.labels),
            documents=replace(self.documents, cu_seqlens=cu_seqlens),
            row_keys=None if self.row_keys is None else copy_to(device, self.row_keys),
            all_labels=None if self.all_labels is None else copy_to(device, self.all_labels),
        )


def select_ranges(whole: Tensor, held: Ranges, dim: int = 1) -> Tensor:
    """Select the ranges ``held`` of ``whole`` along ``dim``; a view if it is one range."""
    pieces = [whole.narrow(dim, start, stop - start) for start, stop in held]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [whole.narrow(dim, 0, 0)], dim)


def in_order(gathered: Tensor, ranges: Sequence[Ranges]) -> Tensor:
    """Reorder ``[B, S, ...]``, gathered rank after rank, to sequence order."""
    spans = [span for held in ranges for span in held]
    order = sorted(range(len(spans)), key=spans.__getitem__)
    if order == list(range(len(spans))):
        return gathered
    # split, not slices: its backward writes each gradient once.
    pieces = gathered.split([stop - start for start, stop in spans], 1)
    return torch.cat([pieces[i] for i in order], 1)


def indices(held: Ranges, device: torch.device) -> Tensor:
    """The indices in the sequence that the ranges ``held`` cover, ``[s]`` int64."""
    pieces = [torch.arange(start, stop, device=device) for start, stop in held]
    return torch.cat(pieces or [torch.arange(0, device=device)])


def _positions(starts: Sequence[Sequence[int]], index: Tensor) -> Tensor:
    """``[B, s]``: the position within its document of each index of the sequence."""
    within = {row: index - _last_start(row, index) for row in set(map(tuple, starts))}
    return torch.stack([within[tuple(row)] for row in starts])


def _last_start(starts: Sequence[int], index: Tensor) -> Tensor:
    """For each index, the last of ``starts`` (ascending from 0) that is not after it."""
    first = torch.tensor(starts, device=index.device)
    return first[torch.searchsorted(first, index, right=True) - 1]


def _check_ignored(
    ignored: Sequence[Sequence[tuple[int, int]]] | None,
    batch: int,
    length: int,
    labels: Tensor | None,
) -> Sequence[Sequence[tuple[int, int]]]:
    if ignored is None:
        return [()] * batch
    if labels is not None:
        raise LayoutError("Give labels or ignored ranges, not both: labels mark ignored tokens.")
    if len(ignored) != batch:
        raise LayoutError(f"{batch} rows of ids, but ignored ranges of {len(ignored)} rows.")
    for row, ranges in enumerate(ignored):
        edges = [0, *(edge for span in ranges for edge in span), length]
        if any(a > b for a, b in pairwise(edges)) or any(a == b for a, b in ranges):
            raise LayoutError(
                f"Ignored ranges of row {row} must rise within 0 and {length} and hold a token; "
                f"got {list(ranges)}."
            )
    return ignored


def _next_tokens(
    ids: Tensor,
    starts: Sequence[Sequence[int]],
    ignored: Sequence[Sequence[tuple[int, int]]],
    ignore_index: int,
    index: Tensor,
) -> Tensor:
    """``[B, s]`` int64: the token that each position of ``index`` predicts, the next one.

    Not predicted are the first token of each document, tokens in ignored ranges, and tokens whose
    id is ``ignore_index``.
    """
    following = index + 1
    last = following == ids.shape[1]
    within = following.masked_fill(last, 0)
    rows = []
    first = {row: _last_start(row, within) == within for row in set(map(tuple, starts))}
    for row_ids, own, ranges in zip(ids, starts, ignored, strict=True):
        not_predicted = last | first[tuple(own)]
        if ranges:
            edges = torch.tensor(ranges, device=index.device).flatten()
            not_predicted |= torch.searchsorted(edges, within, right=True) % 2 == 1
        rows.append(row_ids[within].to(torch.int64).masked_fill(not_predicted, ignore_index))
    return torch.stack(rows)
