"""Attention over ranges of positions: which queries see which keys, in calls of kernels.

A rank holds some *ranges* of a sequence, one after another. Keys come in *blocks*; a block is all
keys that one rank holds. :func:`kernel_calls` splits queries and the keys of a block at the edges
of documents and of each other's ranges. A piece of the queries and a piece of the keys then have
either the same positions or none in common, and the mask between them is full, causal, or the band
of a window. Pure: no tensor, no group.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise

from internsp.sp.heads import Span

FULL, CAUSAL, BAND = "full", "causal", "band"
Ranges = tuple[Span, ...]
"""Half-open ranges of positions, in the order in which a rank holds them; none empty."""
NeededSpans = tuple[tuple[Ranges, ...], ...]
"""``[rank][block]``: the keys of a block that a rank needs, as offsets into the block."""


def count_positions(ranges: Ranges) -> int:
    """How many positions they cover."""
    return sum(stop - start for start, stop in ranges)


@dataclass(frozen=True)
class MaskSpec:
    """Which keys a query sees: :class:`internsp.sp.kernels.AttentionMask` without tensors.

    Attributes:
        causal, window: as in ``AttentionMask``.
        documents: per row, the lengths of its documents; only one row where all rows are equal.
    """

    causal: bool
    window: int | None
    documents: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel: queries ``q`` of a rank over keys ``k`` of a block.

    Attributes:
        row: row of the batch; -1 for all rows.
        q, k: half-open ranges of offsets: into the rank's queries, and into the block's keys.
        kind: ``full`` (every query sees every key), ``causal`` (queries and keys have the same
            positions; a query sees the keys up to its own position) or ``band`` (a query sees the
            keys that the window and the causal mask allow, and at least one).
        distance: position of the first query minus that of the first key.
    """

    row: int
    q: Span
    k: Span
    kind: str
    distance: int


@lru_cache(maxsize=4096)
def kernel_calls(queries: Ranges, keys: Ranges, spec: MaskSpec) -> tuple[KernelCall, ...]:
    """The kernel calls that compute the attention of ``queries`` to ``keys``."""
    one_row = len(spec.documents) == 1
    return tuple(
        call
        for row, lengths in enumerate(spec.documents)
        for call in _row_calls(-1 if one_row else row, queries, keys, lengths, spec)
    )


def _row_calls(
    row: int, queries: Ranges, keys: Ranges, lengths: Sequence[int], spec: MaskSpec
) -> Iterator[KernelCall]:
    ends = list(accumulate(lengths))
    edges = sorted({*ends, *(edge for span in (*queries, *keys) for edge in span)})
    keys_by_document: dict[int, list[tuple[int, Span]]] = {}
    for at, span in _split_at(keys, edges):
        keys_by_document.setdefault(bisect_right(ends, span[0]), []).append((at, span))
    for at, query in _split_at(queries, edges):
        row_calls: list[KernelCall] = []
        for key_offset, key in keys_by_document.get(bisect_right(ends, query[0]), ()):
            for call in _piece_calls(row, at, query, key_offset, key, spec):
                before = row_calls[-1] if row_calls else call
                # Full calls of the same queries, with adjacent keys, can be one.
                adjacent = (before.kind, before.q, before.k[1]) == (FULL, call.q, call.k[0])
                if adjacent and call.kind == FULL:
                    joined = before.k[0], call.k[1]
                    row_calls[-1] = KernelCall(row, call.q, joined, FULL, before.distance)
                else:
                    row_calls.append(call)
        yield from row_calls


