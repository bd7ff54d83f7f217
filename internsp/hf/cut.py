"""One forward of a ``transformers`` model whose sequences are cut: who holds what of its batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from internsp.hf.seen import Rows
from internsp.mesh import SequenceAxes
from internsp.sp.layout import in_order, taken
from internsp.sp.ranges import Ranges


@dataclass(eq=False)
class Cut:
    """One forward's batch and this rank's part of it: what attention must know of the whole.

    Attributes:
        ranges: of each rank of the sequence group, the positions that it holds, in that order.
        rank: this rank's place in it.
        axes: which of its ranks share heads, and which are a ring.
        positions: ``[1 or B, S]``, ``position_ids`` of the whole batch.
        mask: what the user gave as ``attention_mask``, or None.
        packed: ``[B, S]``, the number of each position's document; None: one document a row.
        documents: what else separates positions, see :func:`.seen.documents_of`.
        labels: ``[B, s]``, what each of this rank's positions predicts; None without labels.
        valid: labels of the whole batch that count, 1 where none does; 0-dimensional.
        loss_computed: the model's loss function has been called in this forward.
    """

    ranges: tuple[Ranges, ...]
    rank: int
    axes: SequenceAxes
    batch: int
    positions: Tensor
    mask: Tensor | None
    packed: Tensor | None
    documents: Rows | None
    labels: Tensor | None = None
    valid: Tensor | None = None
    loss_computed: bool = field(default=False, init=False)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Positions of each rank."""
        return tuple(sum(stop - start for start, stop in held) for held in self.ranges)

    @cached_property
    def sharing(self) -> tuple[int, ...]:
        """Positions of each rank that shares this one's heads."""
        part, _ = self.axes.place(self.rank)
        return tuple(self.sizes[rank] for rank in self.axes.sharing(part))

    @property
    def length(self) -> int:
        """Positions of the whole sequence."""
        return sum(self.sizes)

    def part(self, whole: Tensor, dim: int = 1) -> Tensor:
        """This rank's positions of a tensor that has all of them on ``dim``."""
        return taken(whole, self.ranges[self.rank], dim)

    def whole(self, gathered: Tensor, dim: int = 1) -> Tensor:
        """In the order of the sequence, what was gathered from all ranks, rank after rank."""
        return in_order(gathered, self.ranges, dim)
