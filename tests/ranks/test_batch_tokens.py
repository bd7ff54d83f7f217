"""``train.batch_tokens``: the same rows, loss and weights in every step, on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import internsp
from internsp.app.data.batches import DataSource
from internsp.app.data.order import counted
from internsp.errors import ConfigError
from tests.support.runs import Changes, Ran, config, run_all
from tests.support.sections import mesh_sections

WANTED = {"packed": 300, "padded": 800}  # tokens: nine packed rows; three to five padded ones
TOKENS: Changes = {"train": {"batch_tokens": WANTED["packed"], "eval_batches": 0}}
PADDED: Changes = {
    "data": {"pack": False, "sequence_length": 400}, "train": {"batch_tokens": WANTED["padded"]},
}  # fmt: skip
TIED: Changes = {"model": {"tie_embeddings": True}}


def parallel(**degrees: Any) -> Changes:
    return mesh_sections(**degrees)


def parts(number: int, **more: Any) -> Changes:
    return {"train": {"micro_batches": number, **more}}


BY_ONE: Changes = parts(1, global_batch=1)  # one row per micro-batch
ALONE: dict[str, list[Changes]] = {
    "packed": [{"checkpoint": {"every": 1}}],
    "padded": [PADDED],
    "tied": [TIED],
    "packed, row by row": [BY_ONE],
    "padded, row by row": [PADDED, BY_ONE, {"weight_parallel": {"accumulation": "full"}}],
    "packed, more at once": [parts(1, global_batch=24)],
}
TWO: dict[str, list[Changes]] = {
    "packed, weight 2": [parallel(weight=2), parts(2)],
    "packed, two replicas": [parallel(weight=1), parts(4)],
    "packed, ring 2": [parallel(sequence=2, ring=2), parts(4)],
    "padded, weight 2, sequence 2": [PADDED, parallel(weight=2, sequence=2), parts(2)],
    "padded, weight 2": [PADDED, parallel(weight=2, optimizer_ranks=1), parts(1, global_batch=2)],
    "packed, pipeline 2": [parallel(pipeline=2), parts(4)],
    "padded, interleaved": [
        PADDED, parallel(pipeline=2), parts(2, global_batch=2), {"model": {"layers": 4}},
        {"pipeline": {"schedule": "InterleavedZeroBubble", "chunks": 2}},
    ],
    "tied, pipeline 2": [TIED, parallel(pipeline=2), parts(2, global_batch=2)],
}
FOUR: dict[str, list[Changes]] = {
    "packed, weight 2 of 4": [parallel(weight=2, sequence=1, optimizer_ranks=2), parts(2)],
    "packed, pipeline 2, two replicas": [parallel(pipeline=2, weight=1), parts(2)],
    "padded, weight 2, sequence 2 of 4": [PADDED, parallel(weight=2, sequence=2), parts(4)],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """A run on one process."""
    deeper: list[Changes] = [PADDED, {"model": {"layers": 4}}]
    runs = {name: [TOKENS, *changes] for name, changes in ALONE.items()}
    runs["padded, four blocks"] = [TOKENS, *deeper]
    return run_all(tmp_path_factory.mktemp("alone"), 1, runs)


@pytest.mark.parametrize("name", ["packed", "padded"])
def test_a_step_takes_rows_in_their_order_until_they_have_the_tokens(
    alone: dict[str, Ran], name: str
) -> None:
    settings = config(*ALONE[name])
    source = DataSource(settings.data, global_batch=1, seed=settings.train.seed)
    taken = total = 0
    for row in alone[name].rows:
        assert row.sequences is not None
        counts = [counted(source.row(taken + n)) for n in range(row.sequences)]
        assert row.tokens == sum(counts)
        assert sum(counts) >= WANTED[name] > sum(counts[:-1])
        taken, total = taken + row.sequences, total + row.tokens
        assert row.total_tokens == total
        assert row.epochs == source.epochs(taken)
    if name == "padded":
        assert len({row.sequences for row in alone[name].rows}) > 1


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", [name for name in ALONE if "," in name])
def test_micro_batches_of_any_size_give_the_mean_over_the_tokens(
    alone: dict[str, Ran], name: str
) -> None:
    alone[name].equals(alone[name.partition(",")[0]], name)


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("world", "runs"),
    [
        pytest.param(2, dict(list(TWO.items())[::2]), id="two"),
        pytest.param(
            2, dict(list(TWO.items())[1::2]), id="two, others", marks=pytest.mark.thorough(6)
        ),
        pytest.param(4, FOUR, id="four", marks=pytest.mark.thorough(10)),
    ],
)
def test_every_step_and_weight_equals_one_process_on_any_mesh(
    tmp_path: Path, alone: dict[str, Ran], world: int, runs: dict[str, list[Changes]]
) -> None:
    given = {name: [TOKENS, *changes] for name, changes in runs.items()}
    for name, ran in run_all(tmp_path, world, given).items():
        like = "padded, four blocks" if "interleaved" in name else name.partition(",")[0]
        ran.equals(alone[like], name)


def test_a_run_goes_on_at_the_row_that_comes_next(tmp_path: Path, alone: dict[str, Ran]) -> None:
    saved = alone["packed"].folder / "checkpoints" / "step-000001"
    resume: Changes = {"checkpoint": {"resume": str(saved)}}
    runs = {
        "elsewhere": [TOKENS, parallel(pipeline=2), parts(2), resume],
        "in batches": [parallel(weight=2), resume, {"train": {"steps": 2}}],
    }
    elsewhere, batches = run_all(tmp_path, 2, runs).values()
    assert [row.step for row in elsewhere.rows] == [2, 3]
    elsewhere.equals(alone["packed"])
    (row,) = batches.rows
    assert row.sequences is None
    source = DataSource(config().data, global_batch=1)
    first = alone["packed"].rows[0].sequences
    assert first is not None
    assert row.tokens == sum(counted(source.row(first + n)) for n in range(8))


def test_a_run_of_so_many_tokens_ends_with_the_step_that_reaches_them(tmp_path: Path) -> None:
    stop: Changes = {
        "train": {"stop_after_tokens": 900},
        "optimizer": {"schedule": "linear", "min_lr_ratio": 0.0},
    }  # fmt: skip
    (ran,) = run_all(tmp_path, 1, {"stop": [TOKENS, stop]}).values()
    rows = ran.rows
    totals = [row.total_tokens or 0 for row in rows]
    assert totals[-1] >= 900 > totals[-2]
    assert len(rows) == 3
    # The schedule's length is the number of steps estimated from the first sequences, here exact.
    assert [row.lr for row in rows] == pytest.approx([0.2, 0.2 * 2 / 3, 0.2 / 3])


def test_a_programs_own_batches_are_not_counted_out() -> None:
    settings = config(TOKENS, {"model": {"vocab_size": 257}})
    with pytest.raises(ConfigError, match=r"train.batch_tokens: a program's own data"):
        internsp.Trainer(settings, data=lambda mesh: iter([torch.zeros(8, 35, dtype=torch.int64)]))
