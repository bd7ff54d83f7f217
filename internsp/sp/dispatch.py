"""Which positions of a sequence each rank holds.

Ranks that exchange heads (:mod:`.exchange`) hold neighboring positions, whichever ranks these are
(:class:`internsp.mesh.sequence.SequenceAxes`). The ranks of a ring compute with different queries,
and under a causal mask a late query costs more than an early one. Positions are therefore
distributed so that all ranks of a ring have equally many positions and about equally many pairs of
a query and a key:

- ``contiguous``: one range for each rank.
- ``zigzag``: the sequence is split into twice as many chunks as ranks; rank i holds the i-th chunk
  and the i-th from the end (arXiv 2311.09431). Balanced for one causal document.
- ``level``: more and smaller chunks; in descending order of cost, each goes to the rank with the
  least cost so far (longest processing time first). Balanced for packed documents, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

from internsp.errors import ConfigError
from internsp.mesh.sequence import SequenceAxes
from internsp.sp.heads import Span, even_sizes, spans
from internsp.sp.ranges import MaskSpec, Ranges, count_positions, union

FIXED_BALANCE = "zigzag"  # numbers of positions do not depend on the documents
BALANCES = ("auto", "contiguous", "zigzag", "level")
_CHUNKS_PER_RANK = 8  # for "level"
_MAX_IMBALANCE = 1.05  # pairs of the busiest rank over the average; above it "auto" tries the next


@lru_cache(maxsize=64)
def rank_ranges(
    length: int, axes: SequenceAxes, balance: str, spec: MaskSpec
) -> tuple[Ranges, ...]:
    """The ranges of positions of each rank of a sequence group.

    Args:
        balance: see the module's docstring; ``auto`` takes the first that is balanced, since with
            fewer ranges a rank needs fewer keys of other ranks.

    Raises:
        ConfigError: an unknown balance.
    """
    if balance not in BALANCES:
        raise ConfigError(f"No balance {balance!r} of positions; choose one of {BALANCES}.")
    if axes.ring == 1:
        even = spans(even_sizes(length, axes.size))
        return tuple((span,) if span[0] < span[1] else () for span in even)
    by_ring_rank = [
        _split_positions(held, axes.heads)
        for held in balance_ranges(length, axes.ring, balance, spec)
    ]
    places = map(axes.place, range(axes.size))
    return tuple(by_ring_rank[part][share] for part, share in places)


def fixed_sizes(length: int, axes: SequenceAxes) -> tuple[int, ...]:
    """Number of positions of each rank under :data:`FIXED_BALANCE`: the same for all batches."""
    held = rank_ranges(length, axes, FIXED_BALANCE, MaskSpec(True, None, ((length,),)))
    return tuple(map(count_positions, held))


def ring_ranges(ranges: Sequence[Ranges], axes: SequenceAxes) -> tuple[Ranges, ...]:
    """The ranges with which each rank of a ring computes: those of all ranks of its heads group."""
    return tuple(
        union(span for rank in axes.sharing(part) for span in ranges[rank])
        for part in range(axes.ring)
    )


def balance_ranges(length: int, ring: int, balance: str, spec: MaskSpec) -> tuple[Ranges, ...]:
    """The ranges of each rank of a ring, before they are split over the ranks that share heads."""
    makers = {"contiguous": _contiguous, "zigzag": _zigzag, "level": _by_cost}
    if balance != "auto":
        return makers[balance](length, ring, spec)
    made = []
    for make in makers.values():
        made.append(make(length, ring, spec))
        if imbalance(made[-1], spec) <= _MAX_IMBALANCE:
            return made[-1]
    return min(made, key=lambda held: imbalance(held, spec))


def imbalance(held: Sequence[Ranges], spec: MaskSpec) -> float:
    """Pairs of a query and a key on the busiest rank, divided by the average over the ranks."""
    areas = [sum(cost(span, spec) for span in ranges) for ranges in held]
    return max(areas) * len(areas) / max(1, sum(areas))


def _contiguous(length: int, ring: int, spec: MaskSpec) -> tuple[Ranges, ...]:
    return tuple(union([span]) for span in spans(even_sizes(length, ring)))


def _zigzag(length: int, ring: int, spec: MaskSpec) -> tuple[Ranges, ...]:
    chunks = spans(even_sizes(length, 2 * ring))
    return tuple(union([chunks[i], chunks[-1 - i]]) for i in range(ring))


def _by_cost(length: int, ring: int, spec: MaskSpec) -> tuple[Ranges, ...]:
    """Chunks of about equal length, equally many for each rank, assigned by cost."""
    chunks = spans(even_sizes(length, ring * _CHUNKS_PER_RANK))
    costs = [cost(chunk, spec) for chunk in chunks]
    order = sorted(range(len(chunks)), key=lambda i: (-costs[i], i))
    heap = [(0, 0, rank) for rank in range(ring)]  # cost so far, chunks, rank
    mine: list[list[Span]] = [[] for _ in range(ring)]
    for index in order:
        total, count, rank = heapq.heappop(heap)
        mine[rank].append(chunks[index])
        if count + 1 < _CHUNKS_PER_RANK:  # all ranks get equally many chunks
            heapq.heappush(heap, (total + costs[index], count + 1, rank))
    return tuple(union(held) for held in mine)


def cost(chunk: Span, spec: MaskSpec) -> int:
    """Pairs of a query in ``chunk`` and a key of the sequence that the query sees."""
    found = 0
    most = chunk[1] + max(map(sum, spec.documents)) if spec.window is None else spec.window
    for lengths in spec.documents:
        for start, stop in spans(lengths):
            first, last = max(start, chunk[0]), min(stop, chunk[1])
            if first >= last:
                continue
            found += _capped_sum(first - start + 1, last - start + 1, most)
            if not spec.causal:
                found += _capped_sum(stop - last, stop - first, most - 1)
    return found


def _capped_sum(first: int, stop: int, most: int) -> int:
    """The sum of ``min(x, most)`` over ``first <= x < stop``."""
    middle = min(max(first, most), stop)
    return (first + middle - 1) * (middle - first) // 2 + most * (stop - middle)


def _split_positions(held: Ranges, ranks: int) -> list[Ranges]:
    """Split the positions of ``held`` over the ``ranks`` ranks that share heads, in order."""
    found = []
    for first, last in spans(even_sizes(count_positions(held), ranks)):
        at, mine = 0, []
        for start, stop in held:
            a, b = max(first, at), min(last, at + stop - start)
            if a < b:
                mine.append((start + a - at, start + b - at))
            at += stop - start
        found.append(tuple(mine))
    return found
