"""Memory of CUDA kernels that a plan cannot measure, because it runs the CPU's kernels instead.

A plan runs the model's own code on CPU tensors (:mod:`internsp.app.plan.observe`). Two operations
differ on CUDA: a norm is one fused kernel that keeps its input, and attention's backward allocates
buffers for its sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from internsp.app.config import Config
from internsp.layers.norm import RMSNorm
from internsp.structure.dtypes import DTYPES

KernelMemory = Mapping[str, Callable[..., int]]
"""For an operator's name, a function of its arguments that returns the bytes that it allocates
while it runs, in addition to its results."""

_ROWS = 128  # positions of the largest block of queries


def fuse_norms(model: nn.Module, config: Config) -> None:
    """Make the norms of ``model`` save what torch's fused kernel saves, and compute nothing."""
    if config.weight_parallel.compute_dtype not in (None, config.train.dtype):
        return  # the norms' weights are wider: torch uses unfused operations on CUDA too
    for module in model.modules():
        if isinstance(module, RMSNorm):
            apply = partial(_FusedNorm.apply, module.weight)
            module.forward = apply  # type: ignore[method-assign]


def kernel_memory(config: Config) -> KernelMemory:
    """Temporary memory of flash attention, which CUDA uses in half precision; else empty."""
    dtype = DTYPES[config.weight_parallel.compute_dtype or config.train.dtype]
    if dtype not in (torch.float16, torch.bfloat16):
        return {}
    return {"aten::_scaled_dot_product_flash_attention_for_cpu_backward": _flash_backward}


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, *_: Any, **__: Any) -> int:
    """Bytes that ``mha_varlen_bwd`` of flash-attention 2 (and torch's copy of it) allocates: fp32
    sums of dq, an fp32 number a query and head and, for grouped heads, dk and dv of every query
    head."""
    batch, heads, length, d = q.shape
    positions = batch * (length + _ROWS)
    each = 32 if d <= 128 else 64
    nbytes = 4 * positions * heads * (-(-d // each) * each + 1)
    if k.shape[1] != heads:
        nbytes += 2 * batch * k.shape[2] * heads * d * k.itemsize
    return nbytes


class _FusedNorm(torch.autograd.Function):
    """Stands in for ``aten::_fused_rms_norm``, which saves its input and a number a position."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        rows = x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(weight), torch.empty_like(x)
