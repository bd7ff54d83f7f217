"""torch's Muon, split: momentum stays in slices, and only the update goes to a matrix's owner.

Momentum, decay and the addition of the update treat every element by itself; what needs the whole
matrix is the Newton-Schulz iteration, which torch computes in bf16. So slices of the update travel
in bf16 and come back in bf16: a third of the bytes of values and gradient in fp32, with the bits of
``torch.optim.Muon``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from internsp.optim.elementwise import OptimizerClass

try:
    from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
except ImportError:  # another torch: its own class steps whole matrices
    _adjust_lr = _zeropower_via_newtonschulz = None  # type: ignore[assignment]

SENT = torch.bfloat16
"""What the update is computed in."""


class MuonSlices(torch.optim.Optimizer):
    """The elementwise part of ``torch.optim.Muon``, with its settings and its state."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, settings)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the state of what has a gradient; the step itself is :func:`update` and the rest."""
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    update(self.momentum(tensor), tensor.grad, group)

    def momentum(self, tensor: Tensor) -> Tensor:
        """The momentum of a slice."""
        state = self.state[tensor]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(tensor)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def update(momentum: Tensor, gradient: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """What is to be orthogonalized, of any slice; ``momentum`` is new then."""
    weight = settings["momentum"]
    momentum.lerp_(gradient, 1 - weight)
    return (gradient.lerp(momentum, weight) if settings["nesterov"] else momentum).to(SENT)


def orthogonalized(whole: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """The update of a whole matrix, in bf16."""
    made: Tensor = _zeropower_via_newtonschulz(
        whole, settings["ns_coefficients"], settings["ns_steps"], settings["eps"]
    )
    return made


def apply(
    values: Tensor, change: Tensor, shape: tuple[int, ...], settings: Mapping[str, Any]
) -> None:
    """Decay a slice of a matrix of ``shape``, and take its part of :func:`orthogonalized`."""
    lr = settings["lr"].item() if isinstance(settings["lr"], Tensor) else settings["lr"]
    adjusted = _adjust_lr(lr, settings["adjust_lr_fn"], torch.Size(shape))
    values.mul_(1 - lr * settings["weight_decay"])
    values.add_(change, alpha=-adjusted)


def splits(cls: OptimizerClass, device: torch.device, arguments: dict[str, Any]) -> bool:
    """Whether the parts together are ``cls``: by experiment, since torch may change its own."""
    if cls is not torch.optim.Muon or _zeropower_via_newtonschulz is None:
        return False
    for shape in ((6, 4), (4, 6)):
        whole = torch.linspace(-3.0, 2.0, 24, device=device).view(shape)
        values = whole.clone()
        theirs = cls([whole], **arguments)
        settings = theirs.param_groups[0]
        ours = MuonSlices([values])
        for step in range(2):
            whole.grad = torch.linspace(0.1, 4.0, 24, device=device).roll(5 + step).view(shape)
            theirs.step()
            try:
                change = update(ours.momentum(values), whole.grad, settings)
                apply(values, orthogonalized(change, settings), shape, settings)
            except (TypeError, KeyError):
                return False
        if not torch.equal(whole, values):
            return False
    return True
