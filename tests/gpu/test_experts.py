"""On a GPU: grouped products of experts in bf16, without a wait of the host."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from internsp import MixtureOfExperts
from internsp.layers import experts
from tests.gpu.test_host_waits import refused
from tests.gpu.test_streams import CUDA

WIDTH, HIDDEN, EXPERTS, TOKENS = 64, 96, 8, 200


def grouped(dtype: torch.dtype, **options: Any) -> MixtureOfExperts:
    torch.manual_seed(3)
    made = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, **options).to(CUDA, dtype)
    with torch.no_grad():
        made.router.weight[2] = -1e3  # no token wants it
    return made


def values(model: MixtureOfExperts, x: Tensor) -> dict[str, Tensor]:
    """Output and gradients, in fp32."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.float().square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, **found}


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_k": 2, "capacity_factor": 0.5}], ids=str)
def test_grouped_products_are_those_of_each_expert_alone(options: dict[str, Any]) -> None:
    """Rows behind the last group are not written: with a capacity some tokens have no expert."""
    here = grouped(torch.bfloat16, **options)
    x = torch.rand(TOKENS, WIDTH, device=CUDA).bfloat16()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    try:
        found = values(here, x)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts, "_GROUPED", ())
            wanted = values(copy.deepcopy(here), x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        apart = (found[name].double() - value.double()).norm() / value.double().norm()
        assert apart < 1e-2, f"{name}: {apart}"


def test_a_mixture_never_makes_the_host_wait() -> None:
    here = grouped(torch.bfloat16, top_k=2)
    x = torch.rand(TOKENS, WIDTH, device=CUDA).bfloat16()
    values(here, x)
    with refused():
        values(here, x)