def _piece_calls(
    row: int, at: int, query: Span, key_offset: int, key: Span, spec: MaskSpec
) -> Iterator[KernelCall]:
    """The calls for a piece of queries and a piece of keys, which are equal or disjoint."""
    (qa, qb), (ka, kb), window = query, key, spec.window

    def call(first: int, last: int, kind: str) -> KernelCall:
        """Of the queries ``[first, last)`` over the keys ``[ka, kb)``."""
        q = (at + first - query[0], at + last - query[0])
        k = (key_offset + ka - key[0], key_offset + kb - key[0])
        return KernelCall(row, q, k, kind, first - ka)

    if query == key:
        kind = CAUSAL if spec.causal else FULL
        yield call(qa, qb, kind if window is None or window >= qb - qa else BAND)
        return
    behind = ka >= qb
    if behind and spec.causal:
        return
    if window is None:
        yield call(qa, qb, FULL)
    elif behind:
        # Without queries that see no key of the piece, and keys that no query sees. A query from
        # ``near`` on sees all that are left, and has a call without a mask: flash attention takes
        # a right side of a window as long as the keys for no limit, which only holds where no
        # query, counted from the end, is further from the last key.
        qa, kb = max(qa, ka - window + 1), min(kb, qb - 1 + window)
        # The last query of a band sees all keys, too, so that its right side is 0.
        near = qa if kb - window <= qa else kb - window + 1
        if qa < near and ka < kb:
            yield call(qa, near, BAND)
        if near < qb and ka < kb:
            yield call(near, qb, FULL)
    else:
        qb, ka = min(qb, kb - 1 + window), max(ka, qa - window + 1)
        if qa < qb and ka < kb:
            yield call(qa, qb, FULL if qb - 1 - ka < window else BAND)


def _split_at(ranges: Ranges, edges: Sequence[int]) -> list[tuple[int, Span]]:
    """Split each range at the (ascending) edges inside it; give each piece with its offset."""
    found, at = [], 0
    for start, stop in ranges:
        inner = edges[bisect_right(edges, start) : bisect_left(edges, stop)]
        for a, b in pairwise([start, *inner, stop]):
            found.append((at, (a, b)))
            at += b - a
    return found


def union(spans: Iterable[Span]) -> Ranges:
    """The union of the spans: ascending, disjoint and not adjacent."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def needed_spans(held: Sequence[Ranges], spec: MaskSpec) -> NeededSpans:
    """The keys of each rank's block that each rank's queries see.

    Equal to the union of the keys of all :func:`kernel_calls` of the two ranks, but found by
    comparing ranges only, and only ranges that share a document.
    """
    found: list[list[list[Span]]] = [[[] for _ in held] for _ in held]
    for lengths in spec.documents:
        before = sum(lengths) if spec.window is None else spec.window - 1
        after = 0 if spec.causal else before
        for members in _by_document(held, lengths):
            runs = [(block, run) for block, pieces in members for run in _ascending(pieces)]
            for rank, pieces in members:
                row = found[rank]
                for first, last in union((a - before, b + after) for _, a, b in pieces):
                    for block, (offsets, starts, stops) in runs:
                        i, j = bisect_right(stops, first), bisect_left(starts, last) - 1
                        if i <= j:
                            begin = offsets[i] + max(0, first - starts[i])
                            row[block].append((begin, offsets[j] + min(last, stops[j]) - starts[j]))
    joined = cache(union)  # equal results are one object
    return tuple(tuple(joined(tuple(spans)) for spans in row) for row in found)


_Piece = tuple[int, int, int]
"""What a rank holds of a document: offset into its block, start, stop."""


def _by_document(
    held: Sequence[Ranges], lengths: tuple[int, ...]
) -> Iterable[Iterable[tuple[int, list[_Piece]]]]:
    """For each document, the ranks that hold pieces of it, with them."""
    ends = list(accumulate(lengths))
    found: dict[int, dict[int, list[_Piece]]] = {}
    for rank, ranges in enumerate(held):
        for at, (start, stop) in _split_at(ranges, ends):
            own = found.setdefault(bisect_right(ends, start), {})
            own.setdefault(rank, []).append((at, start, stop))
    return [own.items() for own in found.values()]


def _ascending(pieces: Sequence[_Piece]) -> list[tuple[list[int], list[int], list[int]]]:
    """Offsets, starts and stops of pieces that follow one another, in their block and in their
    positions: keys between two positions are then between two offsets."""
    found: list[tuple[list[int], list[int], list[int]]] = []
    stops: list[int] = []
    end = -1
    for at, start, stop in pieces:
        if at != end or start < stops[-1]:
            stops = []
            found.append(([], [], stops))
        offsets, starts, _ = found[-1]
        offsets.append(at)
        starts.append(start)
        stops.append(stop)
        end = at + stop - start
    return found
