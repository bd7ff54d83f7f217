"""Several processes on the one device, talking over gloo: real messages between real ranks.

Nothing here is about speed (gloo goes through the host's memory); the losses and the gradients must
be those of one process that sees all the data.
"""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from internsp import ParallelMesh, WeightParallelConfig, parallelize
from tools.gpu.model import (
    Trainee,
    disagreement,
    initial_weights,
    on_device,
    sizes,
    trainee,
)
from tools.gpu.options import Options

TIMEOUT = 120.0


def run(options: Options, device: torch.device) -> dict[str, Any]:
    """Train on ``options.ranks`` processes and on this one.

    Returns:
        Both losses, and the ``reason`` why they are not the same training (``None``: they are).
    """
    with tempfile.TemporaryDirectory(prefix="gpuranks-") as home:
        multiprocessing.spawn(_rank, (options, str(device), home), nprocs=options.ranks)
        parts = [torch.load(Path(home) / f"rank{r}.pt") for r in range(options.ranks)]
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
    model = sizes(options, (options.sequences or (1,))[0], options.ranks)
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
            alone.norms = [float(p.grad.double().norm()) for p in _matrices(blocks)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        alone.losses.append(sum(losses))
    return alone


def _rank(rank: int, options: Options, device: str, home: str) -> None:
    os.environ |= {"LOCAL_RANK": "0"}  # every rank computes on the same device
    torch.set_num_threads(1)
    place = torch.device(device)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{home}/store",
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=TIMEOUT),
    )
    mesh = ParallelMesh.create(
        weight=options.ranks, device_type=place.type, timeout_seconds=TIMEOUT
    )
    model = sizes(options, (options.sequences or (1,))[0], options.ranks)
    weights = initial_weights(model)
    blocks = on_device(model, weights, place)
    parallelize(blocks, mesh, WeightParallelConfig())
    made = trainee("ranks", blocks, model, place, rank=rank)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(options.steps):
        total = made.model(made.x, made.target) * made.scale
        total.backward()
        losses.append(float(total.detach()))
        if step == 0:
            norms = [float(p.grad.to_local().double().norm()) for p in _matrices(blocks)]
        made.optimizer.step()
        made.optimizer.zero_grad(set_to_none=True)
    torch.save({"losses": losses, "norms": norms}, Path(home) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _matrices(model: torch.nn.Module) -> list[Any]:
    """Parameters that are cut, so that every element is on one rank."""
    return [p for p in model.parameters() if p.ndim > 1]


def _shell(name: str) -> Trainee:
    """Losses and a norm without a model."""
    nothing: Any = None
    return Trainee(name, nothing, nothing, nothing, nothing, 1.0)
