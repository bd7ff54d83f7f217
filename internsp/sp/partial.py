"""Attention of some queries over some keys, with the log-sum-exp of the scores, and its backward.

Results over different keys are merged by their log-sum-exps into exactly what one softmax over all
keys gives (arXiv 2112.05682); a backward that is given the merged output and log-sum-exp gives each
part's share of the gradients (arXiv 2310.01889).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from internsp.sp.kernels import group_size
from internsp.sp.ranges import BAND, CAUSAL, Part, Seen

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CUDA_FLASH = torch.ops.aten._flash_attention_forward
_CUDA_FLASH_BACKWARD = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True)
class Band:
    """Which keys of a part its queries see: those near enough. Every query sees a key.

    Attributes:
        window: how near, see :class:`internsp.sp.ranges.Seen`.
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

    def sides(self, n: int, m: int) -> tuple[int, int]:
        """How far queries see to the left and to the right of their own key, as flash-attention
        counts: query ``i`` of ``n`` stands at key ``i + m - n``. Neither is negative, since the
        first query and the last one see a key at the far end."""
        shift = m - n - self.distance
        right = 0 if self.causal else self.window - 1
        return max(self.window - 1 + shift, 0), max(right - shift, 0)


class PartKernel(Protocol):
    """Attention of one part: ``q [b, h, n, d]``, ``k [b, kv, m, d]``, ``v [b, kv, m, d of v]``."""

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, band: Band | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output ``[b, h, n, d of v]`` and log-sum-exp ``[b, h, n]``.

        Args:
            causal: ``n == m``, and a query sees the keys up to its own place.
            band: where only some keys are seen.
        """

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, band: Band | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of ``q``, ``k`` and ``v``, of the whole attention's output and log-sum-exp."""


