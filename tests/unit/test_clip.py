"""``internsp.clip_grad_norm_`` is used like torch's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from internsp.optim import clip_grad_norm_
from internsp.optim.norm import _norms


def parameters(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    made = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for seed, parameter in enumerate(made):
        generator = torch.Generator().manual_seed(seed)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return [*made, nn.Parameter(torch.zeros(2))]  # one without a gradient


@pytest.mark.parametrize("bound", [0.5, 1e9, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_returns_a_tensor_and_clips_as_torch_does(dtype: torch.dtype, bound: float) -> None:
    shapes = ((3, 4), (5,), ())
    ours, theirs = parameters(dtype, shapes), parameters(dtype, shapes)
    found = clip_grad_norm_(iter(ours), bound)
    wanted = torch.nn.utils.clip_grad_norm_(theirs, bound)
    assert type(found) is Tensor
    assert found.shape == ()
    assert not found.requires_grad
    torch.testing.assert_close(found, wanted.double(), rtol=1e-6, atol=0)
    for mine, other in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert (found.item() > bound) == (bound == 0.5)


def test_a_single_parameter_is_taken_as_a_whole_and_not_row_by_row() -> None:
    one = parameters(torch.float64, ((3, 4),))[0]
    wanted = one.grad.norm()  # type: ignore[union-attr]
    assert clip_grad_norm_(one, 0.25) == pytest.approx(wanted.item(), rel=1e-12)
    assert one.grad.norm() == pytest.approx(0.25, rel=1e-5)  # type: ignore[union-attr]


def test_without_a_gradient_the_norm_is_zero() -> None:
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0


def test_a_bf16_gradient_is_scaled_by_the_exact_factor() -> None:
    one = parameters(torch.bfloat16, ((1000,),))[0]
    assert one.grad is not None
    before = one.grad.float()
    norm = clip_grad_norm_([one], 1.0)
    factor = (1 / (norm + 1e-6)).float()
    assert torch.equal(one.grad, (before * factor).bfloat16())
    assert not torch.equal(one.grad, (before * factor.bfloat16().float()).bfloat16())


@pytest.mark.parametrize(
    ("device", "dtype", "wide"),
    [("cpu", torch.float32, torch.float64), ("meta", torch.float32, torch.float32),
     ("meta", torch.float64, torch.float64)],
)  # fmt: skip
def test_a_device_adds_a_norm_in_the_dtype_of_the_gradient_and_the_host_in_fp64(
    device: str, dtype: torch.dtype, wide: torch.dtype
) -> None:
    gradient = torch.zeros(6, dtype=dtype, device=device)
    parts: Any = [SimpleNamespace(start=0, stop=2), SimpleNamespace(start=2, stop=6)]
    bucket: Any = SimpleNamespace(segments=parts, host_sum=None)
    norms = _norms(bucket, gradient)
    assert [norm.dtype for norm in norms] == [wide, wide]
    counted = torch.stack([torch.zeros((), dtype=torch.float64, device=device), *norms])
    assert counted.dtype == torch.float64  # their squares are added in it
