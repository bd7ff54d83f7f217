"""Learning rates: each schedule compared with torch's, and at both ends of a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torchs

from internsp.app.config import Config
from internsp.app.session.optimizers import rate_factor

STEPS, WARMUP, DECAY, FLOOR = 30, 5, 8, 0.1


def factors(**optimizer: Any) -> list[float]:
    given = {"warmup_steps": WARMUP, "min_lr_ratio": FLOOR, **optimizer}
    config = Config.model_validate({"train": {"steps": STEPS}, "optimizer": given})
    factor = rate_factor(config, STEPS)
    return [factor(step) for step in range(STEPS)]


def of_torch(schedule: str) -> list[float]:
    """The same from torch's schedulers, one after another, at a rate of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    left = STEPS - WARMUP
    warm = torchs.LinearLR(optimizer, 1 / WARMUP, 1.0, WARMUP - 1)
    after: dict[str, list[tuple[int, Any]]] = {
        "constant": [(WARMUP, lambda: torchs.ConstantLR(optimizer, 1.0, 1))],
        "linear": [(WARMUP, lambda: torchs.LinearLR(optimizer, 1.0, FLOOR, left))],
        "cosine": [(WARMUP, lambda: torchs.CosineAnnealingLR(optimizer, left, FLOOR))],
        "wsd": [
            (WARMUP, lambda: torchs.ConstantLR(optimizer, 1.0, 1)),
            (STEPS - DECAY, lambda: torchs.LinearLR(optimizer, 1.0, FLOOR, DECAY)),
        ],
    }
    parts = [(at, make()) for at, make in after[schedule]]
    whole = torchs.SequentialLR(
        optimizer, [warm, *(part for _, part in parts)], milestones=[at for at, _ in parts]
    )
    found = []
    for _ in range(STEPS):
        found.append(float(whole.get_last_lr()[0]))
        optimizer.step()
        whole.step()
    return found


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_rates_are_those_of_torchs_schedulers(schedule: str) -> None:
    more = {"decay_steps": DECAY} if schedule == "wsd" else {}
    assert factors(schedule=schedule, **more) == pytest.approx(of_torch(schedule), rel=1e-12)


def test_the_inverse_square_root_falls_from_the_warm_up_and_not_below_the_floor() -> None:
    found = factors(schedule="inverse_sqrt", min_lr_ratio=0.5)
    assert found[:WARMUP] == [(step + 1) / WARMUP for step in range(WARMUP)]
    wanted = [max(math.sqrt(WARMUP / (step + 1)), 0.5) for step in range(WARMUP, STEPS)]
    assert found[WARMUP:] == pytest.approx(wanted)
    assert found[-1] == 0.5 < found[WARMUP] < 1.0


def test_a_decay_longer_than_the_run_begins_after_the_warm_up() -> None:
    assert factors(schedule="wsd", decay_steps=1000) == factors(schedule="linear")
    assert factors(schedule="wsd")[-4:] == [1.0, *factors(schedule="wsd", decay_steps=3)[-3:]]


def test_no_warm_up_begins_at_the_highest_rate() -> None:
    for schedule in ("constant", "linear", "cosine", "wsd", "inverse_sqrt"):
        assert factors(schedule=schedule, warmup_steps=0)[0] == 1.0
