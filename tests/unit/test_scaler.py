"""The dynamic loss scale, and which optimizers may be sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from internsp.optim import LossScaler
from internsp.optim.elementwise import require_elementwise, require_whole_matrix
from internsp.optim.group_state import kept_in_group
from internsp.optim.norm import clip_factor


def test_the_scale_halves_at_an_overflow_and_doubles_after_enough_good_steps() -> None:
    scaler = LossScaler(8.0, growth_interval=3, min_scale=2.0, max_scale=16.0)
    verdicts = [False, False, True, False, False, False, True, True, True]
    scales = []
    for overflow in verdicts + [False] * 12:
        scaler.update(overflow)
        scales.append(scaler.scale)
    assert scales[:9] == [8, 8, 4, 4, 4, 8, 4, 2, 2]  # an overflow restarts the count
    assert scales[9:] == [2, 2, 4, 4, 4, 8, 8, 8, 16, 16, 16, 16]
    assert scaler.skipped_steps == 4


def test_a_restored_scaler_goes_on_counting_where_it_was() -> None:
    first = LossScaler(4.0, growth_interval=3)
    for overflow in (True, False, False):
        first.update(overflow)
    second = LossScaler(1024.0, growth_interval=3)
    second.load_state_dict(first.state_dict())
    second.update(False)
    assert (second.scale, second.good_steps, second.skipped_steps) == (4.0, 0, 1)


def test_an_fp16_loss_is_scaled_in_fp32() -> None:
    scaled = LossScaler(65536.0).scaled(torch.tensor(3.0, dtype=torch.float16))
    assert scaled.dtype == torch.float32
    assert scaled.item() == 3 * 65536.0


@pytest.mark.parametrize(
    "settings",
    [
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"init_scale": 0.5},
        {"init_scale": 2.0**30},
    ],
)
def test_settings_with_which_the_scale_cannot_adapt_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="loss scale"):
        LossScaler(**settings)


class Lamb(torch.optim.Optimizer):
    """A step scaled by the parameter's norm."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.norm() / p.grad.norm() * p.grad


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.Muon, {"lr": 0.1}),
        (torch.optim.Adafactor, {}),
        (torch.optim.LBFGS, {}),
        (torch.optim.SparseAdam, {}),
        (Lamb, {}),
    ],
)
def test_an_optimizer_that_looks_at_whole_parameters_is_refused(
    cls: Any, settings: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=rf"{cls.__name__} is not one"):
        require_elementwise(cls, torch.device("cpu"), settings)


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.ASGD, {}),
    ],
)
def test_elementwise_optimizers_are_taken(cls: Any, settings: dict[str, Any]) -> None:
    require_elementwise(cls, torch.device("cpu"), settings)
    # Torch's own are known; a subclass is found so by experiment.
    subclass = type(cls.__name__, (cls,), {})
    require_elementwise(subclass, torch.device("cpu"), settings)
    assert kept_in_group(subclass, settings, torch.ones(1)) == {}


@pytest.mark.parametrize("cls", [torch.optim.Muon, torch.optim.Adafactor])
def test_steps_of_whole_matrices_depend_on_no_other_matrix(cls: Any) -> None:
    subclass = type(cls.__name__, (cls,), {})
    for one in (cls, subclass):
        require_whole_matrix(one, torch.device("cpu"), {})
        assert kept_in_group(one, {}, torch.ones(2, 2)) == {}


def test_wrong_settings_are_the_optimizers_own_error() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        require_elementwise(torch.optim.AdamW, torch.device("cpu"), {"lr": -1.0})


@pytest.mark.parametrize("norm", [0.0, 0.3, 1.0, 7.5, float("inf"), float("nan")])
def test_the_clip_factor_is_torchs(norm: float) -> None:
    gradient = torch.tensor([1.0], dtype=torch.float64)
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = gradient.clone()
    total = torch.tensor(norm, dtype=torch.float64)
    torch.nn.utils.clip_grads_with_norm_([parameter], 1.0, total)
    mine = torch.tensor([clip_factor(norm, 1.0)], dtype=torch.float64)
    assert torch.equal(mine, parameter.grad) or (mine.isnan() and parameter.grad.isnan())
    assert clip_factor(norm, None) == 1.0
