"""The experts' weight axis inside pipeline stages: any weights, on a separate weight group."""

from __future__ import annotations

from typing import Any

import pytest

from internsp.base.trace import Trace
from tests.support.compare import TOLERANCE
from tests.support.pipeline import Case, Found, batches, compare, make
from tests.support.ranks import run_ranks

EXPERTS: dict[str, Any] = {"expert_parameters": ("feed_forward",)}
CASES = [
    Case("ZBVZeroBubble", chunks=2, expert_weight=2, weights=EXPERTS),
    Case(
        "1F1B",
        weight=2,
        expert_weight=1,
        weights={**EXPERTS, "coalesce_bytes": 0},
        checkpoint={"mode": "full", "fraction": 0.5},
    ),
]


def run(rank: int, world_size: int) -> list[tuple[Found, list[str], list[str]]]:
    found = []
    for case in CASES:
        trace = Trace(enabled=True)
        pipeline, plain = make(case, trace=trace)
        losses = pipeline.step(batches(case, pipeline.mesh))
        done, planned = (t.lines(("AG", "RS")) for t in (trace, pipeline.planned(True)))
        found.append((compare(case, pipeline, plain, losses), done, planned))
    return found


@pytest.mark.thorough(3)
def test_gradients_and_messages_in_a_pipeline_are_as_they_should_be() -> None:
    for ranks in run_ranks(run, 4, timeout=90):
        for case, (found, done, planned) in zip(CASES, ranks, strict=True):
            assert found.loss < TOLERANCE, case
            assert found.gradient < TOLERANCE, case
            assert done == planned, case
