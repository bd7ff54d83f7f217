"""A small model, and pairs of one process and ranks that train it, for ZeroOptimizer tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from internsp.base.trace import Trace
from internsp.config import WeightParallelConfig
from internsp.optim import LossScaler, ZeroOptimizer
from internsp.parallel.parallelize import parallelize
from internsp.wp.communicator import ISPCommunicator
from tests.support.meshes import mesh_of
from tests.support.models import VOCABULARY, Tiny

WIDTH, LENGTH, ROWS = 6, 5, 2  # ROWS: per rank
CLASSES: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.AdamW,  # for the other parameters
}
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-2, "weight_decay": 0.1},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01},
    "rmsprop": {"lr": 1e-3, "momentum": 0.5, "weight_decay": 0.01},
    "adafactor": {"lr": 5e-2, "weight_decay": 0.1},
    "muon": {"lr": 1e-2, "weight_decay": 0.1},  # for the other parameters
}
MUON = {"lr": 2e-2, "momentum": 0.9, "weight_decay": 0.1}


class Little(Tiny):
    """``model(ids, labels)`` -> the sum of the token losses. ``side`` is used only on request."""

    def __init__(self, blocks: int = 2, tied: bool = False) -> None:
        super().__init__(layers=blocks, width=WIDTH, tied=tied)
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor | None = None, side: bool = False) -> Tensor:
        assert labels is not None
        x = self.blocks(self.embed(ids))
        if side:
            x = x + self.side(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(wide), labels.flatten(), reduction="sum")


def little(dtype: torch.dtype = torch.float64, blocks: int = 2, tied: bool = False) -> Little:
    """The same values for the same arguments on every rank."""
    torch.manual_seed(0)
    return Little(blocks, tied).double().to(dtype)


def batch(step: int, world: int) -> tuple[Tensor, Tensor]:
    """ids and labels ``[ROWS * world, LENGTH]``."""
    generator = torch.Generator().manual_seed(step)
    shape = (ROWS * world, LENGTH)
    return (
        torch.randint(0, VOCABULARY, shape, generator=generator),
        torch.randint(0, VOCABULARY, shape, generator=generator),
    )


def share(tensor: Tensor, rank: int) -> Tensor:
    """A rank's rows of a batch."""
    return tensor[ROWS * rank : ROWS * (rank + 1)]


@dataclass
class Case:
    """How to shard, and the optimizer to train with."""

    weight: int = 1
    zero: int | None = None
    optimizer: str = "adamw"
    micro_batches: int = 1
    steps: int = 20
    dtype: torch.dtype = torch.float64
    max_grad_norm: float | None = 1.0
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    trace: bool = False
    tied: bool = False


@dataclass
class Setup:
    """A sharded model with its optimizer."""

    model: Little
    communicator: ISPCommunicator
    optimizer: ZeroOptimizer


def groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices, none on norms and biases."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def own_groups(model: nn.Module, case: Case, decay: float) -> list[dict[str, Any]]:
    """The :func:`groups`, preceded with ``muon`` by the matrices of blocks."""
    made = groups(model, decay)
    if case.optimizer != "muon":
        return made
    names = {id(p): n for n, p in model.named_parameters()}
    matrices = [p for p in made[0]["params"] if "layers" in names[id(p)]]
    ids = {id(p) for p in matrices}
    made[0]["params"] = [p for p in made[0]["params"] if id(p) not in ids]
    return [*made, {"params": matrices, "optimizer": torch.optim.Muon, **MUON}]


def setup(case: Case, scaler: LossScaler | None = None, blocks: int = 2) -> Setup:
    """Build the model. Collective. Reused slots are filled with NaN, so that a stale read shows."""
    model = little(case.dtype, blocks, case.tied)
    mesh = mesh_of(case.weight, zero=case.zero)
    config = WeightParallelConfig(min_shard_elements=20, **case.config)
    communicator = parallelize(model, mesh, config, trace=Trace(case.trace))
    communicator.state.pool.poison = True
    settings = dict(SETTINGS[case.optimizer])
    optimizer = ZeroOptimizer(
        communicator,
        CLASSES[case.optimizer],
        param_groups=own_groups(model, case, settings.pop("weight_decay")),
        max_grad_norm=case.max_grad_norm,
        loss_scaler=scaler,
        **{**settings, **case.options},
    )
    return Setup(model, communicator, optimizer)


def train(s: Setup, case: Case, rank: int, world: int, start: int = 0) -> list[tuple[float, float]]:
    """Train; (global loss, gradient norm) of each step."""
    found = []
    for step in range(start, start + case.steps):
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(case.micro_batches):
            ids, labels = batch(step * case.micro_batches + micro, world)
            loss = s.model(share(ids, rank), share(labels, rank))
            s.optimizer.scale(loss).backward()
            total += loss.detach()
        dist.all_reduce(total)
        s.optimizer.step()
        found.append((total.item(), s.optimizer.grad_norm))
        s.optimizer.zero_grad()
    return found


def alone(case: Case, world: int) -> tuple[Little, list[tuple[float, float]]]:
    """The same training on one process, with torch alone."""
    model = little(case.dtype, tied=case.tied)
    settings = dict(SETTINGS[case.optimizer])
    made = own_groups(model, case, settings.pop("weight_decay"))
    optimizer = CLASSES[case.optimizer]([g for g in made if "optimizer" not in g], **settings)
    others = [g.pop("optimizer")(g.pop("params"), **g) for g in made if "optimizer" in g]
    found = []
    for step in range(case.steps):
        total = 0.0
        for micro in range(case.micro_batches):
            loss = model(*batch(step * case.micro_batches + micro, world))
            loss.backward()
            total += loss.item()
        bound = float("inf") if case.max_grad_norm is None else case.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
        for other in others:
            other.step()
            other.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm.item()))
    return model, found


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, unsharded and cloned. Collective."""
    return {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}  # type: ignore[operator]


def furthest(one: Any, other: Any) -> float:
    """The largest relative difference between two lists of (loss, norm)."""
    pairs = [(a, b) for p, q in zip(one, other, strict=True) for a, b in zip(p, q, strict=True)]
    return max(abs(a - b) / abs(a) for a, b in pairs)
