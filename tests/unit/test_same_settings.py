"""Which differences between the settings of ranks count."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from internsp.optim.same_settings import code_of, numbers_in

ADAM = {"lr": 1e-4, "betas": (0.9, 0.999), "fused": True, "foreach": None, "k": 3, "name": "a"}


def code(**changes: Any) -> float:
    return code_of(numbers_in([({"lr": 0.1}, ()), (ADAM | changes, ("k",))]))


@pytest.mark.parametrize(
    "same",
    [{"lr": math.nextafter(1e-4, 1)}, {"lr": torch.tensor(1e-4, dtype=torch.double)}, {"k": 4},
     {"name": "b"}, {"foreach": "auto"}, {"scale": math.nan}],
)  # fmt: skip
def test_last_bits_and_what_is_no_number_do_not_count(same: dict[str, Any]) -> None:
    assert abs(code(**same) - code()) < 1e-8


@pytest.mark.parametrize(
    "other",
    [{"lr": 1.00001e-4}, {"lr": 0.0}, {"lr": -1e-4}, {"betas": (0.9, 0.99901)}, {"fused": False},
     {"weight_decay": 1e-9}, {"betas": (0.9,)}],
)  # fmt: skip
def test_a_hundred_thousandth_of_any_setting_counts(other: dict[str, Any]) -> None:
    assert abs(code(**other) - code()) > 1e-6
