"""The parameter all-gather overlaps the next step's first forwards, block by block, per stage."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from internsp.base.trace import Trace
from internsp.optim import ZeroOptimizer, step_together
from tests.support.late import publish_late
from tests.support.pipeline import Case, batches, make, plain_loss
from tests.support.ranks import run_ranks

Order = list[tuple[list[str], list[str]]]


def published(rank: int, world_size: int, case: Case) -> tuple[Order, float]:
    """For each chunk its blocks and the events of the second step; the parameters' gap."""
    trace = Trace(enabled=True)
    pipeline, plain = make(case, trace=trace)
    for communicator in pipeline.communicators:
        publish_late(communicator)
    optimizers = [
        ZeroOptimizer(communicator, torch.optim.SGD, lr=0.1)
        for communicator in pipeline.communicators
    ]
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    found: Order = []
    for _ in range(2):
        trace.clear()
        pipeline.step(batches(case, pipeline.mesh))
        lines = list(trace.events)
        step_together(optimizers)
        plain_loss(case, plain, pipeline.mesh.data).backward()
        alone.step()
        alone.zero_grad()
    for stage, communicator in zip(pipeline.stages, pipeline.communicators, strict=True):
        blocks = [unit.name for unit in communicator.blocks]
        first = f"stage {stage.stage_index}, micro-batch 0"
        order = [
            f"{e.kind} {e.unit}"
            for e in lines
            if e.unit in (*blocks, first)
            and (e.kind in ("USE", "FORWARD") or e.phase == "publish")
        ]
        found.append((blocks, list(dict.fromkeys(order))))
    gap = 0.0
    wanted = dict(plain.named_parameters())
    for chunk in pipeline.chunks:
        for name, parameter in chunk.named_parameters():
            mine = parameter.full_tensor()  # type: ignore[attr-defined]
            gap = max(gap, float((mine - wanted[name]).detach().abs().max()))
    return found, gap


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (4, Case("1F1B", layers=6)),
        pytest.param(4, Case("ZBVZeroBubble", chunks=2, layers=12), marks=pytest.mark.thorough(4)),
        pytest.param(8, Case("1F1B", layers=6, weight=2), marks=pytest.mark.thorough(5)),
    ],
    ids=["1F1B, replicas", "ZBV, replicas", "1F1B, weight and replicas"],
)
def test_a_block_waits_for_its_own_new_values_while_the_one_before_computes(
    world: int, case: Case
) -> None:
    for chunks, gap in run_ranks(published, world, case):
        assert gap < 1e-12, "a block was read before it was published"
        assert len(chunks) == case.chunks
        for blocks, order in chunks:
            assert len(blocks) > 1
            end = next(i for i, what in enumerate(order) if what.startswith("FORWARD"))
            for before, block in pairwise(blocks):
                assert order.index(f"USE {before}") < order.index(f"WAIT {block}") < end
