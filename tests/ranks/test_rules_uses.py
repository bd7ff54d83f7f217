"""WP-5 in patterns of users' models: odd sizes, pass-through outputs, inference mode, hooks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from internsp.config import ActivationCheckpointConfig
from internsp.errors import StructureError
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.models import ALL, ROLLING, Block, Tiny, Twin, raises
from tests.support.ranks import ranks

HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
REENTRANT = ActivationCheckpointConfig(mode="full", reentrant=True)


def steps(twin: Twin, what: str, count: int = 2) -> None:
    for _ in range(count):
        twin.backward()
        twin.check_gradients(what)
        twin.zero_grad()


class HalfFrozen(Tiny):
    """Runs its first blocks without a graph."""

    def blocks(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.layers[:2]:
                x = layer(x)
        for layer in self.layers[2:]:
            x = layer(x)
        return x


@pytest.mark.thorough(2)
@ranks(2)
def test_few_blocks_no_cut_weights_and_blocks_without_a_graph() -> None:
    mesh = mesh_of(2)
    steps(Twin(partial(Tiny, layers=1), mesh), "one block")
    steps(Twin(partial(Tiny, layers=1), mesh, granularity="module"), "one block, by module")
    steps(Twin(partial(Tiny, layers=2), mesh, prefetch_depth=3), "more depth than blocks")
    nothing = Twin(Tiny, mesh, min_shard_elements=10**6)
    steps(nothing, "nothing is cut")
    assert not nothing.lines("AG", "RS")
    steps(Twin(partial(Tiny, layers=1), mesh, gather_before="rolling"), "one block, rolling")
    for config in ({}, ROLLING):
        steps(Twin(HalfFrozen, mesh, **config), "half without a graph")  # type: ignore[arg-type]


class Biased(nn.Module):
    """Direct sharded parameters; passes its second argument on, as attention biases are."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(width, width) / 3)

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x @ self.mix) * bias, bias


class Passing(nn.Module):
    """A block with keyword arguments that returns its result and one of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.biased = Biased()
        self.wo = nn.Linear(6, 6)

    def forward(self, x: Tensor, *, bias: Tensor, scale: float = 1.0) -> dict[str, Any]:
        y, bias = self.biased(self.block(x), bias)
        return {"x": self.wo(y) * scale, "passed": (bias, [x])}


class PassingModel(Tiny):
    def blocks(self, x: Tensor) -> Tensor:
        bias = torch.sigmoid(x)
        for layer in self.layers:
            out = layer(x, bias=bias, scale=0.5)
            x, (bias, _) = out["x"], out["passed"]
        return x + bias


class Positional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wo = Block()

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.wo(x)]


class Unlisting(Tiny):
    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            (x,) = layer(x)
        return x


@ranks(2)
def test_outputs_that_pass_inputs_on_and_keyword_arguments_are_right() -> None:
    mesh = mesh_of(2)
    make = partial(PassingModel, Passing)
    steps(Twin(make, mesh), "passing")
    steps(Twin(make, mesh, **ALL), "passing, at entry")  # type: ignore[arg-type]
    steps(Twin(make, mesh, **ROLLING), "passing, rolling", 3)  # type: ignore[arg-type]
    steps(Twin(make, mesh, HALF), "passing, recomputed")
    steps(Twin(make, mesh, REENTRANT, granularity="module"), "passing, reentrant asked for")
    full = ActivationCheckpointConfig(mode="full")
    steps(Twin(make, mesh, full, gather_before="qkv"), "passing, qkv")
    listing = Twin(partial(Unlisting, Positional), mesh, REENTRANT, gather_before="qkv")
    raises(StructureError, listing.backward, "list", "reentrant = false")

    def frozen() -> nn.Module:
        model = Tiny()
        model.embed.requires_grad_(False)
        return model

    steps(Twin(frozen, mesh, REENTRANT), "reentrant, whose first input needs no gradient")


@pytest.mark.thorough(2)
@ranks(2)
def test_inference_mode_first_and_hooks_of_the_user() -> None:
    mesh = mesh_of(2)
    unpooled = {"memory_pool": False}
    for where, config in (
        (mesh, {}), (mesh, ALL), (mesh, unpooled), (mesh, ROLLING | unpooled), (mesh_of(1), ROLLING)
    ):  # fmt: skip
        twin = Twin(Tiny, where, **config)  # type: ignore[arg-type]
        everybody, _ = twin.batch()
        with torch.inference_mode():  # before the first step: it creates views and buffers
            close(twin.ours(*everybody), twin.plain(*everybody), "inference mode")
        steps(twin, f"after inference mode, {config}")
    watched = Twin(Tiny, mesh, HALF)
    seen: list[str] = []
    for name, module in watched.ours.named_modules():
        module.register_full_backward_hook(lambda *_, name=name: seen.append(name))
    steps(watched, "watched by the user's own hooks", 1)
    assert {"layers.0", "layers.3.w1", "head"} <= set(seen)
    with torch.autograd.set_detect_anomaly(True):
        steps(Twin(Tiny, mesh), "anomaly detection")
