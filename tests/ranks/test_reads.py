"""Weights that are read, returned, written into and put in by any way: right, or refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from internsp.config import ActivationCheckpointConfig
from internsp.mesh import ParallelMesh
from tests.support import reads
from tests.support.compare import close
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
    "weights made of others": partial(Tiny, reads.Normalised),
    "functional calls": partial(Tiny, reads.Called),
    "a head that reads the embedding": reads.FunctionalHead,
    "writes into inputs": partial(reads.Entering, reads.InPlace),
}  # fmt: skip


def mesh_of(weight: int = 2) -> ParallelMesh:
    return ParallelMesh.create(weight=weight, device_type="cpu", timeout_seconds=20)


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


@pytest.mark.parametrize("names", [list(MODELS)[:4], list(MODELS)[4:]])
@ranks(2)
def test_weights_read_past_their_modules_are_right(names: list[str]) -> None:
    two, one = mesh_of(), mesh_of(1)
    cases: list[tuple[ParallelMesh, Any, dict[str, Any]]] = [
        (two, None, {}), (two, None, ALL), (two, None, ROLLING), (two, None, SMALL),
        (one, None, {}), (two, FULL, {}), (two, REENTRANT, {}), (two, FULL, ALL),
        (two, FULL, MODULE), (two, None, MODULE | {"memory_pool": False}),
        (two, FULL, ROLLING), (one, REENTRANT, {}),
    ]  # fmt: skip
    for name in names:
        for mesh, checkpoint, config in cases:
            if checkpoint is not None and name == "writes into inputs":
                continue  # refused
            if checkpoint is REENTRANT and name == "a block that returns its weight":
                continue  # returns tensors inside of a dict: refused
            what = f"{name}, {config}, {checkpoint}, weight {mesh.shape.weight}"
            twin = Twin(partial(MODELS[name], layers=3), mesh, checkpoint, **config)
            try:
                train(twin, what)
            except Exception as error:
                raise AssertionError(what) from error
