"""The head's communicator: its weight has a slot of its own, prefetched at the last block."""

from __future__ import annotations

from torch import Tensor

from internsp.wp.communicator import ChunkState, OuterCommunicator
from internsp.wp.pool import Unit
from internsp.wp.shard import ShardedWeight

OUTPUTS = ("local", "gather", "vocabulary")


class HeadWeightParallelCommunicator(OuterCommunicator):
    """Gathers the output projection over the weight group.

    Its gradient is reduced where backward comes to the blocks: once, however often a rank used it.

    Args:
        unit: the head's weight (the embedding's unit where the two are tied).
        output: what becomes of the logits ``[B, S/sp, V]`` of a sequence shard: ``"local"`` keeps
            them, ``"gather"`` gathers the sequence (``[B, S, V]``), ``"vocabulary"`` exchanges
            them into vocabulary shards ``[B, S, V/sp]`` for a vocabulary-parallel loss. The
            exchange itself belongs to :mod:`internsp.sp`; the trainer hands it this choice.
    """

    def __init__(self, state: ChunkState, unit: Unit, output: str = "local") -> None:
        super().__init__(state, unit)
        if output not in OUTPUTS:
            raise ValueError(f"head output {output!r}: choose one of {', '.join(OUTPUTS)}")
        self.output = output

    def gradient_hook(self, unit: Unit, weight: ShardedWeight, gradient: Tensor) -> None:
        """Keep it until backward comes to the blocks; one of a head inside them is sent at once."""
        super().gradient_hook(unit, weight, gradient)
        if self.state.in_blocks:
            self.reduce(unit, weight, self._born.pop(weight))
