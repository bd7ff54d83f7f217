"""Attention over ranges of positions: which queries see which keys, in pieces that kernels compute.

A rank holds some *ranges* of a sequence, one after another; keys come in *blocks*, each all that
one rank holds. :func:`parts` cuts queries and a block's keys at the edges of documents and of each
other's ranges, so that two pieces are either the same positions or apart, and a piece is seen
whole, by the triangle of a causal mask, or by the band of a window. Pure: no tensor, no group.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from internsp.sp.heads import Span

FULL, CAUSAL, BAND = "full", "causal", "band"
Ranges = tuple[Span, ...]
"""Half-open ranges of positions, in the order in which they are held; none empty."""
Needs = tuple[tuple[Ranges, ...], ...]
"""``needs[rank][block]``: what a rank sees of a block, counted in what the block's owner holds."""


@dataclass(frozen=True)
class Seen:
    """Which keys a query sees, as :class:`internsp.sp.kernels.AttentionMask`, without tensors.

    Attributes:
        documents: per row, the lengths of its documents; of one row where all are alike.
    """

    causal: bool
    window: int | None
    documents: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Part:
    """One call of a kernel: queries ``q`` of a rank over keys ``k`` of a block.

    Attributes:
        row: of the batch; -1: all rows.
        q, k: half-open, counted in what the rank and the block's owner hold.
        kind: ``full`` (every query sees every key), ``causal`` (the same positions, each query
            sees those up to its own) or ``band`` (where the window and the causal mask allow; every
            query sees a key).
        distance: position of the first query minus that of the first key.
    """

    row: int
    q: Span
    k: Span
    kind: str
    distance: int


@lru_cache(maxsize=4096)
def parts(queries: Ranges, keys: Ranges, seen: Seen) -> tuple[Part, ...]:
    """The calls that compute what ``queries`` see of ``keys``."""
    alone = len(seen.documents) == 1
    return tuple(
        part
        for row, lengths in enumerate(seen.documents)
        for part in _row(-1 if alone else row, queries, keys, lengths, seen)
    )


def _row(
    row: int, queries: Ranges, keys: Ranges, lengths: Sequence[int], seen: Seen
) -> Iterator[Part]:
    edges = {0, *accumulate(lengths)}
    edges.update(edge for span in (*queries, *keys) for edge in span)
    own, others = _cut(queries, sorted(edges)), _cut(keys, sorted(edges))
    ends = list(accumulate(lengths))
    theirs: dict[int, list[tuple[int, Span]]] = {}  # by document
    for at, span in others:
        theirs.setdefault(bisect_right(ends, span[0]), []).append((at, span))
    for at, query in own:
        whole: list[Part] = []
        for there, key in theirs.get(bisect_right(ends, query[0]), ()):
            part = _pair(row, at, query, there, key, seen)
            if part is None:
                continue
            before = whole[-1] if whole else None
            if before is not None and _joins(before, part):
                whole[-1] = Part(row, part.q, (before.k[0], part.k[1]), FULL, before.distance)
            else:
                whole.append(part)
        yield from whole


def _joins(before: Part, part: Part) -> bool:
    """Whether two pieces that are seen whole lie side by side: one call instead of two."""
    return (before.kind, part.kind) == (FULL, FULL) and (before.q, before.k[1]) == (
        part.q, part.k[0],
    )  # fmt: skip


def _pair(row: int, at: int, query: Span, there: int, key: Span, seen: Seen) -> Part | None:
    """What ``query`` sees of ``key``: the same positions, or all before it, or all behind it."""
    (qa, qb), (ka, kb), window = query, key, seen.window
    if query == key:
        size = qb - qa
        kind = CAUSAL if seen.causal else FULL
        if window is not None and window < size:
            kind = BAND
        return Part(row, (at, at + size), (there, there + size), kind, 0)
    behind = ka >= qb
    if behind and seen.causal:
        return None
    if window is not None:  # what no query, or no key, of the piece sees is cut off
        if behind:
            qa, kb = max(qa, ka - window + 1), min(kb, qb - 1 + window)
        else:
            qb, ka = min(qb, kb - 1 + window), max(ka, qa - window + 1)
        if qa >= qb or ka >= kb:
            return None
    furthest = kb - 1 - qa if behind else qb - 1 - ka
    kind = FULL if window is None or furthest < window else BAND
    q = (at + qa - query[0], at + qb - query[0])
    return Part(row, q, (there + ka - key[0], there + kb - key[0]), kind, qa - ka)


def _cut(ranges: Ranges, edges: Sequence[int]) -> list[tuple[int, Span]]:
    """Each range cut at the edges (rising) inside it, with its place among what is held."""
    found, at = [], 0
    for start, stop in ranges:
        inner = edges[bisect_right(edges, start) : bisect_left(edges, stop)]
        for a, b in pairwise([start, *inner, stop]):
            found.append((at, (a, b)))
            at += b - a
    return found


def united(spans: Iterable[Span]) -> Ranges:
    """The spans as few as can be, in order, none touching another."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def needs(held: Sequence[Ranges], seen: Seen) -> Needs:
    """What each rank's queries see of each rank's keys: the keys of all :func:`parts` of the two.

    By comparisons of ranges alone, and only of those that share a document.
    """
    found: list[list[list[Span]]] = [[[] for _ in held] for _ in held]
    for lengths in seen.documents:
        before = sum(lengths) if seen.window is None else seen.window - 1
        after = 0 if seen.causal else before
        for members in _by_document(held, lengths):
            for block, at, start, stop in members:
                for rank, _, a, b in members:
                    first, last = max(start, a - before), min(stop, b + after)
                    if first < last:
                        found[rank][block].append((at + first - start, at + last - start))
    return tuple(tuple(united(spans) if spans else () for spans in row) for row in found)


def _by_document(
    held: Sequence[Ranges], lengths: tuple[int, ...]
) -> Iterable[list[tuple[int, int, int, int]]]:
    """Of each document what all hold of it: rank, place among what it holds, start and stop."""
    ends = list(accumulate(lengths))
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    for rank, ranges in enumerate(held):
        for at, (start, stop) in _cut(ranges, ends):
            found.setdefault(bisect_right(ends, start), []).append((rank, at, start, stop))
    return found.values()
