"""The embedding's communicator: prefetched at the model's entry, reduced asynchronously."""

from __future__ import annotations

from internsp.wp.communicator import ChunkState, UnitCommunicator
from internsp.wp.pool import Unit
from internsp.wp.schedule import FORWARD


class EmbeddingWeightParallelCommunicator(UnitCommunicator):
    """Gathers the table, cut on vocabulary or hidden dimension, for forward only.

    The backward of a lookup needs the indices, not the table, so nothing is gathered for it. The
    gradient is reduced every micro-batch; between micro-batches the table stays in its slot and
    is not gathered again, because its tag has not changed (WP-11).
    """

    def __init__(self, state: ChunkState, unit: Unit) -> None:
        super().__init__(state)
        self.unit = unit

    def prefetch(self) -> None:
        """Launch the gather, if the slot does not hold the right values already (WP-11)."""
        self.fetch(self.unit, self.unit.weights, FORWARD)
