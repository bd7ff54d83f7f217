"""Runs of models with experts: the same bits twice and after a stop; the same in a pipeline."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from internsp.app.config import Config
from internsp.app.report.metrics import read_metrics
from internsp.app.train.run import train
from tests.support.ranks import ranks

TEXT = Path(__file__).parents[1] / "data" / "text"


def config(family: str, changes: dict[str, Any] | None = None, **checkpoint: Any) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "family": family, "hidden_size": 32, "layers": 2, "heads": 4, "experts": 4,
            "expert_size": 16, "balance_rate": 0.01,
        },
        "data": {"source": "text", "paths": [str(TEXT)], "sequence_length": 24, "held_out": 0},
        "parallel": {"expert": 2, "expert_weight": 1, "weight": 2},
        "weight_parallel": {"min_shard_elements": 128},
        "optimizer": {"lr": 3e-3, "warmup_steps": 1},
        "train": {
            "steps": 4, "global_batch": 4, "micro_batches": 2,
            "eval_batches": 0,
        },
        "activation_checkpoint": {"mode": "full"},
        "checkpoint": {"save": True, "every": 2} | checkpoint,
    }  # fmt: skip
    for name, values in (changes or {}).items():
        sections[name] |= values
    return Config.model_validate(sections)


def files(run: Path) -> dict[str, str]:
    """Hashes of what the ranks saved after the last step."""
    found = sorted((run / "checkpoints" / "step-000004").glob("rank-*.safetensors"))
    assert len(found) == 2
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in found}


def rows(run: Path) -> list[tuple[float, ...]]:
    return [
        (row.loss, row.grad_norm, row.expert_load, row.router_entropy)
        for row in read_metrics(run / "metrics.jsonl")
    ]


@pytest.mark.parametrize("family", ["mixtral", "deepseek"])
@ranks(2)
def test_a_run_gives_the_same_bits_again_and_after_a_stop(family: str, tmp_path: Path) -> None:
    for name in ("once", "again"):
        train(config(family), tmp_path / name)
    middle = tmp_path / "once" / "checkpoints" / "step-000002"
    train(config(family, resume=str(middle)), tmp_path / "resumed")
    dist.barrier()
    once, again, resumed = (rows(tmp_path / name) for name in ("once", "again", "resumed"))
    assert once == again
    assert once[2:] == resumed[-2:]
    assert files(tmp_path / "once") == files(tmp_path / "again") == files(tmp_path / "resumed")


@ranks(2)
def test_losses_of_routers_in_a_run_are_the_same_in_a_pipeline(tmp_path: Path) -> None:
    found = []
    for pipeline in (1, 2):
        degrees = {"pipeline": 2, "expert": 1, "weight": 1} if pipeline == 2 else {}
        for factor in (0.0, 3.0):
            model = {"auxiliary": factor, "z_loss": factor / 10}
            changes = {"model": model, "parallel": degrees}
            run = tmp_path / f"{pipeline} {factor}"
            train(config("mixtral", changes, save=False), run)
            dist.barrier()
            found.append(rows(run))
    without, wanted, _, staged = found
    for row, one in zip(staged, wanted, strict=True):
        assert row == pytest.approx(one, rel=1e-4)
    assert wanted[0][1] != pytest.approx(without[0][1], rel=0.01), "the control: without them"
