"""A failure on one stage ends all ranks within the groups' timeout; errors name the first cause.

The failed rank stays alive here, so that the others can only find out by the timeout; in a run its
process ends, its connections close, and the others raise at once.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from internsp.errors import CollectiveError
from internsp.pipeline import ComputeAction, SchedulerHook
from tests.support.pipeline import Case, batches, make
from tests.support.ranks import run_ranks

TIMEOUT = 6  # seconds: the groups'


class _Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError("spilt in backward")


class _Fails(SchedulerHook):
    def __init__(self, where: str) -> None:
        self.where = where

    def before_forward(self, action: ComputeAction) -> None:
        if self.where == "forward" and action.micro_batch == 2:
            raise ValueError("spilt in forward")

    def before_criterion(self, action: ComputeAction, output: Any) -> None:
        if self.where == "loss" and action.micro_batch == 1:
            raise ArithmeticError("spilt in the loss")


def run(rank: int, world_size: int, case: Case, where: str, culprit: int) -> dict[str, Any]:
    mine = rank == culprit
    pipeline, _ = make(case, hooks=[_Fails(where)] if mine else [])
    if mine and where == "backward":
        block = next(iter(pipeline.chunks[0].layers.values()))
        block.register_forward_hook(lambda module, args, output: _Bad.apply(output))
    found: dict[str, Any] = {}
    start = time.monotonic()
    try:
        pipeline.step(batches(case, pipeline.mesh))
    except Exception as error:
        found = {"seconds": time.monotonic() - start, "type": type(error), "text": str(error)}
    try:
        pipeline.step(batches(case, pipeline.mesh))
    except CollectiveError as error:
        found["later"] = str(error)
    return found


@pytest.mark.thorough(4)
@pytest.mark.parametrize(
    ("where", "cause", "culprit"),
    [
        ("forward", "ValueError: spilt in forward", 0),
        ("loss", "ArithmeticError: spilt in the loss", 3),
        ("backward", "ZeroDivisionError: spilt in backward", 2),
    ],
)
@pytest.mark.parametrize(("schedule", "chunks"), [("1F1B", 1), ("InterleavedZeroBubble", 2)])
def test_one_ranks_failure_ends_all_with_its_cause(
    where: str, cause: str, culprit: int, schedule: str, chunks: int
) -> None:
    case = Case(schedule, chunks=chunks, weight=2, timeout=TIMEOUT)
    for rank, found in enumerate(run_ranks(run, 4, case, where, culprit, timeout=60)):
        assert found["seconds"] < TIMEOUT + 4, rank
        assert cause in found["later"], rank
        assert f"rank {culprit}" in found["later"], rank
        if rank != culprit:
            assert issubclass(found["type"], CollectiveError), rank
            assert cause in found["text"], rank
