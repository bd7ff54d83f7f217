"""torch's Muon in two parts: momentum stays in slices, only the update is sent to a matrix's owner.

Momentum, weight decay and the addition of the update are elementwise; what needs the whole matrix
is the Newton-Schulz iteration, which torch computes in bf16. So slices of the update are sent in
bf16 and come back in bf16: a third of the bytes of values and gradient in fp32, with bitwise the
results of ``torch.optim.Muon``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

UPDATE_DTYPE = torch.bfloat16
"""The dtype in which the update is computed and sent."""


class MuonSlices(torch.optim.Optimizer):
    """The elementwise part of ``torch.optim.Muon``, with its settings and its state."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, settings)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the state of every tensor with a gradient. The step itself is
        :func:`momentum_update`, :func:`orthogonalize` and :func:`apply_update`."""
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    momentum_update(self.momentum(tensor), tensor.grad, group)

    def momentum(self, tensor: Tensor) -> Tensor:
        """The momentum of a slice."""
        state = self.state[tensor]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(tensor)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def momentum_update(momentum: Tensor, gradient: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Update ``momentum``, any slice of it, in place; returns the update to orthogonalize."""
    weight = settings["momentum"]
    momentum.lerp_(gradient, 1 - weight)
    return (gradient.lerp(momentum, weight) if settings["nesterov"] else momentum).to(UPDATE_DTYPE)


def orthogonalize(whole: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """The update of a whole matrix, in bf16."""
    made: Tensor = _zeropower_via_newtonschulz(
        whole, settings["ns_coefficients"], settings["ns_steps"], settings["eps"]
    )
    return made


def apply_update(
    values: Tensor, change: Tensor, shape: tuple[int, ...], settings: Mapping[str, Any]
) -> None:
    """Decay ``values``, a slice of a matrix of ``shape``, and subtract its part ``change`` of the
    update from :func:`orthogonalize`, in place."""
    lr = settings["lr"].item() if isinstance(settings["lr"], Tensor) else settings["lr"]
    adjusted = _adjust_lr(lr, settings["adjust_lr_fn"], torch.Size(shape))
    values.mul_(1 - lr * settings["weight_decay"])
    values.add_(change, alpha=-adjusted)
