"""A run resumes with another learning rate, until its number of tokens, by command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from internsp.app.report.metrics import read_metrics
from tests.support.command import internsp

TEXT = Path(__file__).parents[1] / "data" / "text"
CONFIG = f"""
[model]
hidden_size = 32
layers = 2
[data]
source = "text"
paths = ["{TEXT}"]
sequence_length = 101
[optimizer]
lr = 1e-2
schedule = "constant"
warmup_steps = 0
[train]
steps = 2
global_batch = 4
eval_batches = 0
"""


@pytest.mark.slow(12)
def test_rates_change_as_declared_and_the_run_ends_by_tokens(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    internsp("train", "c.toml", cwd=tmp_path)
    # A step has about 390 tokens: four more reach 2,200.
    linear = ["--optimizer.schedule", "linear", "--optimizer.min_lr_ratio", "0"]
    other = ["--optimizer.lr", "1e-3", *linear, "--train.stop_after_tokens", "2200"]
    words = ("train", "c.toml", "--resume", "runs/run")
    said = internsp(*words, *other, cwd=tmp_path).stdout
    assert "optimizer.lr: 0.01 in the checkpoint, 0.001 from now on" in said
    assert 'optimizer.schedule: "constant" in the checkpoint, "linear" from now on' in said
    assert "train.stop_after_tokens: 0 in the checkpoint, 2200 from now on" in said
    rows = read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")
    totals = [row.total_tokens or 0 for row in rows]
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6]
    assert totals == [sum(row.tokens for row in rows[: n + 1]) for n in range(6)]
    assert totals[-1] >= 2200 > totals[-2]
    # As in a run that had these settings from its first step.
    rates = [1e-2, 1e-2, *(1e-3 * (1 - step / 6) for step in range(2, 6))]
    assert [row.lr for row in rows] == pytest.approx(rates)
    passes = [(row.epochs or {})[""] for row in rows]
    assert passes == pytest.approx([passes[0] * step for step in range(1, 7)])
    (shown,) = (line for line in said.splitlines() if line.startswith("step 6/6"))
    assert f"tokens {totals[-1]}  " in shown
    assert f"epoch {passes[-1]:.2f}" in shown
    said = internsp(*words, "--train.steps", "3", cwd=tmp_path).stdout
    assert "train.steps is reached already: no step is left" in said
    assert "finished after 6/6 steps" in said
    refused = internsp(*words, "--train.seed", "1", cwd=tmp_path, check=False)
    assert refused.returncode == 2
    assert "train.seed: 0 in the checkpoint, 1 now" in refused.stderr
