"""Dropout drops the same values of every token on any mesh, with any activation checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.few import some
from tests.support.ranks import run_ranks
from tests.support.runs import Changes, Ran, config, run, run_all
from tests.support.sections import mesh_sections

DROPPED: Changes = {"model": {"dropout": 0.2}}
NONE: Changes = {"model": {"dropout": 0.0}}


def parallel(**degrees: Any) -> Changes:
    return mesh_sections(**degrees)


def again(**options: Any) -> Changes:
    return {"activation_checkpoint": options}


def parts(number: int) -> Changes:
    return {"train": {"micro_batches": number}}


ALONE = {
    "four micro-batches": [parts(4)],
    "full": [again(mode="full")],
    "reentrant": [parts(2), again(mode="full", reentrant=True)],
    "selective, tiles": [again(mode="selective", tiles=2)],
}
TWO = {
    "weight 2": [parallel(weight=2), parts(2), again(mode="full", fraction=0.5)],
    "sequence 2": [parallel(sequence=2, ring=1), again(mode="selective", tiles=2)],
    "ring 2": [parallel(sequence=2, ring=2, balance="zigzag")],
    "level ring 2": [parallel(sequence=2, ring=2, balance="level"), parts(2)],
    "weight 2, sequence 2": [parallel(weight=2, sequence=2), again(mode="full", offload="all")],
    "pipeline 2": [parallel(pipeline=2), parts(4), again(mode="full", fraction=0.5)],
    "documents padded": [parallel(weight=2, sequence=2), {"data": {"pack": False}}],
}
FOUR = {
    "weight 2, sequence 2, zero 1": [parallel(weight=2, sequence=2, optimizer_ranks=1), parts(2)],
    "pipeline 2, ring 2": [parallel(pipeline=2, weight=2, sequence=2, ring=2), parts(2)],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Runs on one process."""
    every: dict[str, list[Changes]] = {
        "plain": [{"checkpoint": {"every": 1}}], "documents padded": [{"data": {"pack": False}}],
        **ALONE,
    }  # fmt: skip
    runs = {name: [DROPPED, *changes] for name, changes in every.items()}
    return run_all(tmp_path_factory.mktemp("alone"), 1, runs)


@pytest.mark.thorough(2)
@pytest.mark.unmeasured
def test_dropout_takes_part_and_the_held_out_loss_has_none(
    alone: dict[str, Ran], tmp_path: Path
) -> None:
    same: Changes = {"optimizer": {"lr": 0.0}}
    runs = {"none": [NONE], "still": [DROPPED, same], "still, none": [NONE, same]}
    found = run_all(tmp_path, 1, runs)
    assert alone["plain"].rows[0].loss != pytest.approx(found["none"].rows[0].loss, rel=1e-6)
    still, other = found["still"].rows[-1], found["still, none"].rows[-1]
    assert still.eval_loss == other.eval_loss
    assert still.loss != other.loss


@pytest.mark.parametrize("name", ALONE)
def test_a_split_or_recomputed_step_drops_the_same(alone: dict[str, Ran], name: str) -> None:
    alone[name].equals(alone["plain"], name)


@pytest.mark.unmeasured
@pytest.mark.parametrize(("world", "runs"), some([(2, TWO), (4, FOUR)], 1), ids=["two", "four"])
def test_every_step_and_weight_equals_one_process_on_any_mesh(
    tmp_path: Path, alone: dict[str, Ran], world: int, runs: dict[str, list[Changes]]
) -> None:
    given = {name: [DROPPED, *changes] for name, changes in runs.items()}
    for name, ran in run_all(tmp_path, world, given).items():
        ran.equals(alone.get(name, alone["plain"]), name)


def test_a_run_that_goes_on_elsewhere_drops_what_it_would_have_dropped(
    tmp_path: Path, alone: dict[str, Ran]
) -> None:
    saved = alone["plain"].folder / "checkpoints" / "step-000001"
    resume = {"checkpoint": {"resume": str(saved)}}
    runs = {"elsewhere": [DROPPED, parallel(sequence=2, ring=2), parts(2), resume]}
    (ran,) = run_all(tmp_path, 2, runs).values()
    assert [row.step for row in ran.rows] == [2, 3]
    ran.equals(alone["plain"])


def compiled(rank: int, world_size: int, folder: str, settings: Any) -> None:
    compiler = torch.compile
    made = lambda function, **options: compiler(function, backend="aot_eager")  # noqa: E731
    torch.compile = made  # type: ignore[assignment]
    try:
        run(rank, world_size, [(settings, folder)])
    finally:
        torch.compile = compiler  # type: ignore[assignment]


@pytest.mark.thorough(19)
def test_compiled_blocks_drop_the_same(tmp_path: Path, alone: dict[str, Ran]) -> None:
    weights = {"weight_parallel": {"compile": True, "gather_before": "qkv"}}
    settings = config(DROPPED, parallel(weight=2), weights, again(mode="full", fraction=0.5))
    run_ranks(compiled, 2, str(tmp_path / "run"), settings, timeout=240)
    Ran(tmp_path / "run").equals(alone["plain"])
