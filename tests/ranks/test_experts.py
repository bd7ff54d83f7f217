"""Experts on a separate weight axis: every value equals one process's, on four ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from internsp.optim import ZeroOptimizer, clip_grad_norm_
from internsp.schedule.simulate import simulate
from tests.support.compare import TOLERANCE, gaps
from tests.support.experts import Case, Pair
from tests.support.ranks import run_ranks

CASES = {
    "wider groups, three experts on four ranks": Case(
        2, 4, number=3, config={"reduce": 2}
    ),
    "narrower groups": Case(4, 2, micro_batches=2),
    "two owners": Case(2, 2, 2),
    "two owners with replicas": Case(4, 1, 2, zero=1, checkpoint={"mode": "full"}),
    "four owners": Case(2, 1, 4, zero=2, config={"granularity": "module"}),
    "idle experts": Case(2, 4, listed=True, number=5),
    "idle experts, recomputed": Case(
        1, 2, zero=2, listed=True, number=5, checkpoint={"mode": "full", "fraction": 0.5}
    ),
    "all weights small": Case(4, 2, 2, config={"coalesce_bytes": 65536}),
    "some weights small": Case(2, 4, config={"coalesce_bytes": 400, "reductions_in_flight": 1}),
    "summed whole, a block kept": Case(
        2, 4, micro_batches=2, config={"accumulation": "full", "keep_unsharded": 1}
    ),
    "rolling": Case(4, 2, 2, config={"gather_before": "rolling", "coalesce_bytes": 400}),
    "no slots kept": Case(4, 2, 2, number=2, config={"memory_pool": False, "prefetch_depth": 2}),
}


# torch's foreach forms take a second of CPU time per case, so only one of the two meshes uses them.
FOREACH = "two owners with replicas"
THOROUGH = pytest.mark.thorough(15)


def plain_loop(rank: int, world: int, cases: dict[str, Case]) -> list[dict[str, float]]:
    """Two steps of torch's own optimizers: gradients, clipped norm and parameters."""
    found = []
    for name, case in cases.items():
        pair = Pair(case)
        if name == FOREACH:  # over parameters of two meshes
            ours: Any = torch.optim.AdamW(pair.ours.parameters(), lr=1e-2, foreach=True)
            theirs: Any = torch.optim.AdamW(pair.plain.parameters(), lr=1e-2)
        else:
            ours = torch.optim.SGD(pair.ours.parameters(), lr=0.1)
            theirs = torch.optim.SGD(pair.plain.parameters(), lr=0.1)
        worst = {"gradient": 0.0, "norm": 0.0}
        for step in range(2):
            pair.backward(step)
            worst["gradient"] = max(worst["gradient"], pair.furthest_gradient())
            norm = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 1.0).item()
            mine = clip_grad_norm_(pair.ours.parameters(), 1.0).item()
            worst["norm"] = max(worst["norm"], abs(mine - norm) / norm)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        found.append({**worst, "parameter": pair.furthest_parameter()})
    return found


def zero(rank: int, world: int, cases: dict[str, Case]) -> list[dict[str, float]]:
    """The same with ZeroOptimizer."""
    found = []
    for case in cases.values():
        pair = Pair(case)
        ours = ZeroOptimizer(pair.communicator, torch.optim.AdamW, lr=1e-2, max_grad_norm=1.0)
        theirs = torch.optim.AdamW(pair.plain.parameters(), lr=1e-2)
        worst = {"gradient": 0.0, "norm": 0.0}
        for step in range(2):
            pair.backward(step)
            wanted = {n: p.grad for n, p in pair.plain.named_parameters() if p.grad is not None}
            apart = gaps(ours.gather_gradients(), wanted)
            worst["gradient"] = max(worst["gradient"], *apart.values())
            norm = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 1.0).item()
            ours.step()
            worst["norm"] = max(worst["norm"], abs(ours.grad_norm - norm) / norm)
            theirs.step()
            theirs.zero_grad()
            ours.zero_grad()
        found.append({**worst, "parameter": pair.furthest_parameter()})
    return found


@pytest.mark.slow(7)
@pytest.mark.parametrize(
    ("loop", "names"),
    [
        pytest.param(loop, names, id=f"{loop.__name__}, {which}", marks=marks)
        for first, loop in enumerate((plain_loop, zero))
        for which, names, marks in (
            ("few", list(CASES)[first::3], ()),
            ("others", [n for n in CASES if n not in list(CASES)[first::3]], THOROUGH),
        )
    ],
)
def test_gradients_norms_and_steps_equal_one_process(loop: Any, names: list[str]) -> None:
    cases = {name: CASES[name] for name in names}
    for found in run_ranks(loop, 4, cases, timeout=240):
        for name, worst in zip(cases, found, strict=True):
            assert max(worst.values()) < TOLERANCE, (name, worst)


def bits(rank: int, world: int, cases: list[Case]) -> list[list[dict[str, torch.Tensor]]]:
    found = []
    for case in cases:
        both = []
        for overlap in (True, False):
            pair = Pair(Case(**{**case.__dict__, "config": {**case.config, "overlap": overlap}}))
            optimizer = ZeroOptimizer(
                pair.communicator, torch.optim.AdamW, lr=1e-2, max_grad_norm=1.0
            )
            numbers = []
            for step in range(2):
                numbers.append(pair.backward(step, plain=False))
                optimizer.step()
                numbers.append(optimizer.grad_norm)
            both.append({**pair.whole(), "numbers": torch.tensor(numbers)})
        found.append(both)
    return found


@pytest.mark.unmeasured
def test_without_overlap_the_bits_are_the_same() -> None:
    names = ("two owners", "all weights small")
    for found in run_ranks(bits, 4, [CASES[name] for name in names]):
        for name, (overlapped, synchronous) in zip(names, found, strict=True):
            for key, value in overlapped.items():
                assert torch.equal(value, synchronous[key]), (name, key)


def traced(rank: int, world: int, cases: list[Case]) -> list[tuple[list[str], list[str], int, int]]:
    """The first step's events compared with the plan."""
    found = []
    for case in cases:
        kinds = ("AG", "RS", "USE", "FREE", "FINISH")
        if case.config.get("gather_before") == "rolling":  # whose plan orders the messages alone
            kinds = kinds[:2]
        pair = Pair(case)
        pair.backward(0, plain=False, once=True)
        plan = pair.communicator.plan
        assert plan is not None
        planned = simulate(plan, case.micro_batches)
        sent = planned.nbytes("AG") + planned.nbytes("RS")
        counters = pair.communicator.state.collectives.counters
        events = [e for e in pair.trace.events if e.kind in ("AG", "RS")]
        moved = sum(e.nbytes for e in events)
        assert counters.gathered_bytes == planned.nbytes("AG")
        found.append((pair.trace.lines(kinds), planned.lines(kinds), moved, sent))
    return found


@pytest.mark.unmeasured
def test_the_trace_of_a_step_equals_its_plan_line_by_line_and_byte_by_byte() -> None:
    cases = {name: case for name, case in CASES.items() if not case.listed}
    for found in run_ranks(traced, 4, list(cases.values())):
        for name, (lines, planned, moved, sent) in zip(cases, found, strict=True):
            assert lines == planned, name
            assert moved == sent, name
