"""Attention of some queries over some keys, with the log-sum-exp of the scores, and its backward.

Results over different keys are merged by their log-sum-exps into exactly the result of one softmax
over all keys (arXiv 2112.05682). A backward that is given the merged output and log-sum-exp returns
the contribution of its keys to the gradients (arXiv 2310.01889).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from internsp.sp.kernels import group_size, match_kv_heads, row_starts
from internsp.sp.ranges import BAND, CAUSAL, KernelCall, MaskSpec

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CUDA_FLASH = torch.ops.aten._flash_attention_forward
_CUDA_FLASH_BACKWARD = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True)
class Band:
    """The mask of a kernel call with a window: a query sees near keys, and at least one.

    Attributes:
        window, causal: as in :class:`internsp.sp.ranges.MaskSpec`.
        distance: position of the first query minus that of the first key.
    """

    window: int
    causal: bool
    distance: int

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        """``[n, m]`` in the dtype of ``q``, added to the scores: 0, or -inf for a hidden key."""
        rows = torch.arange(q.shape[2], device=q.device) + self.distance
        distance = rows[:, None] - torch.arange(k.shape[2], device=q.device)[None, :]
        hidden = distance.abs() >= self.window
        if self.causal:
            hidden |= distance < 0
        return q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)

    def window_sides(self, n: int, m: int) -> tuple[int, int]:
        """The left and right window sizes for flash attention with ``n`` queries and ``m`` keys.

        Flash attention counts both from key ``i + m - n`` for query ``i``, and takes a side as long
        as the keys for no limit: in a call of :func:`internsp.sp.ranges.kernel_calls` it is none.
        Neither is negative, since the first query and the last query see a key at the far end.
        """
        shift = m - n - self.distance
        right = 0 if self.causal else self.window - 1
        return max(self.window - 1 + shift, 0), max(right - shift, 0)


class LseKernel(Protocol):
    """Attention of one part: ``q [b, h, n, d]``, ``k [b, kv, m, d]``, ``v [b, kv, m, d of v]``."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, band: Band | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output ``[b, h, n, d of v]`` and log-sum-exp ``[b, h, n]``.

        Args:
            causal: ``n == m``, and a query sees the keys up to its own position.
            band: the mask of a window; None where all keys, or all up to a position, are seen.
        """

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, band: Band | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of ``q``, ``k``, ``v``; ``out`` and ``lse`` are those over all keys."""


