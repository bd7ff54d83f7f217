"""Several processes on one device with a gloo group: real messages between real ranks.

This does not measure speed (gloo copies through host memory); the losses and the gradients must be
those of one process with all the data.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from internsp import ParallelMesh, WeightParallelConfig, parallelize
from tools.bench.model import initial_weights
from tools.bench.options import Sizes
from tools.bench.ranks import Session, Setup
from tools.gpu.model import Trainee, disagreement, gradient_norms, on_device, trainee
from tools.gpu.options import Options

TIMEOUT = 300.0


def run(options: Options, device: torch.device) -> dict[str, Any]:
    """Train on ``options.ranks`` processes and on this one.

    Returns:
        Both losses, and the ``reason`` why the trainings differ (``None``: they do not).
    """
    setup = Setup("tools.gpu.ranks:Rank", (options, str(device)), options.ranks, TIMEOUT)
    with Session(setup) as session:
        parts = session.ask("train")
    together = _shell("ranks")
    together.losses = [sum(step) for step in zip(*(p["losses"] for p in parts), strict=True)]
    squares = torch.tensor([p["norms"] for p in parts]).square()
    together.norms = squares.sum(0).sqrt().tolist()
    alone = reference(options, device)
    return {
        "ranks": options.ranks,
        "losses": together.losses,
        "reference": alone.losses,
        "reason": disagreement(together, alone),
    }


def reference(options: Options, device: torch.device) -> Trainee:
    """One plain process with every rank's data."""
    model = _sizes(options)
    weights = initial_weights(model)
    blocks = on_device(model, weights, device)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=model.lr)
    parts = [trainee(str(r), blocks, model, device, optimizer, r) for r in range(options.ranks)]
    alone = _shell("one process")
    for step in range(options.steps):
        losses = []
        for part in parts:
            total = part.model(part.x, part.target) * part.scale
            total.backward()
            losses.append(float(total.detach()))
        if step == 0:
            each = zip(blocks.parameters(), gradient_norms(optimizer), strict=True)
            alone.norms = [norm for p, norm in each if p.ndim > 1]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        alone.losses.append(sum(losses))
    return alone


class Rank:
    """One of the processes; all compute on the same device."""

    def __init__(self, options: Options, device: str) -> None:
        self.options, self.device = options, torch.device(device)
        os.environ["LOCAL_RANK"] = "0"

    def train(self) -> dict[str, list[float]]:
        """Losses of this rank's data, and norms of its shards' first gradients."""
        options = self.options
        mesh = ParallelMesh.create(
            weight=options.ranks, device_type=self.device.type, timeout_seconds=TIMEOUT
        )
        model = _sizes(options)
        blocks = on_device(model, initial_weights(model), self.device)
        parallelize(blocks, mesh, WeightParallelConfig())
        made = trainee("ranks", blocks, model, self.device, rank=mesh.rank)
        for _ in range(options.steps):
            made.seconds(self.device)
        each = zip(blocks.parameters(), made.norms, strict=True)  # norm layers are replicated
        return {"losses": made.losses, "norms": [norm for p, norm in each if p.ndim > 1]}


def _sizes(options: Options) -> Sizes:
    return options.sizes(sequence=(options.sequences or (1,))[0])


def _shell(name: str) -> Trainee:
    """Placeholder with losses and a norm, without a model."""
    nothing: Any = None
    return Trainee(name, nothing, nothing, nothing, nothing, 1.0)
