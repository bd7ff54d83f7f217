"""If one rank of a pipeline fails, no other waits for the timeout, which is a minute here."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from torch import nn

from internsp.errors import CollectiveError
from internsp.failure.consensus import default_store
from internsp.pipeline import ComputeAction, SchedulerHook
from tests.support.pipeline import Case, batches, make
from tests.support.ranks import run_ranks

SOON = 8.0  # seconds; about two on a quiet machine


class Trips(SchedulerHook):
    where = ""

    def before_forward(self, action: ComputeAction) -> None:
        self.trip("forward", action, 2)

    def before_backward(self, action: ComputeAction) -> None:
        self.trip("backward", action, 1)

    def after_last_micro_batch(self, action: ComputeAction) -> None:
        self.trip("end", action, -1)

    def trip(self, where: str, action: ComputeAction, micro_batch: int) -> None:
        if where == self.where and action.micro_batch == micro_batch:
            raise ValueError(f"spilt in {where}")


def first_forward(module: nn.Module, args: Any, output: Any) -> None:
    raise ValueError("spilt in first")


def run(rank: int, world_size: int, case: Case, where: str, culprit: int) -> list[str]:
    """The failing rank's program catches its error and stops; the others continue."""
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL + 1)
    hook = Trips()
    pipeline, _ = make(case, hooks=[hook])
    given, store = batches(case, pipeline.mesh), default_store()
    if where != "first":
        pipeline.step(given)
    elif rank == culprit:
        block = next(iter(pipeline.chunks[0].layers.values()))
        hooked = block.register_forward_hook(first_forward)
    hook.where = where if rank == culprit else ""
    start, found = time.monotonic(), []
    while len(found) < (1 if where == "first" else 2):
        try:
            pipeline.step(given)
        except Exception as error:
            cause: Any = error
            while cause.__cause__ is not None and rank == culprit:
                cause = cause.__cause__
            found.append(f"{type(error).__name__}: {error} {cause}")
            if rank == culprit:
                break
    took = time.monotonic() - start
    store.set(f"done {rank}", "")
    store.wait([f"done {r}" for r in range(world_size)])
    assert took < SOON, f"{where}: {took:.1f} s, {found}"
    if where == "first":  # all ranks of a stage have failed, so all can continue
        if rank == culprit:
            hooked.remove()
        assert pipeline.step(given) is not None
    elif rank == culprit:  # when it calls again, it raises at once
        with pytest.raises(CollectiveError, match="spilt"):
            pipeline.step(given)
    return found


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("ranks", "where", "culprit", "case"),
    [
        (2, "first", 0, Case(static=False, timeout=60)),
        (2, "end", 1, Case(timeout=60)),
        (4, "forward", 1, Case(weight=2, timeout=60)),
        (4, "backward", 2, Case("Interleaved1F1B", chunks=2, weight=2, timeout=60)),
        (4, "end", 0, Case(weight=2, timeout=60)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_rank_of_a_pipeline_waits_long_for_one_that_failed_alone(
    ranks: int, where: str, culprit: int, case: Case
) -> None:
    for rank, found in enumerate(run_ranks(run, ranks, case, where, culprit)):
        assert f"spilt in {where}" in found[0], (rank, found)
        if rank != culprit:
            assert all(f"rank {culprit}" in told for told in found), (rank, found)
            assert all("CollectiveError" in told for told in found), (rank, found)
