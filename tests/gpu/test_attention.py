"""On a GPU: attention's kernels in bf16 beside the formula in fp32."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from internsp.sp import AttentionMask, Documents
from internsp.sp.kernels import KERNELS, SdpaKernel
from internsp.sp.partial import BlockAttention, CudaFlash, EagerAttention, choose_lse_kernel
from internsp.sp.ranges import kernel_calls
from tests.unit.test_sp_part_kernels import CASES
from tests.unit.test_sp_ranges import drawn

CUDA = torch.device("cuda", 0)


def near(found: Tensor, wanted: Tensor) -> None:
    """Within the rounding of bf16."""
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert float(error) < 0.01


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_part_its_log_sum_exp_and_gradients_are_what_the_formula_says(
    rows: int, case: str
) -> None:
    n, m, causal, band = CASES[case]
    torch.manual_seed(0)
    sizes = [(rows, n, 4, 64), (rows, m, 2, 64), (rows, m, 2, 64)]
    q, k, v = (torch.randn(s, device=CUDA, dtype=torch.bfloat16).transpose(1, 2) for s in sizes)
    kernel = choose_lse_kernel(CUDA, q.dtype, 64, 64)
    assert isinstance(kernel, CudaFlash)
    out, lse = kernel.forward(q, k, v, causal, band, 0.1)
    wanted, sums = EagerAttention().forward(q, k, v, causal, band, 0.1)
    near(out, wanted)
    near(lse, sums)
    grad, merged = torch.randn_like(out), torch.randn_like(out)
    found = kernel.backward(grad, q, k, v, merged, sums + 0.7, causal, band, 0.1)
    right = EagerAttention().backward(grad, q, k, v, merged, sums + 0.7, causal, band, 0.1)
    for a, b in zip(found, right, strict=True):
        near(a, b)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("kernel", KERNELS[:-1], ids=[kernel.name for kernel in KERNELS[:-1]])
def test_packed_documents_are_each_attended_alone(kernel: object, window: int | None) -> None:
    missing = kernel.missing()  # type: ignore[attr-defined]
    if missing is not None:
        pytest.skip(missing)
    torch.manual_seed(0)
    mask = AttentionMask(True, window, Documents.create([[0, 100, 130], [0]], 300, CUDA))
    shapes = [(2, 300, 4, 64), (2, 300, 2, 64), (2, 300, 2, 64)]
    given = [torch.randn(s, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    wide = [x.detach().float().requires_grad_() for x in given]
    out = kernel(*given, (0, 0, 1, 1), mask, 0.1)  # type: ignore[operator]
    wanted = SdpaKernel()(*wide, (0, 0, 1, 1), mask, 0.1)
    near(out, wanted)
    grad = torch.randn_like(wanted)
    for a, b in zip(
        torch.autograd.grad(out, given, grad.to(out.dtype)),
        torch.autograd.grad(wanted, wide, grad),
        strict=True,
    ):
        near(a, b)


@pytest.mark.parametrize("number", range(30))
def test_parts_of_a_ring_merge_to_the_formula_over_all_keys(number: int) -> None:
    drawn_ranges, spec, length = drawn(random.Random(number))
    held = [ranges for ranges in drawn_ranges if ranges]
    torch.manual_seed(number)
    sizes = [(len(spec.documents), length, heads, 64) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(size, device=CUDA, dtype=torch.bfloat16) for size in sizes)
    for queries in held:
        rows = torch.cat([torch.arange(a, b, device=CUDA) for a, b in queries])
        found = []
        for kernel in (CudaFlash(), EagerAttention()):
            parts = BlockAttention(q[:, rows], 64, (0, 0, 1, 1), spec, 0.1)
            parts.kernel = kernel
            out = torch.zeros(len(q), len(rows), 4, 64, device=CUDA)
            lse = torch.full((len(q), 4, len(rows)), -torch.inf, device=CUDA)
            for keys in held:
                at = torch.cat([torch.arange(a, b, device=CUDA) for a, b in keys])
                calls = kernel_calls(queries, keys, spec)
                parts.forward(out, lse, k[:, at], v[:, at], calls)
            found += [out, lse]
        near(found[0], found[2])
        near(found[1], found[3])