class CpuFlash:
    """torch's flash attention for CPUs: every float type, grouped heads, a bias."""

    name = "flash_for_cpu"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, band: Band | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`PartKernel`."""
        bias = None if band is None else band.bias(q, k)
        out, lse = _FLASH(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, band: Band | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See :class:`PartKernel`."""
        bias = None if band is None else band.bias(q, k)
        gradients: tuple[Tensor, Tensor, Tensor] = _FLASH_BACKWARD(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
        return gradients


class CudaFlash:
    """torch's flash attention on CUDA, in half precision: grouped heads as they are, windows
    without a bias. In its variable-length form, rows one after another and none padded; it is the
    operator that ``torch.nn.attention.varlen`` calls, with the backward that a merged
    log-sum-exp needs."""

    name = "flash"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, band: Band | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`PartKernel`."""
        out, lse, *_ = _CUDA_FLASH(
            _packed(q), _packed(k), _packed(v), *_lengths(q, k), 0.0, causal, False,
            scale=scale, **_sides(q, k, band),
        )  # fmt: skip
        return _rows_of(out, q), lse.unflatten(1, (q.shape[0], -1)).transpose(0, 1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, band: Band | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See :class:`PartKernel`."""
        none = q.new_empty(0, dtype=torch.int64)  # no dropout has drawn
        gradients = _CUDA_FLASH_BACKWARD(
            _packed(grad), _packed(q), _packed(k), _packed(v), _packed(out),
            lse.transpose(0, 1).flatten(1).contiguous(), *_lengths(q, k), 0.0, causal, none, none,
            scale=scale, **_sides(q, k, band),
        )  # fmt: skip
        dq, dk, dv = (_rows_of(x, like) for x, like in zip(gradients, (q, k, v), strict=True))
        return dq, dk, dv


def _packed(x: Tensor) -> Tensor:
    """``[b, h, n, d]`` as ``[b * n, h, d]``, of one row without a copy."""
    return x.transpose(1, 2).flatten(0, 1)


def _rows_of(x: Tensor, like: Tensor) -> Tensor:
    """``[b * n, h, d]`` as ``like``."""
    return x.unflatten(0, (like.shape[0], -1)).transpose(1, 2)


def _lengths(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Where rows begin, and how long they are, of queries and keys."""
    rows, n, m = q.shape[0], q.shape[2], k.shape[2]
    return _starts(rows, n, q.device), _starts(rows, m, q.device), n, m


@lru_cache(maxsize=256)
def _starts(rows: int, length: int, device: torch.device) -> Tensor:
    """``[rows + 1]`` int32; made once, since each is a copy to the device."""
    return torch.arange(0, (rows + 1) * length, max(length, 1), dtype=torch.int32, device=device)


def _sides(q: Tensor, k: Tensor, band: Band | None) -> dict[str, int]:
    if band is None:
        return {}
    left, right = band.sides(q.shape[2], k.shape[2])
    return {"window_size_left": left, "window_size_right": right}


class Plain:
    """The formula itself, with all scores at once: any device and dtype, other dims of values."""

    name = "plain"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, band: Band | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`PartKernel`."""
        scores = _scores(q, _repeated(k, q.shape[1]), causal, band, scale)
        lse = scores.logsumexp(-1)
        shares = (scores - lse.unsqueeze(-1)).exp()
        return shares @ _repeated(v, q.shape[1]).to(shares.dtype), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, band: Band | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See :class:`PartKernel`."""
        heads, kv = q.shape[1], k.shape[1]
        k, v = _repeated(k, heads), _repeated(v, heads)
        shares = (_scores(q, k, causal, band, scale) - lse.unsqueeze(-1)).exp()
        grad = grad.to(shares.dtype)
        dv = shares.transpose(-1, -2) @ grad
        inner = (grad * out.to(grad.dtype)).sum(-1, keepdim=True)
        slopes = shares * (grad @ v.to(grad.dtype).transpose(-1, -2) - inner) * scale
        dq, dk = slopes @ k.to(grad.dtype), slopes.transpose(-1, -2) @ q.to(grad.dtype)
        return dq, _summed(dk, kv), _summed(dv, kv)


def choose(device: torch.device, dtype: torch.dtype, d: int, d_of_v: int) -> PartKernel:
    """The kernel for parts."""
    half = dtype in (torch.float16, torch.bfloat16) and d <= 256 and d % 8 == 0
    if d == d_of_v and device.type == "cpu":
        return CpuFlash()
    if d == d_of_v and device.type == "cuda" and half:
        return CudaFlash()
    return Plain()


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
        self.kernel = choose(q.device, q.dtype, q.shape[3], d_of_v)
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
            q, keys, values, causal, band = self._call(k, v, part)
            found, its = self.kernel.forward(q, keys, values, causal, band, self.scale)
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
            q, keys, values, causal, band = self._call(k, v, part)
            rows, here, there = _rows(part), slice(*part.q), slice(*part.k)
            of_q, of_k, of_v = self.kernel.backward(
                grad[rows, here].transpose(1, 2), q, keys, values,
                out[rows, here].transpose(1, 2), lse[rows, :, here], causal, band, self.scale,
            )  # fmt: skip
            dq[rows, here] += of_q.transpose(1, 2)
            self._read(dk[rows, there], of_k.transpose(1, 2))
            self._read(dv[rows, there], of_v.transpose(1, 2))

    def _call(
        self, k: Tensor, v: Tensor, part: Part
    ) -> tuple[Tensor, Tensor, Tensor, bool, Band | None]:
        """What the kernel is given, without ``scale``."""
        rows, there = _rows(part), slice(*part.k)
        keys, values = k[rows, there], v[rows, there]
        if group_size(self.reads, k.shape[2]) is None:
            index = torch.tensor(self.reads, device=k.device)
            keys, values = keys.index_select(2, index), values.index_select(2, index)
        band = None
        if part.kind == BAND:
            assert self.seen.window is not None, "only a window makes a band"
            band = Band(self.seen.window, self.seen.causal, part.distance)
        q, keys, values = (x.transpose(1, 2) for x in (self.q[rows, slice(*part.q)], keys, values))
        return q, keys, values, part.kind == CAUSAL, band

    def _read(self, total: Tensor, gradient: Tensor) -> None:
        """Add gradients of key/value heads as they were given to the kernel."""
        if group_size(self.reads, total.shape[2]) is not None:
            total += gradient
        else:
            index = torch.tensor(self.reads, device=total.device)
            total.index_add_(2, index, gradient.to(total.dtype))


def _rows(part: Part) -> slice:
    return slice(None) if part.row < 0 else slice(part.row, part.row + 1)


def _scores(q: Tensor, k: Tensor, causal: bool, band: Band | None, scale: float) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores if band is None else scores + band.bias(q, k)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """One key/value head for each query head."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _summed(gradient: Tensor, heads: int) -> Tensor:
    """The adjoint of :func:`_repeated`."""
    return gradient.unflatten(1, (heads, -1)).sum(2)
