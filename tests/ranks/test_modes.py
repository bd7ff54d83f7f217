"""Determinism and profiles of a run: on while it trains, off afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import internsp
from internsp.app.config import load_config
from internsp.app.process.modes import Profile
from internsp.errors import ConfigError
from tests.ranks.test_trainer import Tiny, loss, rows, sections
from tests.support.ranks import run_ranks


def data(mesh: internsp.ParallelMesh) -> Iterator[Tensor]:
    return (rows(step, mesh.data_rank, 4 // mesh.data) for step in range(3))


def trainer(folder: Path, train: dict[str, Any], own_loss: Any = loss) -> internsp.Trainer:
    given = sections(
        train={"eval_every": 0, **train}, checkpoint={"save": False, "every": 0},
        weight_parallel={"min_shard_elements": 16, "blocks": ["layers.*"], "gather_before": "qkv"},
        parallel={"weight": 2},
    )  # fmt: skip
    return internsp.Trainer(given, output=folder, model=Tiny(), loss=own_loss, data=data)


def without_a_deterministic_kernel(model: nn.Module, layout: internsp.SequenceLayout) -> Tensor:
    torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    return loss(model, layout)


def modes(rank: int, world: int, folder: str) -> list[bool]:
    torch.use_deterministic_algorithms(False)  # it is on in the ranks of tests
    found = []
    for number, asked in enumerate((False, True)):
        run = trainer(Path(folder) / str(number), {"deterministic": asked},
                      without_a_deterministic_kernel)  # fmt: skip
        if asked:
            with pytest.raises(RuntimeError, match="does not have a deterministic"):
                run.train()
        else:
            run.train()
        found.append(torch.are_deterministic_algorithms_enabled())
    return found


def test_an_operation_without_a_deterministic_kernel_ends_a_deterministic_run_alone(
    tmp_path: Path,
) -> None:
    assert run_ranks(modes, 2, str(tmp_path)) == [[False, False]] * 2


def profiled(rank: int, world: int, folder: str) -> None:
    trainer(Path(folder), {"profile": "torch", "profile_steps": [2, 2]}).train()


def test_torchs_profiler_writes_the_chosen_steps_of_every_rank(tmp_path: Path) -> None:
    run_ranks(profiled, 2, str(tmp_path))
    for rank in range(2):
        content = json.loads((tmp_path / "traces" / f"torch-rank{rank}.json").read_text())
        names = [event.get("name", "") for event in content["traceEvents"]]
        # Three linear layers, of one step: its forward alone.
        assert names.count("aten::linear") == 3


def test_a_snapshot_of_memory_is_refused_on_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="history of CUDA's memory, and this run is on cpu"):
        Profile("memory", (2, 3), tmp_path, 0, torch.device("cpu"))


def test_a_snapshot_of_memory_is_of_the_chosen_steps_and_ends_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls, without a device: tests/gpu has a test on one."""
    calls: list[tuple[str, Any]] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(
        memory, "_record_memory_history", lambda enabled="all": calls.append(("record", enabled))
    )
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: calls.append(("dump", path)))
    profile = Profile("memory", (2, 3), tmp_path, 1, torch.device("cuda"))
    for step in (1, 2, 3, 4):
        profile.before_step(step)
        calls.append(("step", step))
        written = profile.after_step(step)
        assert bool(written) == (step == 3)
    profile.close()
    path = tmp_path / "memory-rank1.pickle"
    recorded = [("record", "all"), ("step", 2), ("step", 3), ("dump", str(path)), ("record", None)]
    assert calls == [("step", 1), *recorded, ("step", 4)]


@pytest.mark.parametrize(
    ("train", "wanted"),
    [
        ({"profile_steps": [5, 3]}, "the first step, 5, comes after the last, 3"),
        ({"profile": "torch", "steps": 2}, "the run ends with step 2, before the first"),
        ({"profile": True}, 'expected "none", "timeline", "torch" or "memory", got true'),
        ({"torch_profile": [2, 3]}, r'it is train\.profile = "torch" and train\.profile_steps now'),
    ],
)
def test_profiles_that_cannot_be_are_refused(train: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        load_config({"train": train})
