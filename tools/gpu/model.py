"""What trains: the benchmark's Llama blocks on one device, plain or parallel, from one start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tools.bench import options as bench
from tools.bench.model import Blocks, batch, elements, fresh, initial_weights
from tools.gpu.device import timed
from tools.gpu.options import Options

Weights = Mapping[str, Tensor]
LOSS, NORM, FALL = 2e-3, 1e-2, 5e-2
"""Relative differences that bf16 explains: of a loss, of the first gradient's norm, and of what the
loss has lost since, where that is more than :data:`SEEN` of it."""
SEEN = 0.02


def sizes(options: Options, sequence: int, ranks: int = 1) -> bench.Options:
    """The sizes as the benchmark's model takes them."""
    return bench.Options(
        hidden=options.hidden, heads=options.heads, intermediate=options.intermediate,
        layers=options.layers, sequence=sequence, batch=options.batch, ranks=ranks,
        seed=options.seed, lr=options.lr,
    )  # fmt: skip


@dataclass
class Trainee:
    """A model, its data and its optimizer; :meth:`step` is one whole training step.

    Attributes:
        finish: after backward, what the variant must do to its gradients.
        renew: after the update, what it must do to its weights.
        losses: of every step so far.
        norms: of the first step's gradients, of every parameter that is trained.
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
        """Time of one step from an idle device to an idle device; keeps the loss."""
        took = timed(device, self.step)
        assert self._pending is not None, "a step has just left it"
        self.losses.append(float(self._pending) * self.scale)
        return took


def gradient_norms(optimizer: torch.optim.Optimizer) -> list[float]:
    """Of what this process holds of every gradient, in the parameters' order."""
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
    options: bench.Options,
    device: torch.device,
    optimizer: torch.optim.Optimizer | None = None,
    rank: int = 0,
) -> Trainee:
    """Data of ``rank``, plain SGD unless told otherwise; the loss is a mean over all ranks'."""
    x, target = batch(options, rank)
    return Trainee(
        name,
        model,
        optimizer or torch.optim.SGD(model.parameters(), lr=options.lr),
        x.detach().to(device).requires_grad_(True),
        target.to(device),
        1.0 / elements(options),
    )


def on_device(options: bench.Options, weights: Weights, device: torch.device) -> Blocks:
    """A model with a copy of the initial weights."""
    return fresh(options, dict(weights), device=str(device))


def repeated(weights: Weights, ranks: int) -> dict[str, Tensor]:
    """Every matrix made of ``ranks`` copies of its first rows: all shards are alike."""
    return {
        name: w if w.ndim < 2 else w[: len(w) // ranks].repeat(ranks, 1)
        for name, w in weights.items()
    }


def tied(
    name: str, blocks: Blocks, options: bench.Options, device: torch.device, ranks: int
) -> Trainee:
    """Train one shard of every matrix of a model of :func:`repeated` weights, with plain autograd.

    The gradient of a shard that is used ``ranks`` times is the sum over its copies.
    """
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
    for parameter in blocks.parameters():
        rows = len(parameter) // ranks if parameter.ndim > 1 else len(parameter)
        pairs.append((parameter, nn.Parameter(parameter.detach()[:rows].clone())))
    optimizer = torch.optim.SGD([shard for _, shard in pairs], lr=options.lr)
    made = trainee(name, blocks, options, device, optimizer)

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
    """Why two trainings are not the same one, or ``None``."""
    if len(found.losses) > len(wanted.losses):
        return f"{len(found.losses)} losses where {wanted.name} has {len(wanted.losses)}"
    for step, (loss, expected) in enumerate(zip(found.losses, wanted.losses, strict=False)):
        if not abs(loss - expected) <= LOSS * abs(expected):
            return f"the loss of step {step} is {loss:.6g}, {wanted.name}'s is {expected:.6g}"
    last = len(found.losses) - 1
    fell, should = (t.losses[0] - t.losses[last] for t in (found, wanted))
    if abs(should) > SEEN * abs(wanted.losses[0]) and not abs(fell - should) <= FALL * abs(should):
        return f"the loss fell by {fell:.4g} in {last} steps, {wanted.name}'s by {should:.4g}"
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


def step_flops(options: bench.Options, weights: Weights) -> float:
    """Of one training step: products with the weights, and causal attention; backward is twice
    forward, and nothing is counted for what is recomputed."""
    tokens = options.batch * options.size("sequence")
    products = 6.0 * sum(w.numel() for w in weights.values() if w.ndim > 1) * tokens
    causal = 6.0 * options.size("layers") * options.size("hidden") * options.size("sequence")
    return products + causal * tokens


@contextmanager
def process_group(backend: str, ranks: int = 1) -> Iterator[None]:
    """A process group of this process alone; ``"fake"`` pretends to have ``ranks`` and sends
    nothing (collectives of replicated parameters and settings are then this rank's own values)."""
    store: Any = dist.HashStore()
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store = FakeStore()
    dist.init_process_group(
        backend, store=store, rank=0, world_size=ranks, timeout=timedelta(seconds=300)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


__all__ = [
    "Trainee", "Weights", "disagreement", "gradient_norms", "initial_weights", "on_device",
    "process_group", "repeated", "sizes", "step_flops", "tied", "trainee",
]  # fmt: skip
