"""The head's communicator: its weight has a slot of its own, prefetched at the last block."""

from __future__ import annotations

from internsp.wp.communicator import ChunkState, UnitCommunicator
from internsp.wp.pool import Unit
from internsp.wp.schedule import FORWARD

OUTPUTS = ("local", "gather", "vocabulary")


class HeadWeightParallelCommunicator(UnitCommunicator):
    """Gathers the output projection over the weight group.

    Args:
        unit: the head's weight (the embedding's unit where the two are tied).
        output: what becomes of the logits ``[B, S/sp, V]`` of a sequence shard: ``"local"`` keeps
            them, ``"gather"`` gathers the sequence (``[B, S, V]``), ``"vocabulary"`` exchanges
            them into vocabulary shards ``[B, S, V/sp]`` for a vocabulary-parallel loss. The
            exchange itself belongs to :mod:`internsp.sp`; the trainer hands it this choice.
    """

    def __init__(self, state: ChunkState, unit: Unit, output: str = "local") -> None:
        super().__init__(state)
        if output not in OUTPUTS:
            raise ValueError(f"head output {output!r}: choose one of {', '.join(OUTPUTS)}")
        self.unit = unit
        self.output = output

    def prefetch(self) -> None:
        """Launch the gather, if the slot does not hold the right values already (WP-11)."""
        self.fetch(self.unit, self.unit.weights, FORWARD)
