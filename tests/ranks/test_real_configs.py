"""The configurations of real models in configs/: planned whole, and trained made small."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from internsp.app.config import Config, load_config
from internsp.app.plan.devices import device_named, on_device
from internsp.app.plan.screen import print_plan
from internsp.app.plan.searched import print_search
from internsp.app.report.metrics import read_metrics
from internsp.app.train.run import train
from tests.support.few import some
from tests.support.ranks import run_ranks

CONFIGS = Path(__file__).parents[2] / "configs"
TEXT = Path(__file__).parents[1] / "data"
# Parameters of the published models, in millions, and the device that the file names.
MODELS = {
    "internlm2_1_8b": (1889, "a100-80"),
    "internlm2_7b": (7738, "a100-80"),
    "internlm2_20b": (19861, "a100-80"),
    "llama3_8b": (8030, "h100-sxm"),
    "llama3_70b": (70554, "h100-sxm"),
    "qwen3_30b_a3b": (30532, "h100-sxm"),
    "deepseek_16b": (15404, "h100-sxm"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_fits_and_its_seconds_and_bound_are_said(name: str) -> None:
    millions, device = MODELS[name]
    path = CONFIGS / f"{name}.toml"
    config = load_config(path)
    ranks = config.launch.processes
    assert f"{ranks} x {device}" in path.read_text().splitlines()[0]
    given = on_device(config, device_named(device))
    out = io.StringIO()
    print_plan(given, ranks, Console(file=out, width=200), device=device_named(device))
    lines = out.getvalue().splitlines()
    count = int(lines[0].split()[0].replace(",", ""))
    assert count == pytest.approx(millions * 1e6, rel=0.001)
    assert lines[1].startswith("fits: ")
    assert any(line.startswith("a step takes about ") for line in lines)
    assert any("is bound by products" in line for line in lines)


@pytest.mark.parametrize("name", some([*MODELS], 1))
def test_a_real_models_layout_is_the_one_that_the_search_writes(name: str, tmp_path: Path) -> None:
    config, device = load_config(CONFIGS / f"{name}.toml"), device_named(MODELS[name][1])
    path = tmp_path / "best.toml"
    ranks = config.launch.processes
    print_search(on_device(config, device), ranks, device, Console(file=io.StringIO()), path)
    assert load_config(path) == config


def small(name: str) -> Config:
    """The configuration with few features, blocks and ranks, and what else it says."""
    config = load_config(CONFIGS / f"{name}.toml")
    stages = min(2, config.parallel.pipeline)
    changes: dict[str, dict[str, Any]] = {
        "model": {
            "hidden_size": 32, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate_size": 64,
            "vocab_size": 257,
        },
        "data": {"source": "text", "paths": [str(TEXT)], "sequence_length": 32},
        "parallel": {
            "weight": min(2, config.parallel.weight), "pipeline": stages, "device": "cpu",
        },
        "optimizer": {"warmup_steps": 1, "lr": 3e-3},
        "train": {
            "steps": 4, "global_batch": 8,
            "micro_batches": min(2 * stages, config.train.micro_batches),
            "eval_batches": 0, "log_every": 50,
        },
        "checkpoint": {"save": False},
        "launch": {"processes": 2},
    }  # fmt: skip
    if config.model.mixtures:
        latent = config.model.family == "deepseek"
        changes["model"] |= {
            "experts": 4,
            "top_k": 2,
            "head_dim": 8,
            "kv_heads": None if latent else 2,
        }
        changes["parallel"]["expert"] = min(2 // stages, config.parallel.expert)
    values = config.model_dump()
    for section, given in changes.items():
        values[section] |= given
    return Config.model_validate(values)


def run(rank: int, world_size: int, folder: str) -> None:
    for name in MODELS:
        train(small(name), Path(folder) / name)


def test_each_real_model_trains_made_small(tmp_path: Path) -> None:
    run_ranks(run, 2, str(tmp_path), timeout=200)
    for name in MODELS:
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        assert len(rows) == 4, name
        assert all(math.isfinite(row.loss) for row in rows), name
        assert rows[-1].loss < rows[0].loss, name
