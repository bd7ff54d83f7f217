"""The end of backward in a plain loop whose gradients are means, as those of FSDP2 are."""

from __future__ import annotations

import torch

from internsp.dtensor.placed import dtensor_like, grad_dtype
from internsp.mesh import ParallelMesh
from internsp.wp.parameter import ShardedParameter
from internsp.wp.perform import Chunk
from internsp.wp.plain_loop import PlainLoop
from internsp.wp.replicated import ReplicatedParameters


class MeanLoop(PlainLoop):
    """The plain loop, with means, and with what a program says of single units.

    Args:
        before: the loop whose place it takes.

    Attributes:
        zeros: weights whose ``.grad`` is zeros where no rank has used them.
    """

    def __init__(
        self, before: PlainLoop, state: Chunk, mesh: ParallelMesh, replicated: ReplicatedParameters
    ) -> None:
        super().__init__(state, mesh, replicated, mean=True)
        self.placeholders = before.placeholders  # which the communicator knows
        self.zeros: set[ShardedParameter] = set()

    def backward_ended(self, more: bool) -> None:
        """See :class:`internsp.wp.consumer.GradientConsumer`."""
        super().backward_ended(more)
        for weight in self.zeros if not more else ():
            if weight.requires_grad and weight.parameter.grad is None:
                local = weight.local(weight.storage)
                zeros = torch.zeros_like(local, dtype=grad_dtype(weight.parameter))
                weight.parameter.grad = dtensor_like(weight.parameter, zeros)
