"""The capacity of experts: which tokens it drops, and that nothing else is touched."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from internsp.layers import MixtureOfExperts, Router, balance_experts
from internsp.values.meta import materialize_buffers
from tests.support.compare import check, close, gradients


def chosen(order: list[list[int]], **options: Any) -> tuple[Router, Tensor]:
    """Of tokens with these experts, the best first, what remains."""
    router = Router(4, 4, 2, **options)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    tokens = torch.zeros(len(order), 4)
    for row, experts in zip(tokens, order, strict=True):
        row[experts] = torch.tensor([2.0, 1.0])
    return router, router(tokens).index


def test_first_choices_and_early_tokens_have_a_place() -> None:
    order = [[0, 1], [0, 1], [2, 0], [1, 0]]  # two places each: ceil(1 * 2 * 4 / 4)
    router, found = chosen(order, capacity_factor=1.0)
    # Expert 0: the first choices of tokens 0 and 1. Expert 1: that of token 3, then token 0's.
    assert found.tolist() == [[0, 1], [0, -1], [2, -1], [1, -1]]
    assert router.dropped == 3
    assert router.load.tolist() == [4, 3, 1, 0], "what was chosen, which is what the balance is of"
    router.eval()
    assert router(torch.ones(4, 4)).index.min() >= 0, "an evaluation drops nothing"
    balance_experts(router)
    assert router.dropped == 0
    # Of five tokens four: ceil(1.25 * 2 * 5 / 4); of nothing, nothing.
    assert (chosen([[0, 1]] * 5, capacity_factor=1.25)[1] >= 0).sum() == 8
    assert (chosen([[0, 1]] * 5)[1] >= 0).all()
    assert chosen([], capacity_factor=1.0)[1].shape == (0, 2)


def test_a_capacity_below_nothing_is_refused() -> None:
    for factor in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"capacity_factor = {factor}: .* 0 to drop nothing"):
            Router(4, 4, 2, capacity_factor=factor)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "relu"}, "score = 'relu': give softmax or sigmoid"),
        ({"balance_rate": -0.1}, "balance_rate = -0.1: give a number of at least 0"),
        ({"auxiliary": math.nan}, "auxiliary = nan: give a number"),
        ({"z_loss": "0.1"}, "z_loss = '0.1': give a number"),
        ({"scale": math.inf}, "scale = inf: give a number"),
        ({"top_k": 2.0}, "top_k = 2.0: give a whole number of at least 1"),
        ({"hidden": 0}, "hidden = 0: give a whole number"),
        ({"experts": 0}, "experts = 0: give a whole number"),
        ({"shared": -1}, "shared = -1: give a whole number of at least 0"),
    ],
)
def test_options_that_mean_nothing_are_refused_when_the_layer_is_made(
    options: dict[str, Any], message: str
) -> None:
    sizes = {"width": 4, "hidden": 4, "experts": 4, "top_k": 2}
    with pytest.raises(ValueError, match=re.escape(message)):
        MixtureOfExperts(**sizes | options)


def test_a_layer_on_the_meta_device_gets_its_first_values_by_reset_parameters() -> None:
    torch.manual_seed(0)
    wanted = MixtureOfExperts(4, 3, 4, 2, balance_rate=0.1)
    with torch.device("meta"):
        by_context = MixtureOfExperts(4, 3, 4, 2, balance_rate=0.1)
    by_argument = MixtureOfExperts(4, 3, 4, 2, balance_rate=0.1, device="meta")
    assert not any(buffer.is_meta for buffer in by_argument.buffers()), "a run loads weights alone"
    for layer in (by_context, by_argument):
        assert all(parameter.is_meta for parameter in layer.parameters())
        materialize_buffers(layer, torch.device("cpu"))  # which only those of the first one need
        assert not any(buffer.any() for buffer in layer.buffers())
        layer.to_empty(device="cpu")
        torch.manual_seed(0)
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for name, value in wanted.state_dict().items():
            assert torch.equal(layer.state_dict()[name], value)
        assert layer(torch.ones(4)).shape == (4,), "of one token, as a linear layer's"


def test_rows_of_no_expert_reach_neither_result_nor_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """grouped_mm leaves them as they are in memory: here they are NaN."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(8, 8, 4, 2, capacity_factor=0.5)
    plain = copy.deepcopy(layer).double()  # products of another way
    real = F.grouped_mm

    def poisoned(rows: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        made = real(rows, weight, offs=offs).clone()
        made[int(offs[-1]) :] = torch.nan
        made.register_hook(
            lambda grad: grad.index_fill(0, torch.arange(int(offs[-1]), len(grad)), 9)
        )
        return made

    monkeypatch.setattr(F, "grouped_mm", poisoned)
    x = torch.randn(20, 8)
    given = [x.requires_grad_(), x.detach().double().requires_grad_()]
    made = [model(each) for model, each in zip((layer, plain), given, strict=True)]
    for out in made:
        out.square().sum().backward()
    assert layer.router.dropped == plain.router.dropped > 0
    close(made[0].detach().double(), made[1].detach(), "result", 1e-5)
    close(given[0].grad.double(), given[1].grad, "gradient", 1e-5)  # type: ignore[union-attr]
    check({n: g.double() for n, g in gradients(layer).items()}, gradients(plain), "", 1e-5)  # type: ignore[union-attr]
