"""The embedding's communicator: prefetched at the model's entry, reduced asynchronously."""

from __future__ import annotations

from internsp.wp.communicator import ChunkState, OuterCommunicator
from internsp.wp.pool import Unit


class EmbeddingWeightParallelCommunicator(OuterCommunicator):
    """Gathers the table, cut on vocabulary or hidden dimension, for forward only.

    The backward of a lookup needs the indices, not the table, so nothing is gathered for it. The
    gradient is reduced every micro-batch, where it is born: at the end of backward. Between
    micro-batches the table stays in its slot and is not gathered again, because its tag has not
    changed (WP-11).

    Args:
        tied: whether the head uses the same weight. Then it has two reductions: of the head's
            gradient where backward comes to the blocks, and of the lookup's at its end.
    """

    def __init__(self, state: ChunkState, unit: Unit, tied: bool = False) -> None:
        super().__init__(state, unit)
        self.tied = tied
