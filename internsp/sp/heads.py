"""Which rank of a sequence group computes which attention heads.

One rule covers grouped-query, multi-query and plain attention, heads that do not divide the
group and key/value heads fewer than the ranks: query heads are split into contiguous ranges whose
lengths differ by at most one, and a rank gets exactly the key/value heads that its query heads
read. A key/value head that several ranks read is sent once to each of them; it is never repeated
up to the number of query heads before it is sent (compare DeepSpeed-Ulysses, arXiv 2309.14509,
and InternEvo, arXiv 2401.09149, which need the degree to divide the heads).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from internsp.errors import LayoutError

Span = tuple[int, int]
HeadRanges = tuple[tuple[Span, ...], ...]
"""``[rank][part]``: the heads of a rank in each part of a tensor (queries, keys, values), as ranges
of the tensor's head dimension."""
Rotation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""A linear function of projected queries or keys ``[B, s, h, d]`` that treats all heads alike (a
rotary embedding), and its adjoint. Both keep the shape."""
NO_ROTATION: Rotation = (lambda x: x, lambda x: x)


def even_sizes(total: int, size: int) -> tuple[int, ...]:
    """Split ``total`` items over ``size`` ranks evenly; the first ranks get one more each.

    Raises:
        LayoutError: ``size`` below one or ``total`` negative.
    """
    if size < 1 or total < 0:
        raise LayoutError(
            f"Cannot split {total} items over {size} ranks; give a size of 1 or more."
        )
    share, more = divmod(total, size)
    return tuple(share + 1 if rank < more else share for rank in range(size))


def spans(sizes: Sequence[int]) -> tuple[Span, ...]:
    """Consecutive half-open ranges ``[start, stop)`` with the given lengths."""
    found, start = [], 0
    for size in sizes:
        found.append((start, start + size))
        start += size
    return tuple(found)


@dataclass(frozen=True)
class HeadPlan:
    """Query and key/value heads per rank of a sequence group.

    Attributes:
        heads: number of query heads of the model.
        kv_heads: number of key/value heads of the model; divides ``heads``.
        size: ranks of the sequence group.
        query: per rank, the half-open range of query heads it computes (may be empty).
        key_value: per rank, the half-open range of key/value heads that its query heads read (may
            be empty, and ranges of neighboring ranks may overlap).
    """

    heads: int
    kv_heads: int
    size: int
    query: tuple[Span, ...]
    key_value: tuple[Span, ...]

    @classmethod
    def create(cls, heads: int, kv_heads: int, size: int) -> HeadPlan:
        """Split ``heads`` query heads and ``kv_heads`` key/value heads over ``size`` ranks.

        Raises:
            LayoutError: counts below one, or ``kv_heads`` that does not divide ``heads``.
        """
        if heads < 1 or kv_heads < 1:
            raise LayoutError(
                f"Attention needs at least one head of each kind, got heads={heads}, "
                f"kv_heads={kv_heads}."
            )
        if heads % kv_heads:
            raise LayoutError(
                f"heads={heads} is not a multiple of kv_heads={kv_heads}: every key/value head "
                f"must serve equally many query heads. Choose kv_heads among the divisors of heads."
            )
        group = heads // kv_heads
        query = spans(even_sizes(heads, size))
        key_value = tuple(
            (first // group, (stop - 1) // group + 1) if stop > first else (0, 0)
            for first, stop in query
        )
        return cls(heads, kv_heads, size, query, key_value)

    def kv_index(self, rank: int) -> tuple[int, ...]:
        """For each query head of ``rank``, the index of its key/value head on that rank."""
        group = self.heads // self.kv_heads
        first, stop = self.query[rank]
        return tuple(head // group - self.key_value[rank][0] for head in range(first, stop))

    def of(self, role: str) -> tuple[tuple[Span, ...], int]:
        """Heads of each rank, and of the model: for ``k`` and ``v`` key/value heads, else query
        heads."""
        if role in ("k", "v"):
            return self.key_value, self.kv_heads
        return self.query, self.heads

    def ranges(self, roles: str) -> HeadRanges:
        """The ranges of ``[B, s, heads, d]`` that holds the heads of ``roles`` (``q``, ``k``,
        ``v``, ``kv``, ``qkv``) one after another."""
        found: list[list[Span]] = [[] for _ in range(self.size)]
        offset = 0
        for role in roles:
            spans, count = self.of(role)
            for own, (first, stop) in zip(found, spans, strict=True):
                own.append((offset + first, offset + stop))
            offset += count
        return tuple(map(tuple, found))
