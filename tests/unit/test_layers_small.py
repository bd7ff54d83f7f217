"""RMSNorm and rotary embedding, by value."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from internsp.errors import MissingDependencyError
from internsp.layers.norm import RMSNorm
from internsp.layers.rotary import apply_rotary, rotary_tables


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def norm_with_weight(size: int, dtype: torch.dtype, **options: object) -> RMSNorm:
    norm = RMSNorm(size, 1e-3, dtype=dtype, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        norm.weight.copy_(1 + normal(size, seed=1))
    return norm


def test_rms_norm_and_its_gradients_equal_the_formula_in_fp64() -> None:
    norm = norm_with_weight(24, torch.float64)
    x = normal(2, 5, 24).requires_grad_()
    weight = norm.weight.detach().clone().requires_grad_()
    y, expected = norm(x), plain_norm(x, weight, 1e-3)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, expected, rtol=1e-14, atol=1e-14)
    probe = normal(2, 5, 24, seed=2)
    gradients = torch.autograd.grad((y * probe).sum(), (x, norm.weight))
    wanted = torch.autograd.grad((expected * probe).sum(), (x, weight))
    torch.testing.assert_close(gradients, wanted, rtol=1e-13, atol=1e-13)


def test_rms_norm_of_bf16_is_computed_in_fp32_and_rounded_once() -> None:
    norm = norm_with_weight(64, torch.bfloat16)
    x = 100 * normal(3, 64, dtype=torch.bfloat16)
    expected = plain_norm(x.float(), norm.weight.float(), 1e-3).bfloat16()
    y = norm(x)
    assert y.dtype == torch.bfloat16
    # fp32 sums in another order may rarely round differently.
    assert (y == expected).float().mean() > 0.98
    torch.testing.assert_close(y.float(), expected.float(), rtol=2**-7, atol=0)


def test_rms_norm_answers_in_the_dtype_of_its_input_when_the_weight_is_wider() -> None:
    y = norm_with_weight(16, torch.float32)(normal(2, 16, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16


def without_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)


def with_apex(monkeypatch: pytest.MonkeyPatch, **of_functions: object) -> None:
    """Modules like NVIDIA's, and the compiled extension's name."""
    for name, content in {
        "apex": {},
        "apex.normalization": {},
        "apex.normalization.fused_layer_norm": of_functions,
        "fused_layer_norm_cuda": {},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)


def test_apex_asked_for_by_name_and_missing_is_an_error_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_apex(monkeypatch)
    with pytest.raises(MissingDependencyError, match=r"github\.com/NVIDIA/apex.*unrelated"):
        RMSNorm(8, implementation="apex")


def test_the_other_project_named_apex_is_not_taken_for_nvidias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_apex(monkeypatch)
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.delitem(sys.modules, "apex.normalization")
    with pytest.raises(MissingDependencyError):
        RMSNorm(8, implementation="apex")
    assert RMSNorm(8, implementation="auto").implementation == "torch"


def test_an_nvidia_apex_too_old_to_have_the_norm_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_apex(monkeypatch, fused_layer_norm_affine=object)
    assert RMSNorm(8, implementation="auto").implementation == "torch"


def test_auto_takes_torch_without_apex_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_apex(monkeypatch)
    with caplog.at_level(logging.INFO, logger="internsp.layers.norm"):
        assert RMSNorm(8, implementation="auto").implementation == "torch"
    assert [record.message for record in caplog.records] == [
        "norm auto: torch (NVIDIA apex is not installed)"
    ]


def test_an_unknown_norm_is_an_error_that_names_the_choices() -> None:
    with pytest.raises(ValueError, match="'torch', 'apex' or 'auto', got 'layer'"):
        RMSNorm(8, implementation="layer")  # type: ignore[arg-type]


def test_apex_gets_a_weight_as_wide_as_its_input_and_its_answer_is_rounded_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[torch.dtype, torch.dtype, tuple[int, ...], float]] = []

    def kernel(x: Tensor, weight: Tensor, shape: tuple[int, ...], eps: float) -> Tensor:
        seen.append((x.dtype, weight.dtype, shape, eps))
        return plain_norm(x.to(weight.dtype), weight, eps)

    with_apex(monkeypatch, mixed_dtype_fused_rms_norm_affine=kernel)
    norm = norm_with_weight(16, torch.float32, implementation="auto")
    assert norm.implementation == "apex"
    x = normal(2, 16, dtype=torch.bfloat16)
    y = norm._fused(kernel, x, norm.weight)
    assert seen == [(torch.bfloat16, torch.float32, (16,), 1e-3)]
    assert torch.equal(y, plain_norm(x.float(), norm.weight, 1e-3).bfloat16())
    # A CPU tensor never reaches the CUDA kernel, as in apex itself.
    torch.testing.assert_close(norm(x), y, rtol=2**-7, atol=0)
    assert len(seen) == 1


def test_rotary_turns_pairs_of_channels_as_complex_numbers() -> None:
    x = normal(2, 7, 3, 8)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [5, 6, 0, 1, 2, 0, 1]])
    turned = apply_rotary(x, rotary_tables(positions, 8, 500.0, torch.float64))
    frequency = torch.tensor([500.0 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
    factor = torch.polar(torch.ones((), dtype=torch.float64), positions[..., None] * frequency)
    expected = torch.complex(x[..., :4], x[..., 4:]) * factor[:, :, None]
    assert turned.dtype == torch.float64
    torch.testing.assert_close(turned[..., :4], expected.real, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(turned[..., 4:], expected.imag, rtol=1e-13, atol=1e-13)


def test_rotary_scores_depend_on_the_distance_of_positions_only() -> None:
    q, k = normal(1, 1, 1, 16), normal(1, 1, 1, 16, seed=1)

    def score(at: int, other: int) -> Tensor:
        tables = [rotary_tables(torch.tensor([[p]]), 16, dtype=torch.float64) for p in (at, other)]
        return (apply_rotary(q, tables[0]) * apply_rotary(k, tables[1])).sum()

    torch.testing.assert_close(score(9, 4), score(1009, 1004), rtol=1e-11, atol=1e-11)
    assert (score(9, 4) - score(9, 5)).abs() > 1e-3


def test_rotary_tables_of_a_16_bit_model_are_fp32_and_exact_at_position_one_million() -> None:
    cos, sin = rotary_tables(torch.tensor([[1_000_003]]), 4, dtype=torch.bfloat16)
    assert cos.dtype == sin.dtype == torch.float32
    angles = torch.tensor([1_000_003.0, 1_000_003.0 / 100], dtype=torch.float64)
    torch.testing.assert_close(cos.flatten(), angles.cos().float(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(sin.flatten(), angles.sin().float(), rtol=1e-6, atol=1e-7)
    assert apply_rotary(normal(1, 1, 2, 4, dtype=torch.bfloat16), (cos, sin)).dtype == (
        torch.bfloat16
    )


def test_an_odd_head_dim_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match="even head_dim, got 5"):
        rotary_tables(torch.zeros(1, 1, dtype=torch.int64), 5)
