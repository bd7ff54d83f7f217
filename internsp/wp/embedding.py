"""The embedding's communicator: prefetched at the model's entry, reduced asynchronously."""

from __future__ import annotations

from torch import Tensor

from internsp.wp.communicator import ChunkState, OuterCommunicator, UnitCommunicator
from internsp.wp.pool import Unit
from internsp.wp.shard import ShardedWeight


class EmbeddingWeightParallelCommunicator(OuterCommunicator):
    """Gathers the table, cut on vocabulary or hidden dimension, for forward only.

    The backward of a lookup needs the indices, not the table, so nothing is gathered for it. The
    gradient is reduced every micro-batch, where it is born: at the end of backward. Between
    micro-batches the table stays in its slot and is not gathered again, because its tag has not
    changed (WP-11).

    Args:
        tied: whether the head uses the same weight. Then it has two births, at the two ends of
            backward, and two reductions.
    """

    def __init__(self, state: ChunkState, unit: Unit, tied: bool = False) -> None:
        super().__init__(state, unit)
        self.tied = tied

    def gradient_hook(self, unit: Unit, weight: ShardedWeight, gradient: Tensor) -> None:
        """Of a tied weight: reduced at each birth."""
        if self.tied:
            UnitCommunicator.gradient_hook(self, unit, weight, gradient)
        else:
            super().gradient_hook(unit, weight, gradient)

    def flush(self) -> None:
        """Launch the reduction, unless the births have."""
        if not self.tied:
            super().flush()
