"""Lightning over a parallel model: losses, clipped steps and a resumed run as on one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.compare import check
from tests.support.ranks import run_ranks

pytest.importorskip("lightning", reason="the package lightning is not installed")

pytestmark = [pytest.mark.ranks, pytest.mark.clients, pytest.mark.unmeasured]
TEXT = Path(__file__).parents[1] / "data/text/01_why_cut_sequences.txt"
STEPS = 4
Run = tuple[list[float], dict[str, Tensor]]


def one(module: Any, world: int, folder: Path, resume: str | None = None) -> tuple[Run, str]:
    from examples.lightning_fit import fit

    newest = fit(module, world, STEPS, TEXT, str(folder), resume)
    weights = {
        name: (p.full_tensor() if module.weight else p).detach().clone()
        for name, p in module.model.named_parameters()
    }
    return (module.losses, weights), newest


def runs(rank: int, world: int, folder: Path) -> list[Run]:
    from examples.lightning_fit import Language

    if world > 1:  # as torchrun says it
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
        os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        os.environ |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1"}
    weight = world if world > 1 else 0
    found, _ = one(Language(weight, torch.float64), world, folder)
    half = str(folder / "step=2.ckpt")
    resumed, newest = one(Language(weight, torch.float64), world, folder / "again", half)
    assert newest == str(folder / "again/step=4.ckpt")
    return [found, resumed]


def test_a_fit_and_one_that_goes_on_from_a_checkpoint_are_those_of_one_process(
    tmp_path: Path,
) -> None:
    plain = run_ranks(runs, 1, tmp_path / "plain", timeout=240)[0]
    sharded = run_ranks(runs, 2, tmp_path / "two", timeout=240)[0]
    assert [len(losses) for losses, _ in plain] == [STEPS, STEPS - 2]
    assert plain[0][0][-1] < plain[0][0][0] - 0.5, "it learns, so that weights matter"
    # Lightning takes a resumed epoch's batches from the first: another loss, and optimizer state.
    assert plain[1][0] != plain[0][0][2:]
    for what, (losses, weights), (found, after) in zip(
        ("whole", "resumed"), plain, sharded, strict=True
    ):
        assert found == pytest.approx(losses, rel=1e-9), what
        check(after, weights, what, 1e-10)
