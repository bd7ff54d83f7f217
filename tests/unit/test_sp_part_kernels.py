"""Kernels of partial attention: by value, and the CUDA kernel's calls by torch's schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from internsp.sp import partial
from internsp.sp.partial import Band, BlockAttention, CpuFlash, CudaFlash, EagerAttention, LseKernel
from internsp.sp.ranges import BAND, MaskSpec, kernel_calls

FORWARD, BACKWARD = partial._CUDA_FLASH, partial._CUDA_FLASH_BACKWARD
ROWS, HEADS, KV, D, SCALE = 2, 4, 2, 8, 0.3


class Flash:
    """``aten::_flash_attention_forward`` and ``_backward`` on CUDA, written out: variable lengths,
    windows counted from the key that stands at the end, without a limit from the number of keys on,
    keys and values in groups.

    Each call is first made with tensors without memory, by torch's own operator, which refuses a
    wrong argument.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _seen(
        self, q0: int, q1: int, k0: int, k1: int, causal: bool, left: int, right: int
    ) -> Tensor:
        n, m = q1 - q0, k1 - k0
        # As the kernel reads them: a side as long as the keys is without a limit.
        left, right = (side if side < m else -1 for side in (left, right))
        ahead = torch.arange(m)[None, :] - torch.arange(n)[:, None] - (m - n)
        seen = torch.ones(n, m, dtype=torch.bool)
        if left >= 0:
            seen &= ahead >= -left
        if causal or right >= 0:
            seen &= ahead <= (0 if causal else right)
        return seen

    def _each(
        self, q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, sides: tuple[bool, int, int]
    ) -> Any:
        group = q.shape[1] // k.shape[1]
        for row in range(len(cu_q) - 1):
            q0, q1, k0, k1 = (int(x) for x in (*cu_q[row : row + 2], *cu_k[row : row + 2]))
            for head in range(q.shape[1]):
                yield (
                    slice(q0, q1),
                    slice(k0, k1),
                    head,
                    head // group,
                    self._seen(q0, q1, k0, k1, *sides),
                )

    def _known(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], told: Any) -> None:
        self.calls.append(name)
        bare = [
            x.to(x.dtype if x.dtype != torch.float64 else torch.float16).to("meta")
            if isinstance(x, Tensor) else x for x in args
        ]  # fmt: skip
        real(*bare, **told)
        tensors = [x for x in args if isinstance(x, Tensor) and x.dim() == 3]
        assert all(x.stride(-1) == 1 for x in tensors), "what the kernel demands"
        assert all(x.dtype == torch.int32 for x in args if isinstance(x, Tensor) and x.dim() == 1
                   and x.numel())  # fmt: skip

    def forward(self, *args: Any, **told: Any) -> tuple[Tensor, ...]:
        self._known("forward", FORWARD, args, told)
        q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug = args
        assert (dropout, debug) == (0.0, False)
        assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
        sides = causal, told.get("window_size_left", -1), told.get("window_size_right", -1)
        out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0])
        for mine, theirs, head, kv, seen in self._each(q, k, cu_q, cu_k, sides):
            scores = (q[mine, head] @ k[theirs, kv].T * told["scale"]).masked_fill(
                ~seen, -torch.inf
            )
            lse[head, mine] = scores.logsumexp(-1)
            out[mine, head] = scores.softmax(-1) @ v[theirs, kv]
        nothing = q.new_empty(0)
        return out, lse, nothing, nothing, nothing

    def backward(self, *args: Any, **told: Any) -> tuple[Tensor, ...]:
        self._known("backward", BACKWARD, args, told)
        grad, q, k, v, out, lse, cu_q, cu_k, _, _, dropout, causal, *_ = args
        assert dropout == 0.0
        assert lse.is_contiguous()
        sides = causal, told.get("window_size_left", -1), told.get("window_size_right", -1)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for mine, theirs, head, kv, seen in self._each(q, k, cu_q, cu_k, sides):
            scores = (q[mine, head] @ k[theirs, kv].T * told["scale"]).masked_fill(
                ~seen, -torch.inf
            )
            shares = (scores - lse[head, mine][:, None]).exp()
            inner = (grad[mine, head] * out[mine, head]).sum(-1, keepdim=True)
            slopes = shares * (grad[mine, head] @ v[theirs, kv].T - inner) * told["scale"]
            dq[mine, head] += slopes @ k[theirs, kv]
            dk[theirs, kv] += slopes.T @ q[mine, head]
            dv[theirs, kv] += shares.T @ grad[mine, head]
        return dq, dk, dv


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Flash:
    made = Flash()
    monkeypatch.setattr(partial, "_CUDA_FLASH", made.forward)
    monkeypatch.setattr(partial, "_CUDA_FLASH_BACKWARD", made.backward)
    return made


def made(n: int, m: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(ROWS, n, HEADS, D), (ROWS, m, KV, D), (ROWS, m, KV, D)]
    return [torch.randn(shape, dtype=torch.float64).transpose(1, 2) for shape in shapes]


