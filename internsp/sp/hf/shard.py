"""How the batch of one forward of a ``transformers`` model is sharded over the sequence group."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from internsp.mesh import SequenceAxes
from internsp.sp.dispatch import ring_ranges
from internsp.sp.hf.mask_spec import Rows
from internsp.sp.layout import select_ranges
from internsp.sp.ranges import Ranges, count_positions


@dataclass(eq=False)
class SequenceShard:
    """The batch of one forward, and how its positions are sharded over the sequence group.

    Attributes:
        ranges: for each rank of the sequence group, the ranges that it holds, in that order.
        rank: this rank's number in the sequence group.
        axes: which ranks of the sequence group share heads, and which are a ring.
        batch_size: rows of the batch, ``B``.
        positions: ``[1 or B, S]``, ``position_ids`` of the whole batch.
        mask: what the user gave as ``attention_mask``, or None.
        packed: ``[B, S]``, the number of each position's document; None: one document a row.
        documents: documents and padding for a ring, see :func:`.mask_spec.documents_of`.
        labels: ``[B, s]``, the token that each of this rank's positions predicts, or None.
        valid: number of labels of the whole batch that count, at least 1; 0-dimensional.
        loss_computed: whether the model's loss function has been called in this forward.
    """

    ranges: tuple[Ranges, ...]
    rank: int
    axes: SequenceAxes
    batch_size: int
    positions: Tensor
    mask: Tensor | None
    packed: Tensor | None
    documents: Rows | None
    labels: Tensor | None = None
    valid: Tensor | None = None
    loss_computed: bool = field(default=False, init=False)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of positions of each rank."""
        return tuple(map(count_positions, self.ranges))

    @cached_property
    def sharing(self) -> tuple[int, ...]:
        """Number of positions of each rank of this rank's heads group."""
        part, _ = self.axes.place(self.rank)
        return tuple(self.sizes[rank] for rank in self.axes.sharing(part))

    @property
    def length(self) -> int:
        """Number of positions of the whole sequence, ``S``."""
        return sum(self.sizes)

    @cached_property
    def ring_ranges(self) -> tuple[Ranges, ...]:
        """The ranges with which each rank of a ring computes."""
        return ring_ranges(self.ranges, self.axes)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's positions ``[B, s, ...]`` of a tensor ``[B, S, ...]``."""
        return select_ranges(whole, self.ranges[self.rank])
