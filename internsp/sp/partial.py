"""Attention of some queries over some keys, with the log-sum-exp of the scores, and its backward.

Results over different keys are merged by their log-sum-exps into exactly what one softmax over all
keys gives (arXiv 2112.05682); a backward that is given the merged output and log-sum-exp gives each
part's share of the gradients (arXiv 2310.01889).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from internsp.sp.kernels import group_size
from internsp.sp.ranges import BAND, CAUSAL, Part, Seen

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CUDA_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
_CUDA_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward


class PartKernel(Protocol):
    """Attention of one part: ``q [b, h, n, d]``, ``k [b, kv, m, d]``, ``v [b, kv, m, d of v]``."""

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output ``[b, h, n, d of v]`` and log-sum-exp ``[b, h, n]``.

        Args:
            causal: ``n == m``, and a query sees the keys up to its own place.
            bias: ``[n, m]``, added to the scores: 0, or -inf where a key is not seen. Every query
                sees a key.
        """

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, bias: Tensor | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of ``q``, ``k`` and ``v``, of the whole attention's output and log-sum-exp."""


class CpuFlash:
    """torch's flash attention for CPUs: every float type, grouped heads, a bias."""

    name = "flash_for_cpu"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`PartKernel`."""
        out, lse = _FLASH(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, bias: Tensor | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See :class:`PartKernel`."""
        gradients: tuple[Tensor, Tensor, Tensor] = _FLASH_BACKWARD(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
        return gradients


class CudaFlash:
    """torch's flash attention on CUDA, in half precision and without a bias; grouped heads as
    :class:`Plain` has them, one by one."""

    name = "flash"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`PartKernel`."""
        k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
        out, lse, *_ = _CUDA_FLASH(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, bias: Tensor | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See :class:`PartKernel`."""
        heads = k.shape[1]
        k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
        none = q.new_empty(0, dtype=torch.int64)
        dq, dk, dv = _CUDA_FLASH_BACKWARD(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal,
            none, none, scale=scale,
        )  # fmt: skip
        return dq, _summed(dk, heads), _summed(dv, heads)


class Plain:
    """The formula itself, with all scores at once: any device and dtype, other dims of values."""

    name = "plain"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`PartKernel`."""
        scores = _scores(q, _repeated(k, q.shape[1]), causal, bias, scale)
        lse = scores.logsumexp(-1)
        shares = (scores - lse.unsqueeze(-1)).exp()
        return shares @ _repeated(v, q.shape[1]).to(shares.dtype), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, bias: Tensor | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See :class:`PartKernel`."""
        heads, kv = q.shape[1], k.shape[1]
        k, v = _repeated(k, heads), _repeated(v, heads)
        shares = (_scores(q, k, causal, bias, scale) - lse.unsqueeze(-1)).exp()
        grad = grad.to(shares.dtype)
        dv = shares.transpose(-1, -2) @ grad
        inner = (grad * out.to(grad.dtype)).sum(-1, keepdim=True)
        slopes = shares * (grad @ v.to(grad.dtype).transpose(-1, -2) - inner) * scale
        dq, dk = slopes @ k.to(grad.dtype), slopes.transpose(-1, -2) @ q.to(grad.dtype)
        return dq, _summed(dk, kv), _summed(dv, kv)


def choose(device: torch.device, dtype: torch.dtype, d: int, d_of_v: int) -> tuple[Any, Any]:
    """The kernels for parts without and with a bias."""
    if d != d_of_v:
        return Plain(), Plain()
    if device.type == "cpu":
        return CpuFlash(), CpuFlash()
    half = dtype in (torch.float16, torch.bfloat16) and d <= 256 and d % 8 == 0
    return (CudaFlash() if device.type == "cuda" and half else Plain()), Plain()


class Attend:
    """Attention of one rank's queries over blocks of keys that come one by one.

    Args:
        q: ``[B, n, h, d]``.
        reads: the key/value head of each query head.
    """

    def __init__(
        self, q: Tensor, d_of_v: int, reads: tuple[int, ...], seen: Seen, scale: float
    ) -> None:
        self.q, self.reads, self.seen, self.scale = q, reads, seen, scale
        self.without, self.biased = choose(q.device, q.dtype, q.shape[3], d_of_v)
        self.wide = torch.promote_types(q.dtype, torch.float32)

    def forward(
        self, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, parts: tuple[Part, ...]
    ) -> None:
        """Merge a block's ``parts`` into ``out [B, n, h, d of v]`` and ``lse [B, h, n]``.

        Both wide, and at the start zeros and -inf.

        Args:
            k, v: ``[B, m, kv, ...]``, and the parts' keys are counted in them.
        """
        for part in parts:
            kernel, q, keys, values, causal, bias = self._call(k, v, part)
            found, its = kernel.forward(q, keys, values, causal, bias, self.scale)
            rows, here = _rows(part), slice(*part.q)
            total, sums = out[rows, here].transpose(1, 2), lse[rows, :, here]
            merged = torch.logaddexp(sums, its.to(sums.dtype))
            total.mul_((sums - merged).exp_().unsqueeze(-1))
            total.addcmul_(found.to(total.dtype), (its - merged).exp_().unsqueeze(-1))
            sums.copy_(merged)

    def backward(
        self, grad: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor,
        parts: tuple[Part, ...], dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        """Add a block's share to ``dq``, ``dk`` and ``dv``, which are wide; the rest as given."""
        for part in parts:
            kernel, q, keys, values, causal, bias = self._call(k, v, part)
            rows, here, there = _rows(part), slice(*part.q), slice(*part.k)
            of_q, of_k, of_v = kernel.backward(
                grad[rows, here].transpose(1, 2), q, keys, values,
                out[rows, here].transpose(1, 2), lse[rows, :, here], causal, bias, self.scale,
            )  # fmt: skip
            dq[rows, here] += of_q.transpose(1, 2)
            self._read(dk[rows, there], of_k.transpose(1, 2))
            self._read(dv[rows, there], of_v.transpose(1, 2))

    def _call(self, k: Tensor, v: Tensor, part: Part) -> tuple[Any, ...]:
        """A kernel and what it is given."""
        rows, there = _rows(part), slice(*part.k)
        keys, values = k[rows, there], v[rows, there]
        if group_size(self.reads, k.shape[2]) is None:
            index = torch.tensor(self.reads, device=k.device)
            keys, values = keys.index_select(2, index), values.index_select(2, index)
        bias = band(part, self.seen, self.q) if part.kind == BAND else None
        kernel = self.without if bias is None else self.biased
        q = self.q[rows, slice(*part.q)]
        each = (x.transpose(1, 2) for x in (q, keys, values))
        return kernel, *each, part.kind == CAUSAL, bias

    def _read(self, total: Tensor, gradient: Tensor) -> None:
        """Add gradients of key/value heads as they were given to the kernel."""
        if group_size(self.reads, total.shape[2]) is not None:
            total += gradient
        else:
            index = torch.tensor(self.reads, device=total.device)
            total.index_add_(2, index, gradient.to(total.dtype))


def band(part: Part, seen: Seen, like: Tensor) -> Tensor:
    """``[n, m]`` in the dtype of ``like``: 0 where a query sees a key, else -inf."""
    assert seen.window is not None, "only a window makes a band"
    rows = torch.arange(part.q[1] - part.q[0], device=like.device) + part.distance
    distance = rows[:, None] - torch.arange(part.k[1] - part.k[0], device=like.device)[None, :]
    hidden = distance.abs() >= seen.window
    if seen.causal:
        hidden |= distance < 0
    return like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _rows(part: Part) -> slice:
    return slice(None) if part.row < 0 else slice(part.row, part.row + 1)


def _scores(q: Tensor, k: Tensor, causal: bool, bias: Tensor | None, scale: float) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores if bias is None else scores + bias


def _repeated(x: Tensor, heads: int) -> Tensor:
    """One key/value head for each query head."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _summed(gradient: Tensor, heads: int) -> Tensor:
    """The adjoint of :func:`_repeated`."""
    return gradient.unflatten(1, (heads, -1)).sum(2)
