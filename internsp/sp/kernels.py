"""Attention kernels. A mask is described as causal x documents x window; each kernel declares what
it can compute, and one that cannot raises instead of computing something else.

All kernels take ``q [B, S, h, d]`` and ``k, v [B, S, kv, d]`` in any strides and give
``[B, S, h, d]``. Which key/value head a query head reads is given per query head, since a rank's
share of the heads may read its key/value heads unevenly.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from internsp.errors import ConfigError, MissingDependencyError
from internsp.sp.layout import Documents

_LOG = logging.getLogger("internsp.sp")
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query may see.

    Attributes:
        causal: only keys at or before its own position.
        window: only keys less than ``window`` positions away (None: any distance).
        documents: only keys of its own document (None: one document a row).
    """

    causal: bool = True
    window: int | None = None
    documents: Documents | None = None

    def square(self, length: int, device: torch.device) -> Tensor | None:
        """``[length, length]`` bool within one document, True where seen; None without window."""
        if self.window is None or self.window >= length:
            return None
        at = torch.arange(length, device=device)
        distance = at[:, None] - at[None, :]
        near = distance.abs() < self.window
        return near & (distance >= 0) if self.causal else near


class Kernel(Protocol):
    """One way of computing attention."""

    name: str

    def refusal(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why it cannot compute this; None when it can. Does not look at what is installed."""

    def missing(self) -> str | None:
        """What is not installed, and the line that installs it; None when it is there."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, reads: tuple[int, ...], mask: AttentionMask,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """Attention of ``q`` whose head ``i`` reads key/value head ``reads[i]``."""


def group_size(reads: tuple[int, ...], kv_heads: int) -> int | None:
    """Query heads per key/value head where the mapping is uniform and in order, else None."""
    group, rest = divmod(len(reads), kv_heads)
    uniform = not rest and reads == tuple(head // group for head in range(len(reads)))
    return group if uniform else None


def _matched(k: Tensor, v: Tensor, reads: tuple[int, ...]) -> tuple[Tensor, Tensor, bool]:
    """Keys and values that a grouped kernel can take: as they are, or one head for each query
    head, on this rank only and after the exchange. The flag says whether groups remain."""
    group = group_size(reads, k.shape[2])
    if group is not None:
        return k, v, group > 1
    index = torch.tensor(reads, device=k.device)
    return k.index_select(2, index), v.index_select(2, index), False


class SdpaKernel:
    """``torch.nn.functional.scaled_dot_product_attention``: every device and dtype.

    Documents are computed one by one, which costs the sum of the squares of their lengths; a
    window takes a mask of one document's square.
    """

    name = "sdpa"

    def refusal(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """It can compute everything."""
        return None

    def missing(self) -> str | None:
        """It is always there."""
        return None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, reads: tuple[int, ...], mask: AttentionMask,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """Attention, document by document."""
        k, v, grouped = _matched(k, v, reads)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen = mask.square(q.shape[1], q.device)
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=seen,
                is_causal=mask.causal and seen is None,
                scale=scale,
                enable_gqa=grouped,
            )
            return out.transpose(1, 2)

        documents = mask.documents
        if documents is None or documents.whole_rows:
            return attend(q, k, v)
        # split and unbind, not slices: their backward writes each gradient once.
        rows = []
        for *row, sizes in zip(q, k, v, documents.lengths, strict=True):
            pieces = (part.unsqueeze(0).split(sizes, dim=1) for part in row)
            rows.append(torch.cat([attend(*piece) for piece in zip(*pieces, strict=True)], dim=1))
        return torch.cat(rows)


class _PackedKernel:
    """What the variable-length kernels share: half precision on CUDA, tokens packed in one row."""

    name = ""
    install = ""

    def refusal(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why it cannot compute this."""
        if device.type != "cuda":
            return f"it runs on CUDA, not on {device.type}"
        if dtype not in _HALF:
            return f"it computes in float16 or bfloat16, not in {dtype}"
        if head_dim > 256 or head_dim % 8:
            return f"it needs a head_dim that is a multiple of 8 up to 256, not {head_dim}"
        return None

    def missing(self) -> str | None:
        """What is not installed."""
        return None if self.function() is not None else self.install

    def function(self) -> tuple[Callable[..., Any], int] | None:
        """The kernel and its major version, or None."""
        raise NotImplementedError

    def run(self, function: Callable[..., Any], version: int, arguments: dict[str, Any]) -> Any:
        """Call ``function`` in its own dialect."""
        raise NotImplementedError

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, reads: tuple[int, ...], mask: AttentionMask,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """Attention of all documents in one call."""
        k, v, _ = _matched(k, v, reads)
        batch, length = q.shape[:2]
        documents = mask.documents
        if documents is None:
            documents = Documents.create([(0,)] * batch, length, q.device)
        found = self.function()
        assert found is not None, "a kernel is called only after missing() returned None"
        out = self.run(
            *found,
            {
                "q": q.flatten(0, 1),
                "k": k.flatten(0, 1),
                "v": v.flatten(0, 1),
                "cu_seqlens": documents.cu_seqlens.to(q.device),
                "longest": documents.longest,
                "causal": mask.causal,
                "window": mask.window,
                "scale": scale,
            },
        )
        out = out[0] if isinstance(out, tuple) else out
        return out.unflatten(0, (batch, length))


class FlashKernel(_PackedKernel):
    """The flash-attn package: version 4 (``flash_attn.cute``), 3 (``flash_attn_interface``) or 2,
    the newest that can be imported."""

    name = "flash"
    install = "flash-attn is not installed; pip install flash-attn --no-build-isolation"

    def function(self) -> tuple[Callable[..., Any], int] | None:
        """The newest ``flash_attn_varlen_func`` that can be imported, and its major version."""
        for name, version in (
            ("flash_attn.cute", 4),
            ("flash_attn_interface", 3),
            ("flash_attn", 2),
        ):
            function = _imported(name, "flash_attn_varlen_func")
            if function is not None:
                return function, version
        return None

    def run(self, function: Callable[..., Any], version: int, arguments: dict[str, Any]) -> Any:
        """Versions 2 and 3 write an unlimited window as -1, version 4 as None."""
        window, anywhere = arguments["window"], None if version >= 4 else -1
        left = anywhere if window is None else window - 1
        return function(
            arguments["q"],
            arguments["k"],
            arguments["v"],
            cu_seqlens_q=arguments["cu_seqlens"],
            cu_seqlens_k=arguments["cu_seqlens"],
            max_seqlen_q=arguments["longest"],
            max_seqlen_k=arguments["longest"],
            softmax_scale=arguments["scale"],
            causal=arguments["causal"],
            window_size=(left, 0 if arguments["causal"] and window is not None else left),
        )


class VarlenKernel(_PackedKernel):
    """``torch.nn.attention.varlen.varlen_attn``, in torch itself."""

    name = "varlen"
    install = "torch.nn.attention.varlen is missing; pip install 'torch>=2.11' (a CUDA build)"

    def function(self) -> tuple[Callable[..., Any], int] | None:
        """The function and 1."""
        function = _imported("torch.nn.attention.varlen", "varlen_attn")
        return None if function is None else (function, 1)

    def run(self, function: Callable[..., Any], version: int, arguments: dict[str, Any]) -> Any:
        """Causality is said by a right window of 0."""
        window = arguments["window"]
        left = -1 if window is None else window - 1
        q, k = arguments["q"], arguments["k"]
        return function(
            q,
            k,
            arguments["v"],
            arguments["cu_seqlens"],
            arguments["cu_seqlens"],
            arguments["longest"],
            arguments["longest"],
            scale=arguments["scale"],
            window_size=(left, 0 if arguments["causal"] else left),
            enable_gqa=q.shape[1] != k.shape[1],
        )


def _imported(module: str, name: str) -> Callable[..., Any] | None:
    """``module.name`` if it can be imported; a broken install counts as absent."""
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (ImportError, OSError):
        return None
    return found if callable(found) else None


KERNELS: tuple[Kernel, ...] = (FlashKernel(), VarlenKernel(), SdpaKernel())
"""In the order in which ``auto`` prefers them."""


def check_kernel(name: str) -> None:
    """Raise at once for a kernel that is unknown or not installed.

    Raises:
        ConfigError: no such kernel.
        MissingDependencyError: asked for by name and not installed; the message has the line.
    """
    names = ["auto", *(kernel.name for kernel in KERNELS)]
    if name not in names:
        raise ConfigError(f"No attention kernel {name!r}; choose one of {', '.join(names)}.")
    for kernel in KERNELS:
        if kernel.name == name and (missing := kernel.missing()) is not None:
            raise MissingDependencyError(f"Attention kernel {name!r}: {missing}")


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel called ``name``, or for ``auto`` the first that can compute this.

    Raises:
        ConfigError: the kernel cannot compute this; the message says why and what can.
        MissingDependencyError: it is not installed.
    """
    if name == "auto":
        return _automatic(device.type, dtype, head_dim)
    check_kernel(name)
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    refusal = kernel.refusal(device, dtype, head_dim)
    if refusal is not None:
        raise ConfigError(
            f"Attention kernel {name!r} was asked for, but {refusal}. Choose 'auto' or 'sdpa'."
        )
    return kernel


@functools.lru_cache(maxsize=64)
def _automatic(device_type: str, dtype: torch.dtype, head_dim: int) -> Kernel:
    """Remembered, so that what is installed is looked for once and the choice is logged once."""
    device = torch.device(device_type)
    for kernel in KERNELS:
        if kernel.refusal(device, dtype, head_dim) is None and kernel.missing() is None:
            _LOG.info(
                "attention on %s in %s with head_dim %d: kernel '%s' (auto)",
                device_type,
                dtype,
                head_dim,
                kernel.name,
            )
            return kernel
    raise AssertionError("the last kernel refuses nothing and is always installed")
