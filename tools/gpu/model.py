"""Training of the benchmark's Llama blocks on one device, plain or parallel, from equal weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tools.bench.model import batch, elements, fresh
from tools.bench.options import Sizes
from tools.bench.rounds import Agreement
from tools.gpu.device import timed

Weights = Mapping[str, Tensor]
TIED = "the plain model of repeated shards"
LOSSES, NORM = Agreement(each=2e-3, seen=0.02), 1e-2
"""Tolerance for bf16 rounding: of losses, and of the first gradient's norms (relative)."""


@dataclass
class Trainee:
    """A model, its data and its optimizer; :meth:`step` is one training step.

    Attributes:
        finish: called after backward, to complete the gradients.
        renew: called after the update, to complete the weights.
        losses: of every step so far.
        norms: of the first step's gradients, of every trained parameter.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    x: Tensor
    target: Tensor
    scale: float
    finish: Callable[[], None] = lambda: None
    renew: Callable[[], None] = lambda: None
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    _pending: Tensor | None = None

    def step(self) -> None:
        """Forward, backward, update. On a GPU it only queues the work."""
        total = self.model(self.x, self.target)
        (total * self.scale).backward()
        self.finish()
        if not self.norms:
            self.norms = gradient_norms(self.optimizer)
        self.optimizer.step()
        self.renew()
        self.optimizer.zero_grad(set_to_none=True)
        self.x.grad = None
        self._pending = total.detach()

    def seconds(self, device: torch.device) -> float:
        """Seconds of one step from an idle device to an idle device; records the loss."""
        took = timed(device, self.step)
        assert self._pending is not None, "a step has just left it"
        self.losses.append(float(self._pending) * self.scale)
        return took


def gradient_norms(optimizer: torch.optim.Optimizer) -> list[float]:
    """Norm of this process's part of every gradient, in the parameters' order."""
    norms = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            assert gradient is not None, "backward has just filled it"
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            norms.append(float(local.double().norm()))
    return norms


def trainee(
    name: str,
    model: nn.Module,
    sizes: Sizes,
    device: torch.device,
    optimizer: torch.optim.Optimizer | None = None,
) -> Trainee:
    """Uses plain SGD by default; the loss is a mean."""
    x, target = batch(sizes, 0)
    return Trainee(
        name,
        model,
        optimizer or torch.optim.SGD(model.parameters(), lr=sizes.lr),
        x.detach().to(device).requires_grad_(True),
        target.to(device),
        1.0 / elements(sizes),
    )


def tied(sizes: Sizes, weights: Weights, device: torch.device, ranks: int) -> Trainee:
    """Train one shard of every matrix with plain autograd; the weights are the shards ``repeated``.

    The gradient of a shard that is used ``ranks`` times is the sum over its copies.
    """
    blocks = fresh(sizes, weights, device)
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
    for parameter in blocks.parameters():
        rows = len(parameter) // ranks if parameter.ndim > 1 else len(parameter)
        pairs.append((parameter, nn.Parameter(parameter.detach()[:rows].clone())))
    optimizer = torch.optim.SGD([shard for _, shard in pairs], lr=sizes.lr)
    made = trainee(TIED, blocks, sizes, device, optimizer)

    def gather_up() -> None:
        for parameter, shard in pairs:
            assert parameter.grad is not None, "backward has just filled it"
            copies = parameter.grad.view(-1, *shard.shape)
            wide = torch.promote_types(shard.dtype, torch.float32)
            shard.grad, parameter.grad = copies.sum(0, dtype=wide).to(shard.dtype), None

    @torch.no_grad()
    def renew() -> None:
        for parameter, shard in pairs:
            copies = parameter.view(-1, *shard.shape)
            copies.copy_(shard.expand_as(copies))

    made.finish, made.renew = gather_up, renew
    return made


def disagreement(found: Trainee, wanted: Trainee) -> str | None:
    """Why two trainings are not the same, or ``None``."""
    reason = LOSSES.refuses(found.losses, wanted.losses)
    if reason is not None:
        return reason
    if len(found.norms) != len(wanted.norms):
        return f"{len(found.norms)} gradients where {wanted.name} has {len(wanted.norms)}"
    floor = 1e-3 * max(wanted.norms, default=0.0)
    for index, (norm, expected) in enumerate(zip(found.norms, wanted.norms, strict=True)):
        if not abs(norm - expected) <= NORM * max(expected, floor):
            return (
                f"the norm of the first gradient of parameter {index} is {norm:.6g}, "
                f"{wanted.name}'s is {expected:.6g}"
            )
    return None


def step_flops(sizes: Sizes, weights: Weights) -> float:
    """FLOPs of one training step: products with the weights, and causal attention; backward counts
    as twice forward, and recomputation does not count."""
    tokens = sizes.batch * sizes.sequence
    products = 6.0 * sum(w.numel() for w in weights.values() if w.ndim > 1) * tokens
    causal = 6.0 * sizes.layers * sizes.hidden * sizes.sequence
    return products + causal * tokens
