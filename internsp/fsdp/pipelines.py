"""What torch's pipeline schedules that split backward do with stages of ``fully_shard``."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining._backward import stage_backward, stage_backward_input

from internsp.dtensor.parameter import ShardParameter


def input_backward(outputs: Any, gradients: Any, inputs: Any, weights: Any) -> Any:
    """torch's input backward; a whole one where weights are ours, so that none is left for later.

    Gradients of ours are handed over within a backward; ``torch.autograd.grad`` gives them away.
    """
    given = list(weights)
    if not any(isinstance(weight, ShardParameter) for weight in given):
        return stage_backward_input(outputs, gradients, inputs, iter(given))
    return stage_backward(outputs[0] if gradients is None else outputs, gradients, inputs), []
