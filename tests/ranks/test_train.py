"""Whole training runs: the same numbers on every mesh, resumed or not, in every precision."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from internsp.config import Config
from internsp.errors import ConfigError
from internsp.stop import StopRequest
from internsp.train.checkpoint import find
from internsp.train.metrics import StepMetrics, read_metrics
from internsp.train.run import train
from tests.support.ranks import run_ranks

TEXT = Path(__file__).parents[1] / "data"
Changes = dict[str, dict[str, Any]]


def config(**changes: dict[str, Any]) -> Config:
    """A tiny run on the committed text; ``changes`` by section."""
    sections: Changes = {
        "model": {"hidden_size": 32, "layers": 3, "heads": 4, "kv_heads": 2},
        "data": {"source": "text", "paths": [str(TEXT)], "sequence_length": 33, "held_out": 0.1},
        "weight_parallel": {"min_shard_elements": 128},
        "activation_checkpoint": {"mode": "full", "fraction": 0.5},
        "optimizer": {"lr": 3e-3, "warmup_steps": 5},
        "train": {
            "steps": 50, "global_batch": 4, "eval_batches": 2, "sample_bytes": 0, "loss_chunk": 20,
        },
        "checkpoint": {"save": False},
    }  # fmt: skip
    for name, values in changes.items():
        sections[name] = sections.get(name, {}) | values
    return Config.model_validate(sections)


def run(rank: int, world_size: int, runs: list[tuple[Config, str]]) -> None:
    for settings, folder in runs:
        train(settings, Path(folder))


def rows_of_runs(
    tmp_path: Path, world: int, changes: list[Changes]
) -> list[list[StepMetrics]]:
    """Run each change on ``world`` ranks; the metrics of each."""
    folders = [tmp_path / f"{world}-{i}" for i in range(len(changes))]
    runs = [(config(**c), str(f)) for c, f in zip(changes, folders, strict=True)]
    run_ranks(run, world, runs, timeout=240)
    return [read_metrics(f / "metrics.jsonl") for f in folders]


def gap(rows: list[StepMetrics], wanted: list[StepMetrics]) -> tuple[float, float]:
    """The largest relative differences of loss and gradient norm over all steps."""
    assert [r.step for r in rows] == [w.step for w in wanted]
    assert [r.tokens for r in rows] == [w.tokens for w in wanted]
    pairs = list(zip(rows, wanted, strict=True))
    return (
        max(abs(r.loss / w.loss - 1) for r, w in pairs),
        max(abs(r.grad_norm / w.grad_norm - 1) for r, w in pairs),
    )


OPTIMIZERS: list[Changes] = [
    {"optimizer": {"name": "adamw", "max_grad_norm": 1.0}},
    {"optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "max_grad_norm": 1.0}},
]
MESHES = [
    (2, {"weight": 2, "sequence": 2}),
    (4, {"weight": 2, "sequence": 4}),
    (4, {"weight": 4, "sequence": 1}),
    (4, {"weight": 1, "sequence": 2, "zero": 2}),
]


def test_fifty_steps_equal_one_process_on_every_mesh(tmp_path: Path) -> None:
    wanted = rows_of_runs(tmp_path, 1, OPTIMIZERS)
    for rows in wanted:
        assert rows[-1].loss < 0.75 * rows[0].loss
    for world in (2, 4):
        meshes = [parallel for size, parallel in MESHES if size == world]
        changes = [{**o, "parallel": parallel} for parallel in meshes for o in OPTIMIZERS]
        for i, rows in enumerate(rows_of_runs(tmp_path, world, changes)):
            loss, norm = gap(rows, wanted[i % 2])
            assert loss < 1e-5, changes[i]
            assert norm < 1e-4 if i % 2 == 0 else norm < 1e-5, changes[i]
            assert rows[-1].eval_loss == pytest.approx(wanted[i % 2][-1].eval_loss, rel=1e-5)
