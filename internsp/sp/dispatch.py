"""Which positions of a sequence each rank holds.

Ranks that share heads (:mod:`.exchange`) hold neighboring positions, whichever ranks these are
(:class:`internsp.mesh.sequence.SequenceAxes`). Ranks of a ring compute with
different queries, and under a causal mask a late query costs more than an early one: what they hold
is dealt so that all have as many positions and about as many pairs of a query and a key.

- ``contiguous``: one range each.
- ``zigzag``: of twice as many chunks as ranks, the i-th and the i-th from the end
  (arXiv 2311.09431): level for one causal document.
- ``level``: more and smaller chunks, dealt by what they cost, the costly first, to the rank that
  has least so far (longest processing time first): level for packed documents, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from internsp.errors import ConfigError
from internsp.mesh.sequence import SequenceAxes
from internsp.sp.heads import Span, balanced, spans
from internsp.sp.ranges import Ranges, Seen

FIXED = "zigzag"  # whose shares are as long whatever the documents
BALANCES = ("auto", "contiguous", "zigzag", "level")
_CHUNKS = 8  # of a rank, when they are dealt by cost
_LEVEL = 1.05  # what the busiest rank may have of the average


@lru_cache(maxsize=64)
def cut(length: int, axes: SequenceAxes, balance: str, seen: Seen) -> tuple[Ranges, ...]:
    """The ranges of each rank of a sequence.

    Args:
        balance: see the module's text; ``auto`` takes the first that is level, since fewer ranges
            need fewer keys of others.

    Raises:
        ConfigError: an unknown balance.
    """
    if balance not in BALANCES:
        raise ConfigError(f"No balance {balance!r} of positions; choose one of {BALANCES}.")
    if axes.ring == 1:
        even = spans(balanced(length, axes.size))
        return tuple((span,) if span[0] < span[1] else () for span in even)
    dealt = [_shares(held, axes.heads) for held in deal(length, axes.ring, balance, seen)]
    places = map(axes.place, range(axes.size))
    return tuple(dealt[part][share] for part, share in places)


def fixed_sizes(length: int, axes: SequenceAxes) -> tuple[int, ...]:
    """Positions of each rank in a :data:`FIXED` balance: the same for all batches."""
    held = cut(length, axes, FIXED, Seen(True, None, ((length,),)))
    return tuple(sum(stop - start for start, stop in ranges) for ranges in held)


def by_part(ranges: Sequence[Ranges], axes: SequenceAxes) -> tuple[Ranges, ...]:
    """What each rank of a ring computes with: all that those ranks hold that share its heads."""
    return tuple(
        joined([span for rank in axes.sharing(part) for span in ranges[rank]])
        for part in range(axes.ring)
    )


def deal(length: int, ring: int, balance: str, seen: Seen) -> tuple[Ranges, ...]:
    """The ranges of each rank of a ring."""
    makers = {"contiguous": _contiguous, "zigzag": _zigzag, "level": _by_cost}
    if balance != "auto":
        return makers[balance](length, ring, seen)
    made = []
    for make in makers.values():
        made.append(make(length, ring, seen))
        if imbalance(made[-1], seen) <= _LEVEL:
            return made[-1]
    return min(made, key=lambda held: imbalance(held, seen))


def imbalance(held: Sequence[Ranges], seen: Seen) -> float:
    """The pairs of a query and a key of the busiest rank, over those of the average one."""
    areas = [sum(cost(span, seen) for span in ranges) for ranges in held]
    return max(areas) * len(areas) / max(1, sum(areas))


def _contiguous(length: int, ring: int, seen: Seen) -> tuple[Ranges, ...]:
    return tuple(joined([span]) for span in spans(balanced(length, ring)))


def _zigzag(length: int, ring: int, seen: Seen) -> tuple[Ranges, ...]:
    chunks = spans(balanced(length, 2 * ring))
    return tuple(joined([chunks[i], chunks[-1 - i]]) for i in range(ring))


def _by_cost(length: int, ring: int, seen: Seen) -> tuple[Ranges, ...]:
    """Chunks of about equal length, an equal number for each rank, dealt by cost."""
    chunks = spans(balanced(length, ring * _CHUNKS))
    costs = [cost(chunk, seen) for chunk in chunks]
    order = sorted(range(len(chunks)), key=lambda i: (-costs[i], i))
    heap = [(0, 0, rank) for rank in range(ring)]  # cost so far, chunks, rank
    mine: list[list[Span]] = [[] for _ in range(ring)]
    for index in order:
        total, count, rank = heapq.heappop(heap)
        mine[rank].append(chunks[index])
        if count + 1 < _CHUNKS:  # a full rank gets no more: all have as many positions
            heapq.heappush(heap, (total + costs[index], count + 1, rank))
    return tuple(joined(sorted(held)) for held in mine)


def cost(chunk: Span, seen: Seen) -> int:
    """Pairs of a query of a range and a key that it sees, anywhere in the sequence."""
    found = 0
    most = chunk[1] + max(map(sum, seen.documents)) if seen.window is None else seen.window
    for lengths in seen.documents:
        for start, stop in spans(lengths):
            first, last = max(start, chunk[0]), min(stop, chunk[1])
            if first >= last:
                continue
            found += _capped(first - start + 1, last - start + 1, most)
            if not seen.causal:
                found += _capped(stop - last, stop - first, most - 1)
    return found


def _capped(first: int, stop: int, most: int) -> int:
    """The sum of ``min(x, most)`` over ``first <= x < stop``."""
    middle = min(max(first, most), stop)
    return (first + middle - 1) * (middle - first) // 2 + most * (stop - middle)


def _shares(held: Ranges, ranks: int) -> list[Ranges]:
    """Positions of some ranges over ranks that share heads, one after another."""
    total = sum(stop - start for start, stop in held)
    found = []
    for first, last in spans(balanced(total, ranks)):
        at, mine = 0, []
        for start, stop in held:
            a, b = max(first, at), min(last, at + stop - start)
            if a < b:
                mine.append((start + a - at, start + b - at))
            at += stop - start
        found.append(tuple(mine))
    return found


def order_of(ranges: Sequence[Ranges]) -> list[int] | None:
    """For each position of the sequence its place among what all ranks hold, rank after rank.

    None where they hold it in order.
    """
    spans = [span for held in ranges for span in held]
    places = accumulate((stop - start for start, stop in spans), initial=0)
    placed = sorted(zip(spans, places, strict=False))
    if [span for span, _ in placed] == spans:
        return None
    return [at + i for (start, stop), at in placed for i in range(stop - start)]


def joined(held: Sequence[Span]) -> Ranges:
    """The same positions in the same order, in as few ranges as can be, none empty."""
    found: list[Span] = []
    for start, stop in held:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)
