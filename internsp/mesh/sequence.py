"""How the ranks of one sequence form the two axes over which its attention is split. Pure.

Ranks that share *heads* hold one part of the positions together and exchange heads (Ulysses); ranks
of a *ring* hold different parts, and send keys and values to each other. Neighboring ranks have the
fastest links; ``near`` names the axis of neighbors. For 4 ranks = heads 2 x ring 2::

    near     rank 0            rank 1            rank 2            rank 3
    heads    part 0, share 0   part 0, share 1   part 1, share 0   part 1, share 1
    ring     part 0, share 0   part 1, share 0   part 0, share 1   part 1, share 1

(head-first and context-first placement of LoongTrain, arXiv 2406.18485). Only this module knows the
order; all other code calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from internsp.errors import LayoutError

HEADS, RING = "heads", "ring"
NEAR = (HEADS, RING)


@dataclass(frozen=True)
class SequenceAxes:
    """How the ranks of a sequence are numbered. Make it with :meth:`create`.

    Attributes:
        heads: number of ranks that share one part's heads.
        ring: number of parts of the positions, over which attention itself is split.
        near: which ranks are neighbors, ``heads`` or ``ring``; always ``heads`` where one of the
            two degrees is 1, since it makes no difference then.
    """

    heads: int = 1
    ring: int = 1
    near: str = HEADS

    @classmethod
    def create(cls, size: int, ring: int = 1, near: str = HEADS) -> SequenceAxes:
        """The axes of a sequence over ``size`` ranks.

        Raises:
            LayoutError: ``ring`` does not divide ``size``, or ``near`` is not one of ``NEAR``.
        """
        if near not in NEAR:
            raise LayoutError(f"near = {near!r}: choose which ranks are neighbors, one of {NEAR}.")
        if ring < 1 or size % ring:
            raise LayoutError(f"A ring of {ring} does not divide the {size} ranks of the sequence.")
        return cls(size // ring, ring, HEADS if ring in (1, size) else near)

    @property
    def size(self) -> int:
        """Number of ranks of the sequence."""
        return self.heads * self.ring

    def rank(self, part: int, share: int) -> int:
        """The rank, in the sequence group, that computes heads ``share`` of ``part``."""
        if self.near == RING:
            return share * self.ring + part
        return part * self.heads + share

    def place(self, rank: int) -> tuple[int, int]:
        """(part, share) of a rank of the sequence group."""
        if self.near == RING:
            share, part = divmod(rank, self.ring)
            return part, share
        return divmod(rank, self.heads)

    def sharing(self, part: int) -> list[int]:
        """Ranks, in the sequence group, that share the heads of a part, in the order of shares."""
        return [self.rank(part, share) for share in range(self.heads)]

    def around(self, share: int) -> list[int]:
        """Ranks, in the sequence group, of the ring with the same heads, in the order of parts."""
        return [self.rank(part, share) for part in range(self.ring)]

    def groups(self, name: str) -> list[list[int]]:
        """All groups of :meth:`sharing` (``heads``) or of :meth:`around` (``ring``)."""
        if name == HEADS:
            return [self.sharing(part) for part in range(self.ring)]
        return [self.around(share) for share in range(self.heads)]

    def require_groups(self, heads: Sequence[int], ring: Sequence[int]) -> None:
        """Check that this rank's two groups are numbered as these axes are. Not collective.

        A mismatch that cannot be seen on this rank is seen on another one, whose position in its
        groups does not fit its rank in the sequence.

        Args:
            heads, ring: global ranks of the two groups, ascending.

        Raises:
            LayoutError: groups of other sizes or in another order.
        """
        inner, outer = (ring, heads) if self.near == RING else (heads, ring)
        between = [rank for rank in outer if inner[0] < rank < inner[-1] and rank not in inner]
        if (len(heads), len(ring)) != (self.heads, self.ring) or between:
            raise LayoutError(
                f"The groups of ranks {list(heads)} that share heads and {list(ring)} of a ring "
                f"are not those of a sequence of {self}: attach those of one mesh "
                "(mesh.heads_group, mesh.ring_group, axes = mesh.sequence_axes)."
            )

    def require_layout(self, layout_axes: SequenceAxes) -> None:
        """Check that a layout distributes positions over these axes, or over axes without a ring.

        Args:
            layout_axes: the axes that the layout is made for.

        Raises:
            LayoutError: the layout is made for other axes. All ranks have the same layout, so that
                all of them raise.
        """
        if layout_axes.ring > 1 and layout_axes != self:
            raise LayoutError(
                f"The layout distributes positions over {layout_axes}, but attention is split over "
                f"{self}: make it with ring = mesh.ring and near = mesh.near."
            )

    def __str__(self) -> str:
        near = f", the ranks of the {self.near} near" if self.ring > 1 and self.heads > 1 else ""
        return f"{self.size} ranks = heads {self.heads} x ring {self.ring}{near}"
