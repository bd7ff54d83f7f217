"""Weights read, returned, written or replaced in any way: the result is right, or refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from internsp.config import ActivationCheckpointConfig
from tests.support import reads
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.models import ALL, ROLLING, Tiny, Twin
from tests.support.ranks import ranks

FULL = ActivationCheckpointConfig(mode="full")
REENTRANT = ActivationCheckpointConfig(mode="full", reentrant=True)
SMALL = {"min_shard_elements": 10**6}
MODULE = {"granularity": "module"}

MODELS: dict[str, Any] = {
    "a module that returns its weight": partial(Tiny, reads.Positions),
    "a block that returns its weight": reads.Handed,
    "own parameters and functions": partial(Tiny, reads.Scaled),
    "reads of children": partial(Tiny, reads.Reading),
    "weights made of others": partial(Tiny, reads.Normalized),
    "functional calls": partial(Tiny, reads.Called),
    "functional calls in recomputes": partial(Tiny, reads.CalledAgain),
    "a head that reads the embedding": reads.FunctionalHead,
    "writes into inputs": partial(reads.Entering, reads.InPlace),
}  # fmt: skip


def train(twin: Twin, what: str, steps: int = 2) -> None:
    """Steps with a learning rate, an evaluation before each; every gradient and parameter."""
    pair = (twin.plain, twin.ours)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in pair]
    for step in range(steps):
        everybody, mine = twin.batch()
        with torch.no_grad():
            rows = slice(twin.mesh.rank * 2, twin.mesh.rank * 2 + 2)
            close(twin.ours(mine[0]), twin.plain(everybody[0])[rows], f"{what}: evaluation {step}")
        twin.backward()
        twin.check_step(optimizers, f"{what}, step {step}")


CASES: list[tuple[int, Any, dict[str, Any]]] = [
    (2, None, {}), (2, FULL, ALL), (2, None, ALL), (2, None, ROLLING), (2, None, SMALL),
    (1, None, {}), (2, FULL, {}), (2, REENTRANT, {}), (2, FULL, MODULE),
    (2, None, MODULE | {"memory_pool": False}), (2, FULL, ROLLING), (1, REENTRANT, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "cases"),
    [
        pytest.param(list(MODELS), CASES[:2], id="all models"),
        *(
            pytest.param(names, CASES[2:], id=f"{which} models", marks=pytest.mark.thorough(15))
            for which, names in (("first", list(MODELS)[:4]), ("last", list(MODELS)[4:]))
        ),
    ],
)
@ranks(2)
def test_weights_read_past_their_modules_are_right(
    names: list[str], cases: list[tuple[int, Any, dict[str, Any]]]
) -> None:
    meshes = {weight: mesh_of(weight) for weight in (1, 2)}
    for name in names:
        for weight, checkpoint, config in cases:
            if checkpoint is not None and name == "writes into inputs":
                continue  # refused
            if name == "a block that returns its weight" and checkpoint == REENTRANT:
                continue  # returns tensors inside of a dict: refused
            what = f"{name}, {config}, {checkpoint}, weight {weight}"
            twin = Twin(partial(MODELS[name], layers=3), meshes[weight], checkpoint, **config)
            try:
                train(twin, what)
            except Exception as error:
                raise AssertionError(what) from error


class Peeking(TorchFunctionMode):
    """Reads a whole weight past its module, from within the function that a layer calls."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self._weight = weight
        self.found: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            self.found.append(self._weight.full_tensor())
        return func(*args, **(kwargs or {}))


@ranks(2)
def test_a_weight_read_within_a_layer_that_is_called_alone_has_all_ranks_gradient() -> None:
    twin = Twin(partial(Tiny, layers=1), mesh_of(weight=2), **ALL)
    ours: Any = twin.ours
    everybody = torch.arange(24.0, dtype=torch.float64).view(4, 6)
    (twin.plain.head(everybody).sum() + 2 * twin.plain.head.weight.sum()).backward()
    with Peeking(ours.head.weight) as peeking:
        out = ours.head(everybody[twin.mesh.rank * 2 :][:2])
    (out.sum() + peeking.found[0].sum()).backward()
    twin.check_gradients("a read within a layer")
