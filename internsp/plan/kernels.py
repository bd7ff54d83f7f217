"""What kernels of a CUDA device take, where a plan runs the host's in their place.

A plan runs the model's own code on tensors of the host (:mod:`internsp.plan.observe`). Two things
are done by other code on CUDA: a norm is one kernel that keeps its input, and attention's backward
has sums of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from internsp.config import Config
from internsp.layers.norm import RMSNorm
from internsp.plan.dtypes import DTYPES

Taken = Mapping[str, Callable[..., int]]
"""By the name of an operator: of its arguments, the bytes that it has while it runs, beside its
results."""

_ROWS = 128  # positions of the largest block of queries


def fuse_norms(model: nn.Module, config: Config) -> None:
    """Have the norms of ``model`` keep what torch's fused kernel keeps, and compute nothing."""
    if config.weight_parallel.compute_dtype not in (None, config.train.dtype):
        return  # weights of norms are wider: torch computes these in steps, on CUDA too
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.forward = partial(_normed, module)  # type: ignore[method-assign]


def taken(config: Config) -> Taken:
    """Of flash attention, where it is what computes: in half precision."""
    dtype = DTYPES[config.weight_parallel.compute_dtype or config.train.dtype]
    if dtype not in (torch.float16, torch.bfloat16):
        return {}
    return {"aten::_scaled_dot_product_flash_attention_for_cpu_backward": _flash_backward}


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, *_: Any, **__: Any) -> int:
    """As ``mha_varlen_bwd`` of flash-attention 2, torch's own included, allocates: fp32 sums of dq,
    an fp32 number a query and head, and, of grouped heads, dk and dv of every query head."""
    batch, heads, length, d = q.shape
    positions = batch * (length + _ROWS)
    each = 32 if d <= 128 else 64
    nbytes = 4 * positions * heads * (-(-d // each) * each + 1)
    if k.shape[1] != heads:
        nbytes += 2 * batch * k.shape[2] * heads * d * k.itemsize
    return nbytes


def _normed(module: RMSNorm, x: Tensor) -> Tensor:
    made: Tensor = _Fused.apply(x, module.weight)
    return made


class _Fused(torch.autograd.Function):
    """``aten::_fused_rms_norm``: beside its input it keeps a number a position."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        rows = x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