CASES = {
    "all keys": (5, 9, False, None),
    "causal": (7, 7, True, None),
    "a window of a causal part": (7, 7, False, Band(3, True, 0)),
    "a window to both sides": (7, 7, False, Band(3, False, 0)),
    "keys before": (4, 6, False, Band(7, True, 8)),
    "keys before, to both sides": (4, 6, False, Band(7, False, 8)),
    "keys behind": (3, 3, False, Band(8, False, -7)),
    "more keys behind than queries": (2, 3, False, Band(4, False, -2)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", [CudaFlash(), CpuFlash()], ids=["cuda", "cpu"])
def test_a_part_and_its_gradients_are_what_the_formula_says(
    kernel: LseKernel, case: str, flash: Flash
) -> None:
    n, m, causal, band = CASES[case]
    q, k, v = made(n, m)
    out, lse = kernel.forward(q, k, v, causal, band, SCALE)
    wanted, sums = EagerAttention().forward(q, k, v, causal, band, SCALE)
    assert bool(sums.isfinite().all()), "a query sees no key: no part is such"
    torch.testing.assert_close(out, wanted, atol=1e-12, rtol=0)
    torch.testing.assert_close(lse, sums, atol=1e-12, rtol=0)
    # Of a merged attention: other output and log-sum-exp than the part's own.
    grad, merged, more = torch.randn_like(wanted), torch.randn_like(wanted), sums + 0.7
    found = kernel.backward(grad, q, k, v, merged, more, causal, band, SCALE)
    right = EagerAttention().backward(grad, q, k, v, merged, more, causal, band, SCALE)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    assert flash.calls == (["forward", "backward"] if isinstance(kernel, CudaFlash) else [])


@pytest.mark.parametrize("window", [None, 2, 5, 11])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_index", [(0, 0, 1, 1), (0, 1, 1, 1)], ids=["groups", "uneven"])
def test_ranges_merged_on_cuda_are_one_processs_attention(
    kv_index: tuple[int, ...], causal: bool, window: int | None, flash: Flash,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Two rows of several documents, of which this rank holds two ranges, and keys in two blocks:
    by value, and every part by the CUDA kernel."""
    monkeypatch.setattr(partial, "choose_lse_kernel", lambda *_: CudaFlash())
    documents, held = ((9, 15), (20, 4)), (((3, 8), (14, 22)), ((0, 3), (8, 14), (22, 24)))
    seen = MaskSpec(causal, window, documents)
    torch.manual_seed(1)
    whole = [torch.randn(2, 24, h, D, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    index = [torch.cat([torch.arange(a, b) for a, b in ranges]) for ranges in held]
    at = torch.arange(24)
    rows = []
    for row, lengths in enumerate(documents):
        number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        ahead = at[:, None] - at[None, :]
        sees = number[:, None] == number[None, :]
        sees &= (ahead >= 0) if causal else torch.ones_like(sees)
        sees &= ahead.abs() < (window or 99)
        q, k, v = (x[row] for x in whole)
        scores = torch.einsum("qhd,khd->hqk", q, k[:, list(kv_index)]) * SCALE
        shares = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        rows.append(torch.einsum("hqk,khd->qhd", shares, v[:, list(kv_index)]))
    wanted = torch.stack(rows)[:, index[0]]
    grad = torch.randn_like(wanted)
    right = torch.autograd.grad(wanted, whole, grad)
    q, k, v = (x.detach() for x in whole)
    attend = BlockAttention(q[:, index[0]], D, kv_index, seen, SCALE)
    out, lse = torch.zeros_like(wanted), torch.full((2, 4, len(index[0])), -torch.inf).double()
    calls = [kernel_calls(held[0], block, seen) for block in held]
    assert window != 5 or any(part.kind == BAND for each in calls for part in each)
    for each, there in zip(calls, index, strict=True):
        attend.forward(out, lse, k[:, there], v[:, there], each)
    torch.testing.assert_close(out, wanted, atol=1e-12, rtol=0)
    dq, dk, dv = torch.zeros_like(q[:, index[0]]), torch.zeros_like(k), torch.zeros_like(v)
    for each, there in zip(calls, index, strict=True):
        sums = [torch.zeros_like(x[:, there]) for x in (k, v)]
        attend.backward(grad, out, lse, k[:, there], v[:, there], each, dq, *sums)
        dk[:, there] += sums[0]
        dv[:, there] += sums[1]
    torch.testing.assert_close(dq, right[0][:, index[0]], atol=1e-12, rtol=0)
    torch.testing.assert_close(dk, right[1], atol=1e-12, rtol=0)
    torch.testing.assert_close(dv, right[2], atol=1e-12, rtol=0)
    assert flash.calls.count("forward") == sum(map(len, calls)) == flash.calls.count("backward")


def test_each_device_and_dtype_has_the_kernel_that_can_do_it() -> None:
    cuda, host = torch.device("cuda"), torch.device("cpu")
    assert isinstance(partial.choose_lse_kernel(cuda, torch.bfloat16, 128, 128), CudaFlash)
    assert isinstance(partial.choose_lse_kernel(cuda, torch.float32, 128, 128), EagerAttention)
    assert isinstance(partial.choose_lse_kernel(cuda, torch.bfloat16, 100, 100), EagerAttention)
    assert isinstance(partial.choose_lse_kernel(host, torch.float64, 100, 100), CpuFlash)
    assert isinstance(partial.choose_lse_kernel(host, torch.float64, 64, 32), EagerAttention)
