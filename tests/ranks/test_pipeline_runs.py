"""A step with more micro-batches than configured: the schedule runs several times per step."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from internsp.base.trace import Trace
from internsp.errors import LayoutError
from internsp.pipeline import ComputeAction, SchedulerHook
from tests.support.compare import TOLERANCE
from tests.support.few import some
from tests.support.pipeline import Case, Found, batches, compare, make
from tests.support.ranks import ranks, run_ranks

SCHEDULES = [("GPipe", 1), ("1F1B", 1), ("ZBVZeroBubble", 2), ("InterleavedZeroBubble", 2)]
CASES = [
    *(Case(schedule, chunks=chunks, static=False) for schedule, chunks in SCHEDULES),
    Case("Interleaved1F1B", chunks=2, checkpoint={"mode": "full", "fraction": 0.5}),
    Case("1F1B", weights={"accumulation": "full"}, packed=True),
]


class Ends(SchedulerHook):
    """How often the last micro-batch was announced to a chunk."""

    count = 0

    def after_last_micro_batch(self, action: ComputeAction) -> None:
        self.count += 1


def several(rank: int, world_size: int, cases: list[Case]) -> list[tuple[Found, int, Any]]:
    found = []
    for case in cases:
        ends, trace = Ends(), Trace(enabled=True)
        pipeline, plain = make(replace(case, micro_batches=2), [ends], trace)
        given = batches(case, pipeline.mesh)
        tokens = case.tokens(pipeline.mesh.data)
        pipeline.criterion = lambda loss, _, tokens=tokens: loss / tokens
        pipeline.evaluate(given)
        ends.count = 0
        trace.clear()
        losses = pipeline.step(given)
        lines = trace.lines(("AG", "RS"))
        planned = pipeline.planned(runs=2).lines(("AG", "RS"))
        found.append((compare(case, pipeline, plain, losses), ends.count, lines == planned))
    return found


@pytest.mark.parametrize("world", some([2, 4], 1))
def test_several_runs_of_a_schedule_equal_one_process(world: int) -> None:
    cases = [replace(case, weight=world // 2) for case in (CASES if world == 2 else CASES[1:3])]
    for results in run_ranks(several, world, cases, timeout=120):
        for case, (found, ends, as_planned) in zip(cases, results, strict=True):
            assert found.loss < TOLERANCE, case
            assert found.gradient < TOLERANCE, case
            assert ends == case.chunks, "told once for each chunk"
            assert as_planned, case


@ranks(2)
def test_ranks_that_were_given_different_numbers_are_told_and_none_waits() -> None:
    case = Case(micro_batches=4, static=False)
    pipeline, plain = make(replace(case, micro_batches=2))
    right = batches(case, pipeline.mesh)
    first = pipeline.mesh.rank == 0
    start = time.monotonic()
    with pytest.raises(LayoutError, match="from 2 to 4: all need as many"):
        pipeline.step(right[:2] if first else right)
    with pytest.raises(ValueError, match="0 micro-batches, but 2 were agreed"):
        pipeline.step([])
    assert time.monotonic() - start < 10, "no timeout went by"
    pipeline.criterion = lambda loss, _: loss / case.tokens(1)
    found = compare(case, pipeline, plain, pipeline.step(right))
    assert max(found.loss, found.gradient) < TOLERANCE
