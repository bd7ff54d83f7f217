"""On a GPU: weights, gradients, optimizer state in host memory; by value against a plain loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from internsp import ParallelMesh, WeightParallelConfig, ZeroOptimizer, parallelize
from tests.support.models import VOCABULARY, Tiny
from tools.bench.model import process_group

CUDA = torch.device("cuda", 0)
EVERYTHING = ("weights", "optimizer", "gradients")
PLAIN: tuple[dict[str, Any], ...] = (
    {"offload": ("weights",)},
    {"offload": ("weights", "gradients"), "memory_pool": False},
    {"offload": ("weights",), "coalesce_bytes": 0, "prefetch_depth": 2},
    {"offload": ("gradients",), "accumulation": "full"},
)
ZERO: tuple[dict[str, Any], ...] = (
    {"offload": EVERYTHING},
    {"offload": ("optimizer",)},
    {"offload": ("weights",), "coalesce_bytes": 0},
)


def whole(parameter: Tensor) -> Tensor:
    found: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return found.detach().to(CUDA)


def compare(settings: dict[str, Any], zero: bool) -> None:
    torch.manual_seed(0)
    plain = Tiny().double().to(CUDA)
    ours = copy.deepcopy(plain)
    with process_group("nccl" if CUDA.type == "cuda" else "gloo"):
        mesh = ParallelMesh.create(weight=1, device_type=CUDA.type)
        config = WeightParallelConfig(**{"min_shard_elements": 1, **settings})
        communicator = parallelize(ours, mesh, config)
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        mine: torch.optim.Optimizer = (
            ZeroOptimizer(communicator, torch.optim.AdamW, lr=1e-2)
            if zero
            else torch.optim.AdamW(ours.parameters(), lr=1e-2)
        )
        for step in range(4):
            for _ in range(2):
                ids = torch.randint(VOCABULARY, (2, 5), device=CUDA)
                losses = [model(ids, labels=ids) for model in (plain, ours)]
                torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
                for loss in losses:
                    loss.backward()
            if not zero:
                same(plain, ours, "grad")
            for optimizer in (theirs, mine):
                optimizer.step()
                optimizer.zero_grad()
            same(plain, ours, f"after step {step}")
        state = ours.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(whole(state[name]), value, rtol=1e-9, atol=1e-12, msg=name)


def same(plain: nn.Module, ours: nn.Module, what: str) -> None:
    for (name, wanted), found in zip(plain.named_parameters(), ours.parameters(), strict=True):
        a: Any = found.grad if what == "grad" else found
        b: Any = wanted.grad if what == "grad" else wanted
        torch.testing.assert_close(
            whole(a), b.detach(), rtol=1e-9, atol=1e-12, msg=f"{what}: {name}"
        )


@pytest.mark.parametrize("settings", PLAIN, ids=str)
def test_a_plain_loop_trains_as_without_offload(settings: dict[str, Any]) -> None:
    compare(settings, zero=False)


@pytest.mark.parametrize("settings", ZERO, ids=str)
def test_a_zero_optimizer_trains_as_without_offload(settings: dict[str, Any]) -> None:
    compare(settings, zero=True)
