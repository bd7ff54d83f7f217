"""Heads x ring with either axis near: one process's values, in steps and in complete runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from internsp.app.plan.step import make_plan
from internsp.app.session.session import Session
from internsp.app.train.step import StepRunner
from internsp.sp import SequenceLayout
from tests.support.compare import TOLERANCE
from tests.support.few import few, some
from tests.support.pairs import Combination, covering
from tests.support.parity import Case, run_case
from tests.support.ranks import ranks, run_ranks
from tests.support.runs import Changes, Ran, config, run_all
from tests.support.sections import mesh_sections

HEADS = {
    "own": {"heads": 4, "hidden_size": 16},
    "grouped": {"heads": 4, "kv_heads": 2, "hidden_size": 16},
    "one": {"heads": 3, "kv_heads": 1, "hidden_size": 12},
    "one in all": {"heads": 1, "hidden_size": 12},
}
OPTIONS: dict[str, list[Any]] = {
    "near": ["heads", "ring"],
    "weight": [1, 2, 4],
    "heads": list(HEADS),
    "length": [12, 13, 3],
    "packed": [False, True],
    "silent_rank": [False, True],
    "checkpoint": ["none", "full", "selective"],
    "micro_batches": [1, 2],
    "output": ["local", "gather", "vocabulary"],
}


def cases() -> list[Case]:
    def possible(c: Combination) -> bool:
        return not (c.get("packed") and c.get("length") == 3)

    return [
        Case(
            weight=c["weight"], sequence=4, ring=2, near=c["near"], length=c["length"],
            micro_batches=c["micro_batches"], model=HEADS[c["heads"]], packed=c["packed"],
            weights={"head_output": c["output"]}, checkpoint={"mode": c["checkpoint"]},
            one_rank_without_tokens=c["silent_rank"],
        )
        for c in covering(OPTIONS, possible)
    ]  # fmt: skip


def gaps(rank: int, world_size: int, given: list[Case]) -> list[tuple[float, float]]:
    return [run_case(case) for case in given]


@pytest.mark.unmeasured
@few("given", cases(), 4, 20)
def test_loss_and_every_gradient_equal_one_process(given: list[Case]) -> None:
    for found in run_ranks(gaps, 4, given, timeout=240):
        for case, (loss, gradient) in zip(given, found, strict=True):
            assert loss < TOLERANCE, case
            assert gradient < TOLERANCE, case


def parallel(near: str, **degrees: Any) -> Changes:
    return mesh_sections(**{"sequence": 4, "ring": 2, "fast_links": near, **degrees})


def again(**options: Any) -> Changes:
    return {"activation_checkpoint": options}


DROPPED: Changes = {"model": {"dropout": 0.2}}
PADDED: Changes = {"data": {"pack": False}}
TWICE: Changes = {"train": {"micro_batches": 2}}
SAVED: Changes = {"checkpoint": {"every": 1}}
FOUR: dict[str, list[Changes]] = {
    "ring near": [parallel("ring", weight=2), again(mode="selective", tiles=2), TWICE, SAVED],
    "ring near, level": [parallel("ring", weight=4, balance="level"), again(mode="full")],
    "ring near, zigzag, padded": [parallel("ring", balance="zigzag"), PADDED],
    "heads near": [parallel("heads", weight=4), SAVED],
}
EIGHT: dict[str, list[Changes]] = {
    "heads near, a pipeline": [parallel("heads", pipeline=2, weight=2), TWICE],
    "ring near, a pipeline": [parallel("ring", pipeline=2, weight=2), TWICE],
    "heads 4 x ring 2": [parallel("ring", sequence=8, weight=2), again(mode="full")],
    "heads 2 x ring 4": [parallel("ring", sequence=8, ring=4, balance="level"), PADDED],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """A run on one process."""
    runs: dict[str, list[Changes]] = {"": [DROPPED], "padded": [DROPPED, PADDED]}
    return run_all(tmp_path_factory.mktemp("alone"), 1, runs)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    given = {name: [DROPPED, *FOUR[name]] for name in ("ring near", "heads near")}
    return run_all(tmp_path_factory.mktemp("four"), 4, given)


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", ["ring near", "heads near"])
def test_every_step_and_every_weight_equal_one_process_in_either_order(
    alone: dict[str, Ran], four: dict[str, Ran], name: str
) -> None:
    four[name].equals(alone[""], name)


@pytest.mark.thorough(6)
def test_every_step_equals_one_process_in_every_balance(
    alone: dict[str, Ran], tmp_path: Path
) -> None:
    given = {n: [DROPPED, *changes] for n, changes in FOUR.items() if "," in n}
    for name, ran in run_all(tmp_path, 4, given).items():
        ran.equals(alone["padded" if "padded" in name else ""], name)


@pytest.mark.parametrize("near", some(["ring", "heads"], 1))
def test_a_saved_run_goes_on_in_the_other_order(
    tmp_path: Path, alone: dict[str, Ran], four: dict[str, Ran], near: str
) -> None:
    saved = four[f"{near} near"].folder / "checkpoints" / "step-000001"
    other = "ring" if near == "heads" else "heads"
    resume = {"checkpoint": {"resume": str(saved)}}
    (ran,) = run_all(tmp_path, 4, {"on": [DROPPED, parallel(other, weight=2), resume]}).values()
    assert [row.step for row in ran.rows] == [2, 3]
    ran.equals(alone[""], near)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("near", ["heads", "ring"])
@ranks(4)
def test_what_travels_in_a_step_is_what_the_plan_says(rank: int, near: str, mode: str) -> None:
    sizes = {"data": {"sequence_length": 32}, "train": {"global_batch": 2}}
    settings = config(parallel(near), again(mode=mode), sizes)
    session = Session.create(settings)
    session.trace.enabled = True
    ids = torch.randint(0, 200, (2, 32), generator=torch.Generator().manual_seed(0))
    layout = SequenceLayout.create(ids, rank=rank, size=4, ring=2, near=near)
    StepRunner(session)._passes.train([layout], torch.tensor(layout.total_valid_tokens))
    received = Counter[str]()
    for event in session.trace.events:
        if event.kind in ("A2A", "RING"):
            received[event.kind + ("" if event.kind == "A2A" else event.weight)] += event.nbytes
    # Of a ring of two, what one receives the other has sent.
    most = torch.tensor([received[name] for name in ("A2A", "RINGkv", "RINGgradients")])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    exchanged, kv, gradients = most.tolist()
    planned = make_plan(settings, 4).ranks[0].traffic
    assert [exchanged, kv + gradients] == [nbytes for _, nbytes in planned]
    assert min(exchanged, kv, gradients) > 0


@pytest.mark.parametrize(
    "names", [
        pytest.param(("ring near, a pipeline", "heads 2 x ring 4"), marks=pytest.mark.thorough(8)),
        pytest.param(("heads near, a pipeline", "heads 4 x ring 2"), marks=pytest.mark.thorough(8)),
    ],
    ids=" and ".join,
)  # fmt: skip
def test_eight_ranks_and_pipelines_of_two_stages_equal_one_process(
    tmp_path: Path, alone: dict[str, Ran], names: tuple[str, ...]
) -> None:
    given = {name: [DROPPED, *EIGHT[name]] for name in names}
    for name, ran in run_all(tmp_path, 8, given).items():
        ran.equals(alone["padded" if PADDED in EIGHT[name] else ""], name)