class CpuFlash:
    """torch's flash attention for CPUs: every float type, grouped heads, a bias."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, band: Band | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`LseKernel`."""
        bias = None if band is None else band.bias(q, k)
        out, lse = _FLASH(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, band: Band | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See :class:`LseKernel`."""
        bias = None if band is None else band.bias(q, k)
        gradients: tuple[Tensor, Tensor, Tensor] = _FLASH_BACKWARD(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
        return gradients


class CudaFlash:
    """torch's flash attention on CUDA, in half precision: grouped heads, windows without a bias.

    The variable-length form, with rows packed one after another without padding: the operator that
    ``torch.nn.attention.varlen`` calls. Its backward accepts a merged log-sum-exp.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, band: Band | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`LseKernel`."""
        out, lse, *_ = _CUDA_FLASH(
            _packed(q), _packed(k), _packed(v), *_lengths(q, k), 0.0, causal, False,
            scale=scale, **_window_arguments(q, k, band),
        )  # fmt: skip
        return _unpacked(out, q), lse.unflatten(1, (q.shape[0], -1)).transpose(0, 1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, band: Band | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See :class:`LseKernel`."""
        none = q.new_empty(0, dtype=torch.int64)  # random state of dropout, which is not used
        gradients = _CUDA_FLASH_BACKWARD(
            _packed(grad), _packed(q), _packed(k), _packed(v), _packed(out),
            lse.transpose(0, 1).flatten(1).contiguous(), *_lengths(q, k), 0.0, causal, none, none,
            scale=scale, **_window_arguments(q, k, band),
        )  # fmt: skip
        dq, dk, dv = (_unpacked(x, like) for x, like in zip(gradients, (q, k, v), strict=True))
        return dq, dk, dv


def _packed(x: Tensor) -> Tensor:
    """``[b, h, n, d]`` as ``[b * n, h, d]``; a view if ``b`` is 1."""
    return x.transpose(1, 2).flatten(0, 1)


def _unpacked(x: Tensor, like: Tensor) -> Tensor:
    """``[b * n, h, d]`` in the shape of ``like``, ``[b, h, n, d]``."""
    return x.unflatten(0, (like.shape[0], -1)).transpose(1, 2)


def _lengths(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Starts of the rows of queries and of keys, and the lengths of both."""
    rows, n, m = q.shape[0], q.shape[2], k.shape[2]
    return row_starts(rows, n, q.device), row_starts(rows, m, q.device), n, m


def _window_arguments(q: Tensor, k: Tensor, band: Band | None) -> dict[str, int]:
    if band is None:
        return {}
    left, right = band.window_sides(q.shape[2], k.shape[2])
    return {"window_size_left": left, "window_size_right": right}


class EagerAttention:
    """Attention with all scores in memory: any device and dtype; ``v`` may have another depth."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, band: Band | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`LseKernel`."""
        scores = _scores(q, _repeat_kv(k, q.shape[1]), causal, band, scale)
        lse = scores.logsumexp(-1)
        probabilities = (scores - lse.unsqueeze(-1)).exp()
        return probabilities @ _repeat_kv(v, q.shape[1]).to(probabilities.dtype), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, band: Band | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See :class:`LseKernel`."""
        heads, kv = q.shape[1], k.shape[1]
        k, v = _repeat_kv(k, heads), _repeat_kv(v, heads)
        probabilities = (_scores(q, k, causal, band, scale) - lse.unsqueeze(-1)).exp()
        grad = grad.to(probabilities.dtype)
        dv = probabilities.transpose(-1, -2) @ grad
        row_sums = (grad * out.to(grad.dtype)).sum(-1, keepdim=True)
        dscores = probabilities * (grad @ v.to(grad.dtype).transpose(-1, -2) - row_sums) * scale
        dq, dk = dscores @ k.to(grad.dtype), dscores.transpose(-1, -2) @ q.to(grad.dtype)
        return dq, _sum_repeated(dk, kv), _sum_repeated(dv, kv)


def choose_lse_kernel(device: torch.device, dtype: torch.dtype, d: int, d_of_v: int) -> LseKernel:
    """The kernel for parts."""
    half = dtype in (torch.float16, torch.bfloat16) and d <= 256 and d % 8 == 0
    if d == d_of_v and device.type in ("cpu", "meta"):  # meta: a plan
        return CpuFlash()
    if d == d_of_v and device.type == "cuda" and half:
        return CudaFlash()
    return EagerAttention()


class BlockAttention:
    """Attention of one rank's queries to blocks of keys that arrive one by one.

    Args:
        q: ``[B, n, h, d]``.
        d_of_v: elements of a head of the values.
        kv_index: the key/value head of each query head.
        spec: which keys a query sees.
        scale: of the scores.
    """

    def __init__(
        self, q: Tensor, d_of_v: int, kv_index: tuple[int, ...], spec: MaskSpec, scale: float
    ) -> None:
        self.q, self.kv_index, self.spec, self.scale = q, kv_index, spec, scale
        self.kernel = choose_lse_kernel(q.device, q.dtype, q.shape[3], d_of_v)
        self.acc_dtype = torch.promote_types(q.dtype, torch.float32)

    def forward(
        self, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, calls: tuple[KernelCall, ...]
    ) -> None:
        """Compute ``calls`` and merge them into ``out [B, n, h, d of v]`` and ``lse [B, h, n]``.

        Both have ``acc_dtype`` and initially hold 0 and -inf.

        Args:
            k, v: ``[B, m, kv, ...]``; the calls' keys are offsets into them.
        """
        for call in calls:
            q, keys, values, causal, band = self._kernel_inputs(k, v, call)
            call_out, call_lse = self.kernel.forward(q, keys, values, causal, band, self.scale)
            rows, here = _row_slice(call), slice(*call.q)
            total, lse_slice = out[rows, here].transpose(1, 2), lse[rows, :, here]
            merged = torch.logaddexp(lse_slice, call_lse.to(lse_slice.dtype))
            total.mul_((lse_slice - merged).exp_().unsqueeze(-1))
            total.addcmul_(call_out.to(total.dtype), (call_lse - merged).exp_().unsqueeze(-1))
            lse_slice.copy_(merged)

    def backward(
        self, grad: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor,
        calls: tuple[KernelCall, ...], dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        """Add the gradients of ``calls`` to ``dq``, ``dk`` and ``dv``, which have ``acc_dtype``."""
        for call in calls:
            q, keys, values, causal, band = self._kernel_inputs(k, v, call)
            rows, here, there = _row_slice(call), slice(*call.q), slice(*call.k)
            of_q, of_k, of_v = self.kernel.backward(
                grad[rows, here].transpose(1, 2), q, keys, values,
                out[rows, here].transpose(1, 2), lse[rows, :, here], causal, band, self.scale,
            )  # fmt: skip
            dq[rows, here] += of_q.transpose(1, 2)
            self._add_kv_gradient(dk[rows, there], of_k.transpose(1, 2))
            self._add_kv_gradient(dv[rows, there], of_v.transpose(1, 2))

    def _kernel_inputs(
        self, k: Tensor, v: Tensor, call: KernelCall
    ) -> tuple[Tensor, Tensor, Tensor, bool, Band | None]:
        """The arguments of the kernel, without ``scale``."""
        rows, there = _row_slice(call), slice(*call.k)
        keys, values, _ = match_kv_heads(k[rows, there], v[rows, there], self.kv_index)
        band = None
        if call.kind == BAND:
            assert self.spec.window is not None, "only a window makes a band"
            band = Band(self.spec.window, self.spec.causal, call.distance)
        q, keys, values = (x.transpose(1, 2) for x in (self.q[rows, slice(*call.q)], keys, values))
        return q, keys, values, call.kind == CAUSAL, band

    def _add_kv_gradient(self, total: Tensor, gradient: Tensor) -> None:
        """Add a kernel's gradient of keys or values to ``total``, head by head."""
        if group_size(self.kv_index, total.shape[2]) is not None:
            total += gradient
        else:
            for query_head, head in enumerate(self.kv_index):
                total[:, :, head] += gradient[:, :, query_head]


def _row_slice(call: KernelCall) -> slice:
    return slice(None) if call.row < 0 else slice(call.row, call.row + 1)


def _scores(q: Tensor, k: Tensor, causal: bool, band: Band | None, scale: float) -> Tensor:
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(acc_dtype) @ k.to(acc_dtype).transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores if band is None else scores + band.bias(q, k)


def _repeat_kv(x: Tensor, heads: int) -> Tensor:
    """Repeat key/value heads: one for each query head."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _sum_repeated(gradient: Tensor, heads: int) -> Tensor:
    """The adjoint of :func:`_repeat_kv`."""
    return gradient.unflatten(1, (heads, -1)).sum(2)
