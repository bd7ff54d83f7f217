"""With every schedule the loss and every gradient equal one process within 1e-10.

In each set every possible pair of values of the options below occurs together at least once; two
ranks, whose pairs four ranks meet as well, run every value, and the rest where thorough. In the
thorough set of four ranks any three of: schedule, mesh, number of micro-batches, activation
checkpointing or none, weights re-gathered or kept, occur in all combinations, too. Every case also
compares its gathers and reductions, in order, with the plan.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch

from internsp.base.trace import Trace
from internsp.optim import clip_grad_norm_
from tests.support.compare import TOLERANCE, after_a_step
from tests.support.few import parted
from tests.support.pairs import Combination, all_pairs, covering, pairs_of
from tests.support.pipeline import Case, Found, batches, compare, gradient_gaps, make, plain_loss
from tests.support.ranks import run_ranks

CHUNKS = {"GPipe": 1, "1F1B": 1, "DualPipeV": 2, "ZBVZeroBubble": 2}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "none": {},
    "half": {"mode": "full", "fraction": 0.5},
    "full": {"mode": "full"},
    "selective": {"mode": "selective"},
}
KEPT: dict[str, dict[str, Any]] = {
    "none": {},
    "all": {"keep_unsharded": "all"},
    "one": {"keep_unsharded": 1},
}
GATHERS: dict[str, dict[str, Any]] = {
    "block": {}, "module": {"granularity": "module"}, "rolling": {"gather_before": "rolling"},
}  # fmt: skip
OPTIONS: dict[str, list[Any]] = {
    "schedule": [
        "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
    ],
    "micro_batches": [4, 8],
    "checkpoint": list(CHECKPOINTS),
    "kept": list(KEPT),
    "overlap": [True, False],
    "pool": [True, False],
    "layers": ["one", "uneven", "more"],
    "packed": [False, True],
    "bias": [False, True],
    "family": ["llama", "internlm2"],
    "gathers": list(GATHERS),
    "accumulation": ["sharded", "full"],
    "output": ["local", "vocabulary"],
    "static": [True, False],
}  # fmt: skip
# Blocks by the number of stages: one each, and two uneven splits, one of which re-gathers.
LAYERS = {
    2: {"one": 2, "uneven": 5, "more": 7},
    4: {"one": 4, "uneven": 5, "more": 9},
    8: {"one": 8, "uneven": 9, "more": 13},
}
DEGREES: dict[int, dict[str, list[Any]]] = {
    2: {"mesh": [(2, 1, 1)], "checkpoint": ["none", "full"]},
    4: {"mesh": [(2, 2, 1), (2, 1, 2), (2, 2, 2), (4, 1, 1)]},
}
# Of these any three occur in all combinations of the thorough set.
THREE = ("micro_batches", "checkpoint", "kept")
EVERY: dict[str, list[Any]] = {
    "schedule": OPTIONS["schedule"],
    "mesh": [(2, 2, 1), (2, 1, 2), (4, 1, 1)],
    "micro_batches": [4, 8],
    "checkpoint": ["none", "full"],
    "kept": ["none", "all"],
}


def options(world: int) -> dict[str, list[Any]]:
    return {**OPTIONS, **DEGREES[world]}


def possible(c: Combination) -> bool:
    """DualPipeV needs as many micro-batches as stages."""
    stages = c.get("mesh", (2, 1, 1))[0] * 2
    return not (c.get("schedule") == "DualPipeV" and c.get("micro_batches", 8) < stages)


def case_of(c: Combination) -> Case:
    pipeline, weight, sequence = c["mesh"]
    chunks = CHUNKS.get(c["schedule"], 2)
    return Case(
        schedule=c["schedule"],
        pipeline=pipeline,
        chunks=chunks,
        weight=weight,
        sequence=sequence,
        micro_batches=c["micro_batches"],
        layers=LAYERS[pipeline * chunks][c["layers"]],
        packed=c["packed"],
        static=c["static"],
        weights={
            **KEPT[c["kept"]],
            "overlap": c["overlap"],
            "memory_pool": c["pool"],
            "accumulation": c["accumulation"],
            "head_output": c["output"],
            **GATHERS[c["gathers"]],
        },
        checkpoint=CHECKPOINTS[c["checkpoint"]],
        model={"family": c["family"], "bias": c["bias"], "qkv_bias": c["bias"]},
    )


def work(c: Combination) -> float:
    """Block forwards of all micro-batches, in addition to what every case takes (about 40)."""
    case = case_of(c)
    return 40 + case.micro_batches * case.layers


def together() -> list[Combination]:
    """Required cases, on unevenly split blocks: two of the eight combinations of the last three
    values for each schedule and mesh, which differ in all three.

    The next mesh, and the next schedule, has another such pair, so that of the five options any
    three occur in all combinations.
    """
    found = []
    opposite = list(product((0, 1), repeat=3))[:4]  # of each pair the one that begins with 0
    for (i, schedule), (j, mesh) in product(enumerate(EVERY["schedule"]), enumerate(EVERY["mesh"])):
        one = opposite[(i + j) % 4]
        for chosen in (one, [1 - index for index in one]):
            c = {"schedule": schedule, "mesh": mesh, "layers": "uneven"}
            c |= {name: EVERY[name][index] for name, index in zip(THREE, chosen, strict=True)}
            if not possible(c):  # four micro-batches are too few
                c["micro_batches"] = 8
            found.append(c)
    return found


@functools.cache
def chosen(world: int) -> list[Combination]:
    return covering(options(world), possible, seed=35, cost=work)  # of many the shortest


@functools.cache
def more() -> list[Combination]:
    """The thorough set."""
    return covering(options(4), possible, cost=work, given=together())


def run(rank: int, world_size: int, cases: list[Case]) -> list[tuple[Found, bool]]:
    found = []
    for case in cases:
        trace = Trace(enabled=True)
        pipeline, plain = make(case, trace=trace)
        losses = pipeline.step(batches(case, pipeline.mesh))
        planned = pipeline.planned(case.weights["overlap"])
        ordered = trace.lines(("AG", "RS")) == planned.lines(("AG", "RS"))
        gaps = compare(case, pipeline, plain, losses)
        stepped = max(after_a_step(pipeline.chunks, plain).values())
        found.append((replace(gaps, parameter=stepped), ordered))
    return found


def check(world: int, cases: list[Case]) -> None:
    for ranks in run_ranks(run, world, cases, timeout=400):
        for case, (found, ordered) in zip(cases, ranks, strict=True):
            assert found.loss < TOLERANCE, case
            assert found.gradient < TOLERANCE, case
            assert found.parameter < TOLERANCE, case
            assert ordered, case


SETS = [
    pytest.param(4, [c for c in chosen(4) if c["mesh"] == mesh], id=f"4-{mesh}")
    for mesh in DEGREES[4]["mesh"]
]
for part, marks in zip(parted(chosen(2)), ((), pytest.mark.thorough(8)), strict=True):
    SETS.append(pytest.param(2, part, id=f"2{', others' if marks else ''}", marks=marks))


@pytest.mark.slow(8)
@pytest.mark.parametrize(("world", "combinations"), SETS)
def test_loss_every_gradient_and_every_message_are_as_they_should_be(
    world: int, combinations: list[Combination]
) -> None:
    check(world, [case_of(c) for c in combinations])


@pytest.mark.thorough(12)
@pytest.mark.parametrize("mesh", DEGREES[4]["mesh"])
def test_any_three_of_five_options_go_together(mesh: tuple[int, int, int]) -> None:
    check(4, [case_of(c) for c in more() if c["mesh"] == mesh])


@pytest.mark.parametrize("world", [2, 4])
def test_the_sets_cover_all_pairs(world: int) -> None:
    wanted = all_pairs(options(world), possible)
    found = chosen(world)
    assert wanted <= set().union(*(pairs_of(c) for c in found))


def test_the_thorough_set_has_what_its_document_says() -> None:
    found = [c for c in more() if c["layers"] == "uneven"]
    for names in combinations(EVERY, 3):
        for each in product(*(EVERY[name] for name in names)):
            wanted = dict(zip(names, each, strict=True))
            if possible(wanted):
                assert any(wanted.items() <= c.items() for c in found), wanted


def repeated(rank: int, world_size: int, case: Case) -> Found:
    pipeline, plain = make(case)
    for _ in range(case.steps):
        losses = pipeline.step(batches(case, pipeline.mesh))
    return compare(case, pipeline, plain, losses)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_gradients_of_several_steps_add_up(schedule: str) -> None:
    case = Case(schedule, chunks=CHUNKS.get(schedule, 2), steps=3)
    for found in run_ranks(repeated, 2, case):
        assert found.gradient < TOLERANCE


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("InterleavedZeroBubble", 1), ("InterleavedZeroBubble", 3), ("Interleaved1F1B", 3)],
)
def test_interleaved_schedules_take_any_number_of_chunks(schedule: str, chunks: int) -> None:
    case = Case(schedule, chunks=chunks, layers=7, weights={"overlap": True})
    for ((found, ordered),) in run_ranks(run, 2, [case]):
        assert found.loss < TOLERANCE
        assert found.gradient < TOLERANCE
        assert ordered


def clipped(rank: int, world_size: int) -> tuple[float, float, float]:
    case = Case("ZBVZeroBubble", chunks=2, weight=2)
    pipeline, plain = make(case)
    pipeline.step(batches(case, pipeline.mesh))
    plain_loss(case, plain, pipeline.mesh.data).backward()
    parameters = [p for chunk in pipeline.chunks for p in chunk.parameters()]
    wanted = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
    found = clip_grad_norm_(parameters, 0.5, pipeline.mesh.pipeline_group)
    return found.item(), wanted, max(gradient_gaps(pipeline, plain).values())


def test_gradients_of_all_stages_are_clipped_by_one_norm() -> None:
    for found, wanted, gap in run_ranks(clipped, 4):
        assert found == pytest.approx(wanted, rel=1e-12)
        assert wanted > 0.5, "nothing was clipped"
        assert gap < TOLERANCE


def replicated(rank: int, world_size: int) -> list[tuple[Found, int, int]]:
    """Two replicas, no optimizer: collectives of a step's gradients, and the expected ones."""
    found = []
    for case in (
        Case("1F1B"),
        Case("ZBVZeroBubble", chunks=2),
        Case("DualPipeV", chunks=2, weights={"accumulation": "full"}),
    ):
        pipeline, plain = make(case)
        losses = pipeline.step(batches(case, pipeline.mesh))
        done = sum(c.state.collectives.counters.reductions for c in pipeline.communicators)
        cut = sum(len(c.replicated.sharded) for c in pipeline.communicators)
        whole = case.weights.get("accumulation") == "full"  # counts its reductions within the group
        within = cut * (1 if whole else case.micro_batches)
        among_replicas = cut + len(pipeline.communicators)  # and a chunk's replicated parameters
        found.append((compare(case, pipeline, plain, losses), done, within + among_replicas))
    return found


def test_replicas_exchange_gradients_once_a_step() -> None:
    for ranks in run_ranks(replicated, 4):
        for found, done, wanted in ranks:
            assert found.gradient < TOLERANCE
            assert done == wanted
