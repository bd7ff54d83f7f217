"""The trainer moves every parameter as one process does, a tied embedding among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from internsp.app.config import Config
from internsp.app.process.stop import StopRequest
from internsp.app.session.session import Session
from internsp.app.train.step import StepRunner
from tests.ranks.test_train import config
from tests.support.ranks import run_ranks
from tests.support.zero import whole

STEPS = 4
ADAMW = {"name": "adamw", "lr": 1e-2, "eps": 1e-3, "warmup_steps": 0}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "warmup_steps": 0}
Trained = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]


def trained(rank: int, world_size: int, runs: list[Config]) -> list[Trained]:
    """Parameters before and after some steps, and the norms, of each run."""
    found = []
    for settings in runs:
        session = Session.create(settings)
        for communicator in session.communicators:
            communicator.state.pool.poison = True
        before, runner = whole(session.modules[0]), StepRunner(session)
        norms = [runner.step(step, StopRequest())[0].grad_norm for step in range(STEPS)]
        session.communicators[0].wait_until_ready()
        found.append((before, whole(session.modules[0]), norms))
    return found


def runs(parallel: dict[str, Any]) -> list[Config]:
    return [
        config(
            model={"tie_embeddings": tied}, optimizer=optimizer, parallel=parallel,
            train={"micro_batches": 2}, weight_parallel={"accumulation": accumulation},
        )
        for optimizer, tied, accumulation in (
            (ADAMW, True, "sharded"), (SGD, True, "full"), (SGD, False, "sharded"),
        )
    ]  # fmt: skip


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    "parallel",
    [{"weight": 2, "sequence": 2}, pytest.param({"weight": 1}, marks=pytest.mark.thorough(4))],
    ids=str,
)
def test_every_parameter_moves_as_on_one_process(parallel: dict[str, Any]) -> None:
    wanted = run_ranks(trained, 1, runs({}), timeout=240)[0]
    for rank in run_ranks(trained, 2, runs(parallel), timeout=240):
        for (start, end, norms), (before, after, found) in zip(wanted, rank, strict=True):
            assert found == pytest.approx(norms, rel=1e-5)
            assert after.keys() == end.keys()
            for name, value in end.items():
                assert torch.equal(before[name], start[name]), name
                moved = (value - start[name]).abs().max()
                assert moved > 1e-4, f"{name} has hardly moved on one process"
                apart = (after[name] - value).abs().max()
                assert apart < 1e-3 * moved, f"{name} is {apart} off, having moved by {moved}"
