"""Root mean square normalization (arXiv 1910.07467), in torch or by NVIDIA apex's fused kernel."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from internsp.errors import MissingDependencyError
from internsp.modules.parameters import plain

NormName = Literal["torch", "apex", "auto"]
ApexKernel = Callable[[Tensor, Tensor, tuple[int, ...], float], Tensor]

log = logging.getLogger(__name__)

_APEX_REMEDY = (
    "norm = 'apex' was asked for, but apex.normalization.FusedRMSNorm cannot be imported. "
    "Build NVIDIA apex with its CUDA extensions from https://github.com/NVIDIA/apex "
    "(`pip install apex` installs an unrelated project), or choose norm = 'torch' or 'auto'."
)


def apex_kernel() -> ApexKernel | None:
    """NVIDIA apex's fused function ``(x, weight, shape, eps)``, or None when it is not installed.

    The ``apex`` of the Python package index is another project, which may be importable or fail
    while importing, so this looks for the function behind ``FusedRMSNorm``, which only NVIDIA's
    apex has.
    """
    try:
        functions = importlib.import_module("apex.normalization.fused_layer_norm")
        importlib.import_module("fused_layer_norm_cuda")  # fails without extensions
    except ImportError:
        return None
    kernel: ApexKernel | None = getattr(functions, "mixed_dtype_fused_rms_norm_affine", None)
    return kernel


def resolve_norm(name: NormName) -> Literal["torch", "apex"]:
    """The implementation that ``name`` stands for on this machine; logs the choice of ``auto``.

    Raises:
        MissingDependencyError: ``apex`` was asked for by name and is not installed.
        ValueError: ``name`` is none of torch, apex, auto.
    """
    if name not in ("torch", "apex", "auto"):
        raise ValueError(f"norm must be 'torch', 'apex' or 'auto', got {name!r}")
    if name == "torch":
        return "torch"
    if apex_kernel() is not None:
        if name == "auto":
            log.info("norm auto: NVIDIA apex's fused kernel on CUDA, torch elsewhere")
        return "apex"
    if name == "apex":
        raise MissingDependencyError(_APEX_REMEDY)
    log.info("norm auto: torch (NVIDIA apex is not installed)")
    return "torch"


@plain(saves=True)
class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    Computed in ``promote_types(dtype, float32)`` and rounded once, to the dtype of ``x``.

    Args:
        size: the last dimension of the input.
        implementation: ``apex`` uses the fused kernel for CUDA tensors and, as apex itself does,
            plain torch for CPU tensors.

    Raises:
        MissingDependencyError: ``apex`` was asked for by name and is not installed.
    """

    def __init__(
        self,
        size: int,
        eps: float = 1e-5,
        implementation: NormName = "torch",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.implementation = resolve_norm(implementation)
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self._apex = apex_kernel() if self.implementation == "apex" else None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` to ``[..., size]`` in the same dtype. Does not block."""
        weight = self.weight
        if self._apex is not None and x.is_cuda:
            return self._fused(self._apex, x, weight)
        if x.is_cuda and weight.dtype == x.dtype:
            # torch's CUDA kernel is fused and accumulates in fp32: no wide copy is kept.
            return F.rms_norm(x, (self.size,), weight, self.eps).to(x.dtype)
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), (self.size,), weight.to(wide), self.eps).to(x.dtype)

    def _fused(self, kernel: ApexKernel, x: Tensor, weight: Tensor) -> Tensor:
        # The mixed kernel needs a weight at least as wide as x, and returns the weight's dtype.
        weight = weight.to(torch.promote_types(x.dtype, weight.dtype))
        return kernel(x, weight, (self.size,), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """Size, eps and implementation, for ``repr``."""
        return f"{self.size}, eps={self.eps}, implementation={self.implementation}"
