"""Dropout and ``batch_tokens`` in a run that changes its mesh, by command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import internsp
from tests.support.runs import Ran

TEXT = Path(__file__).parents[1] / "data" / "text"
CONFIG = f"""
[model]
hidden_size = 22
layers = 3
heads = 4
head_dim = 6
norm_eps = 1e-2
dropout = 0.2
[data]
source = "text"
paths = ["{TEXT}"]
sequence_length = 200
held_out = 0.1
pack = false
[weight_parallel]
min_shard_elements = 128
[optimizer]
lr = 1e-2
schedule = "constant"
warmup_steps = 0
eps = 1e-3
[train]
steps = 4
batch_tokens = 900
global_batch = 4
micro_batches = 2
dtype = "float64"
deterministic = true
eval_batches = 1
"""


@pytest.mark.slow(25)
def test_a_run_on_two_meshes_is_the_run_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)

    def train(*words: str) -> str:
        return internsp("train", "c.toml", *words, cwd=tmp_path).stdout

    train("--train.name", "alone")
    cut = ["--parallel.weight", "2", "--parallel.sequence", "2", "--sequence.ring", "2"]
    begun = train(
        "--train.name", "cut", "--launch.processes", "2", *cut, "--train.steps", "2",
        "--activation_checkpoint.mode", "full",
    )  # fmt: skip
    assert "step 2/2" in begun
    went_on = train(
        "--train.name", "cut", "--launch.processes", "2", "--parallel.pipeline", "2",
        "--resume", "auto",
    )  # fmt: skip
    assert "step 3/4" in went_on
    cut_run, alone = (Ran(tmp_path / "runs" / name) for name in ("cut", "alone"))
    assert [row.step for row in cut_run.rows] == [1, 2, 3, 4]
    for row, wanted in zip(cut_run.rows, alone.rows, strict=True):
        assert (row.tokens, row.sequences, row.epochs) == (
            wanted.tokens, wanted.sequences, wanted.epochs,
        )  # fmt: skip
        assert row.loss == pytest.approx(wanted.loss, rel=1e-10)
        assert row.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-10)
        assert row.tokens >= 900
    assert cut_run.rows[-1].eval_loss == pytest.approx(alone.rows[-1].eval_loss, rel=1e-10)
    cut_run.equals(alone, step=4)
