"""Classes of optimizers that would be stepped wrongly by slices, or matrix by matrix, are found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from internsp.optim.elementwise import (
    reproducible,
    require_elementwise,
    require_whole_matrix,
)
from internsp.optim.methods import methods_of

CPU = torch.device("cpu")


class CommonSize(SGD):
    """A step size of all gradients, kept in the group, that grows late if the rate is small
    (D-adaptation, Prodigy)."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.setdefault("size", 1e-6)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            steps = []
            for p in with_gradient:
                state = self.state[p]
                state.setdefault("first", p.clone())
                steps.append(((state["first"] - p) * p.grad).sum() / p.grad.abs().sum())
            group["size"] = max(group["size"], float(sum(steps)) / (1 + len(steps)) * 4)
            for p in with_gradient:
                p -= group["lr"] * group["size"] * p.grad.sign()


class CommonDecay(SGD):
    """Weights decay by the mean of all squares: one part in a hundred of a step (AdamS)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"]]
            mean = sum(g.square().sum() for g in gradients) / sum(g.numel() for g in gradients)
            for p in group["params"]:
                p -= group["lr"] * (p.grad.sign() + 1e-5 * p / mean.sqrt())


class Projected(SGD):
    """Leaves out what is along the weight, where its gradient is at right angles to it (AdamP)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            moment = self.state[p].setdefault("moment", torch.zeros_like(p))
            moment.mul_(0.9).add_(p.grad)
            cosine = torch.nn.functional.cosine_similarity(p.flatten(), p.grad.flatten(), 0)
            step = moment
            if p.dim() > 1 and cosine.abs() < 0.1 / math.sqrt(p.numel()):
                step = moment - p * (p * moment).sum() / (p * p).sum()
            p -= self.param_groups[0]["lr"] * step


class Masked(SGD):
    """Steps what was small when it was made (SaRA)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.small = {p: p.detach().abs() < 1e-3 for g in self.param_groups for p in g["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, small in self.small.items():
            p -= self.param_groups[0]["lr"] * p.grad * small


class Noisy(SGD):
    """An estimate from a random start differs by some ten thousandths (DASH)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            scale: Tensor = 1 + 1e-4 * torch.rand(())
            p -= self.param_groups[0]["lr"] * scale * p.grad / p.grad.norm()


@pytest.mark.parametrize("check", [require_elementwise, require_whole_matrix])
@pytest.mark.parametrize(
    ("cls", "rate"), [(CommonSize, 1.0), (CommonSize, 0.01), (CommonDecay, 0.01)]
)
def test_a_class_that_combines_parameters_is_found_at_any_rate(
    check: Callable[..., None], cls: type[SGD], rate: float
) -> None:
    with pytest.raises(TypeError, match=r"steps one parameter otherwise if there are others"):
        check(cls, CPU, {"lr": rate})


def test_a_class_that_looks_at_a_whole_parameter_now_and_then_is_not_elementwise() -> None:
    with pytest.raises(TypeError, match="a parameter split in two is stepped otherwise"):
        require_elementwise(Projected, CPU, {"lr": 0.01})
    require_whole_matrix(Projected, CPU, {"lr": 0.01})


def test_a_class_that_looks_at_values_when_it_is_made_steps_slices_and_no_whole_matrices() -> None:
    require_elementwise(Masked, CPU, {"lr": 0.01})
    with pytest.raises(TypeError, match="looks at a parameter's values when it is made"):
        require_whole_matrix(Masked, CPU, {"lr": 0.01})


def test_a_random_class_is_judged_alike_on_all_ranks_and_leaves_the_programs_state() -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with reproducible(CPU):
            require_whole_matrix(Noisy, CPU, {"lr": 0.01})
        assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("whole", [False, True])
def test_an_optimizers_classes_are_judged_with_one_seed(whole: bool) -> None:
    seeds = []

    class Drawing(Noisy if whole else SGD):  # type: ignore[misc]
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seeds.append(torch.initial_seed())
            super().step()

    torch.manual_seed(7)
    methods_of([{}], Drawing, whole, {"lr": 0.01}, CPU)
    assert (seeds[0], torch.initial_seed()) == (0, 7)
