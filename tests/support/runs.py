"""Complete training runs compared with one process: every step's loss and the final weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from internsp.app.config import Config
from internsp.app.report.metrics import StepMetrics, read_metrics
from internsp.app.train.run import train
from tests.ranks.test_checkpoint_meshes import whole
from tests.support.compare import check
from tests.support.ranks import run_ranks

TEXT = Path(__file__).parents[1] / "data" / "text"
Changes = dict[str, dict[str, Any]]


def config(*changes: Changes) -> Config:
    """A tiny fp64 run on the committed text, saved at its end; ``changes`` by section."""
    sections: Changes = {
        "model": {
            "hidden_size": 22, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 6,
            "intermediate_size": 28, "norm_eps": 1e-2, "init_std": 0.05,
        },
        "data": {"source": "text", "paths": [str(TEXT)], "sequence_length": 35, "held_out": 0.1},
        "weight_parallel": {"min_shard_elements": 128},
        "optimizer": {"name": "sgd", "lr": 0.2, "momentum": 0.9, "warmup_steps": 0},
        "train": {
            "steps": 3, "global_batch": 8, "eval_batches": 1, "loss_chunk": 20,
            "log_every": 50, "dtype": "float64",
        },
    }  # fmt: skip
    for change in changes:
        for name, values in change.items():
            sections[name] = sections.get(name, {}) | values
    return Config.model_validate(sections)


class Ran:
    """The results of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def rows(self) -> list[StepMetrics]:
        return read_metrics(self.folder / "metrics.jsonl")

    def weights(self, step: int = 3) -> dict[str, Tensor]:
        """The final weights and optimizer state."""
        tensors = whole(self.folder / "checkpoints" / f"step-{step:06d}")
        return {name: value for name, value in tensors.items() if value.is_floating_point()}

    def equals(self, wanted: Ran, what: str = "", step: int = 3) -> None:
        """Check every step that was run here and the final state, at 1e-10."""
        others = {row.step: row for row in wanted.rows}
        assert self.rows[-1].step == step
        for row in self.rows:
            other = others[row.step]
            assert (row.tokens, row.sequences) == (other.tokens, other.sequences), what
            for kind in ("loss", "grad_norm", "eval_loss"):
                expected = getattr(other, kind)
                if expected is not None and getattr(row, kind) is not None:
                    found = getattr(row, kind)
                    assert found == pytest.approx(expected, rel=1e-10), (what, row.step, kind)
        check(self.weights(step), wanted.weights(step), what)


def run(rank: int, world_size: int, runs: list[tuple[Config, str]]) -> None:
    for settings, folder in runs:
        train(settings, Path(folder))


def run_all(folder: Path, world: int, runs: dict[str, list[Changes]]) -> dict[str, Ran]:
    """Run each configuration on ``world`` ranks, one after another."""
    folders = {name: folder / f"{world}-{number}" for number, name in enumerate(runs)}
    given = [(config(*changes), str(folders[name])) for name, changes in runs.items()]
    run_ranks(run, world, given, timeout=240)
    return {name: Ran(where) for name, where in folders.items()}
