"""The ranks of one sequence by the two axes over which its attention is cut. Pure.

Ranks that share *heads* hold one part of the positions between them and exchange heads; ranks of a
*ring* compute with other parts, and keys and values travel between them. Neighboring ranks are on
the fastest links; ``near`` says which of the two they are. Of 4 = heads 2 x ring 2::

    near     rank 0            rank 1            rank 2            rank 3
    heads    part 0, share 0   part 0, share 1   part 1, share 0   part 1, share 1
    ring     part 0, share 0   part 1, share 0   part 0, share 1   part 1, share 1

(head-first and context-first placement of LoongTrain, arXiv 2406.18485). This is the one place that
knows the order: everything else asks it.
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
        heads: ranks that share one part's heads.
        ring: parts of the positions, over which attention itself is cut.
        near: ``heads`` or ``ring``: whose ranks are neighbors; ``heads`` where one of the two has
            a single rank, since it makes no difference then.
    """

    heads: int = 1
    ring: int = 1
    near: str = HEADS

    @classmethod
    def create(cls, size: int, ring: int = 1, near: str = HEADS) -> SequenceAxes:
        """Of ``size`` ranks.

        Raises:
            LayoutError: a ring that does not divide the ranks, or another ``near``.
        """
        if near not in NEAR:
            raise LayoutError(f"near = {near!r}: choose whose ranks are neighbors, one of {NEAR}.")
        if ring < 1 or size % ring:
            raise LayoutError(f"A ring of {ring} does not divide the {size} ranks of the sequence.")
        return cls(size // ring, ring, HEADS if ring in (1, size) else near)

    @property
    def size(self) -> int:
        """Ranks of the sequence."""
        return self.heads * self.ring

    def rank(self, part: int, share: int) -> int:
        """Rank in the sequence of the one that computes some of ``part``'s heads."""
        if self.near == RING:
            return share * self.ring + part
        return part * self.heads + share

    def place(self, rank: int) -> tuple[int, int]:
        """(part, share) of a rank of the sequence."""
        if self.near == RING:
            share, part = divmod(rank, self.ring)
            return part, share
        return divmod(rank, self.heads)

    def sharing(self, part: int) -> list[int]:
        """Ranks in the sequence that share the heads of a part, in their order."""
        return [self.rank(part, share) for share in range(self.heads)]

    def around(self, share: int) -> list[int]:
        """Ranks in the sequence with the same heads, in the order of their parts."""
        return [self.rank(part, share) for part in range(self.ring)]

    def groups(self, name: str) -> list[list[int]]:
        """All of :meth:`sharing` (``heads``) or of :meth:`around` (``ring``)."""
        if name == HEADS:
            return [self.sharing(part) for part in range(self.ring)]
        return [self.around(share) for share in range(self.heads)]

    def require_groups(self, heads: Sequence[int], ring: Sequence[int]) -> None:
        """One rank's two groups are numbered so: nothing is sent.

        What does not show on this rank does on another, where its place in the groups is not that
        of its rank in the sequence.

        Args:
            heads, ring: global ranks of the groups, ascending.

        Raises:
            LayoutError: groups of other sizes or another order.
        """
        inner, outer = (ring, heads) if self.near == RING else (heads, ring)
        between = [rank for rank in outer if inner[0] < rank < inner[-1] and rank not in inner]
        if (len(heads), len(ring)) != (self.heads, self.ring) or between:
            raise LayoutError(
                f"The groups of ranks {list(heads)} that share heads and {list(ring)} of a ring "
                f"are not those of a sequence of {self}: attach those of one mesh "
                "(mesh.heads_group, mesh.ring_group, axes = mesh.sequence_axes)."
            )

    def require_layout(self, dealt: SequenceAxes) -> None:
        """A layout deals positions to these ranks, or to ranks without a ring, one after another.

        Raises:
            LayoutError: it is made for another order. All ranks have the same, and raise together.
        """
        if dealt.ring > 1 and dealt != self:
            raise LayoutError(
                f"The layout deals positions to {dealt}, but attention is cut over {self}: make it "
                "with ring = mesh.ring and near = mesh.near."
            )

    def __str__(self) -> str:
        near = f", the ranks of the {self.near} near" if self.ring > 1 and self.heads > 1 else ""
        return f"{self.size} ranks = heads {self.heads} x ring {self.ring}{near}"
