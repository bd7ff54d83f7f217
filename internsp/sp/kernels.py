"""Attention kernels. A mask is described as causal x documents x window. Each kernel declares what
it can compute; one that cannot compute what it is asked for raises.

All kernels take ``q [B, S, h, d]`` and ``k, v [B, S, kv, d]`` with any strides and return
``[B, S, h, d]``. The key/value head of each query head is given by ``kv_index``, since on one rank
key/value heads may serve unequal numbers of query heads.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
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
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


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

    def window_mask(self, length: int, device: torch.device) -> Tensor | None:
        """``[length, length]`` bool for one document, True where seen; None without a window."""
        if self.window is None or self.window >= length:
            return None
        at = torch.arange(length, device=device)
        distance = at[:, None] - at[None, :]
        near = distance.abs() < self.window
        return near & (distance >= 0) if self.causal else near


class Kernel(Protocol):
    """An attention kernel."""

    name: str

    def unsupported(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why it cannot compute this; None when it can. Does not check what is installed."""
        return None

    def missing(self) -> str | None:
        """Which package is missing, and how to install it; None when it is installed."""
        return None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, kv_index: tuple[int, ...], mask: AttentionMask,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """Compute attention; query head ``i`` reads key/value head ``kv_index[i]``."""


def group_size(kv_index: tuple[int, ...], kv_heads: int) -> int | None:
    """Query heads per key/value head if the mapping is uniform and in order, else None."""
    group, rest = divmod(len(kv_index), kv_heads)
    uniform = not rest and kv_index == tuple(head // group for head in range(len(kv_index)))
    return group if uniform else None


def match_kv_heads(k: Tensor, v: Tensor, kv_index: tuple[int, ...]) -> tuple[Tensor, Tensor, int]:
    """Keys and values in a form that a grouped-query kernel takes, and query heads for each of
    their heads.

    They are returned unchanged where the mapping is uniform; otherwise each query head gets a copy
    of its key/value head, on this rank only and after the exchange.
    """
    group = group_size(kv_index, k.shape[2])
    if group is not None:
        return k, v, group
    # By views: an index would come from host memory, for which the host waits.
    keys, values = (torch.stack([x.select(2, head) for head in kv_index], 2) for x in (k, v))
    return keys, values, 1


class SdpaKernel(Kernel):
    """``torch.nn.functional.scaled_dot_product_attention``: every device and dtype.

    Documents are computed one by one, which costs the sum of the squares of their lengths; a
    window takes a mask of one document's square.
    """

    name = "sdpa"

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, kv_index: tuple[int, ...], mask: AttentionMask,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """Compute attention, document by document."""
        k, v, group = match_kv_heads(k, v, kv_index)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen = mask.window_mask(q.shape[1], q.device)
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            if q.is_meta and seen is None:  # where torch would choose to hold all scores
                out, _ = _FLASH(q, k, v, 0.0, mask.causal, scale=scale)
            else:
                out = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=seen, is_causal=mask.causal and seen is None, scale=scale,
                    enable_gqa=group > 1,
                )  # fmt: skip
            return out.transpose(1, 2)

        documents = mask.documents
        if documents is None or all(len(sizes) == 1 for sizes in documents.lengths):
            return attend(q, k, v)
        # split and unbind, not slices: their backward writes each gradient once.
        rows = []
        for *row, sizes in zip(q, k, v, documents.lengths, strict=True):
            pieces = (part.unsqueeze(0).split(sizes, dim=1) for part in row)
            rows.append(torch.cat([attend(*piece) for piece in zip(*pieces, strict=True)], dim=1))
        return torch.cat(rows)


class _PackedKernel(Kernel):
    """Base of the variable-length kernels: half precision on CUDA, tokens packed in one row."""

    name = ""
    install = ""

    def unsupported(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why it cannot compute this."""
        if device.type != "cuda":
            return f"it runs on CUDA, not on {device.type}"
        if dtype not in _HALF:
            return f"it computes in float16 or bfloat16, not in {dtype}"
        if head_dim > 256 or head_dim % 8:
            return f"it needs a head_dim that is a multiple of 8 up to 256, not {head_dim}"
        return None

    def missing(self) -> str | None:
        """How to install the missing package, or None."""
        return None if self.function() is not None else self.install

    def function(self) -> tuple[Callable[..., Any], int] | None:
        """The kernel and its major version, or None."""
        raise NotImplementedError

    def run(
        self, function: Callable[..., Any], version: int, q: Tensor, k: Tensor, v: Tensor,
        starts: Tensor, longest: int, mask: AttentionMask, scale: float,
    ) -> Any:  # fmt: skip
        """Call ``function`` with ``q [B * S, h, d]``, ``k, v [B * S, kv, d]``, under the names that
        it has for its arguments.

        Args:
            starts, longest: ``cu_seqlens`` and ``longest`` of :class:`Documents`.
        """
        raise NotImplementedError

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, kv_index: tuple[int, ...], mask: AttentionMask,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """Compute attention of all documents in one call."""
        k, v, _ = match_kv_heads(k, v, kv_index)
        batch, length = q.shape[:2]
        documents = mask.documents
        if documents is None:
            cu_seqlens, longest = row_starts(batch, length, q.device), length
        else:
            cu_seqlens, longest = documents.cu_seqlens.to(q.device), documents.longest
        found = self.function()
        assert found is not None, "a kernel is called only after missing() returned None"
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        out = self.run(*found, q, k, v, cu_seqlens, longest, mask, scale)
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
            function = _import(name, "flash_attn_varlen_func")
            if function is not None:
                return function, version
        return None

    def run(
        self, function: Callable[..., Any], version: int, q: Tensor, k: Tensor, v: Tensor,
        starts: Tensor, longest: int, mask: AttentionMask, scale: float,
    ) -> Any:  # fmt: skip
        """An unlimited window is -1 in versions 2 and 3, and None in version 4."""
        anywhere = None if version >= 4 else -1
        left = anywhere if mask.window is None else mask.window - 1
        return function(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest,
            max_seqlen_k=longest, softmax_scale=scale, causal=mask.causal,
            window_size=(left, 0 if mask.causal and mask.window is not None else left),
        )  # fmt: skip


class VarlenKernel(_PackedKernel):
    """``torch.nn.attention.varlen.varlen_attn``, in torch itself."""

    name = "varlen"

    def function(self) -> tuple[Callable[..., Any], int]:
        """``varlen_attn``, and 2 as its version if it has ``enable_gqa``, 1 if it is older."""
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn, 1 + _takes(varlen_attn, "enable_gqa")

    def run(
        self, function: Callable[..., Any], version: int, q: Tensor, k: Tensor, v: Tensor,
        starts: Tensor, longest: int, mask: AttentionMask, scale: float,
    ) -> Any:  # fmt: skip
        """``varlen_attn`` takes a causal mask as a right window of 0."""
        left = -1 if mask.window is None else mask.window - 1
        # torch 2.11 takes grouped heads without being told.
        grouped = {"enable_gqa": q.shape[1] != k.shape[1]} if version > 1 else {}
        return function(
            q, k, v, starts, starts, longest, longest, scale=scale,
            window_size=(left, 0 if mask.causal else left), **grouped,
        )  # fmt: skip


def row_starts(rows: int, length: int, device: torch.device) -> Tensor:
    """Starts of rows that lie one after another, and the end: ``[rows + 1]`` int32, made on the
    device, so that the host does not wait for a copy."""
    return torch.arange(0, (rows + 1) * length, max(length, 1), dtype=torch.int32, device=device)


@functools.cache
def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` has a parameter of this name; cached, since each call asks."""
    return name in inspect.signature(function).parameters


def _import(module: str, name: str) -> Callable[..., Any] | None:
    """``module.name`` if it can be imported; a broken install counts as absent."""
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (ImportError, OSError):
        return None
    return found if callable(found) else None


KERNELS: tuple[Kernel, ...] = (FlashKernel(), VarlenKernel(), SdpaKernel())
"""In the order in which ``auto`` prefers them."""


def find_kernel(name: str) -> Kernel | None:
    """The kernel called ``name``; None for ``auto``.

    Raises:
        ConfigError: no such kernel.
        MissingDependencyError: not installed; the message has the command that installs it.
    """
    known = {"auto": None} | {kernel.name: kernel for kernel in KERNELS}
    if name not in known:
        raise ConfigError(f"No attention kernel {name!r}; choose one of {', '.join(known)}.")
    kernel = known[name]
    if kernel is not None and (missing := kernel.missing()) is not None:
        raise MissingDependencyError(f"Attention kernel {name!r}: {missing}")
    return kernel


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel called ``name``, or for ``auto`` the first that can compute this.

    Raises:
        ConfigError: the kernel cannot compute this; the message has the reason and a remedy.
        MissingDependencyError: it is not installed.
    """
    kernel = find_kernel(name)
    if kernel is None:
        return _auto_kernel(device.type, dtype, head_dim)
    unsupported = kernel.unsupported(device, dtype, head_dim)
    if unsupported is not None:
        raise ConfigError(
            f"Attention kernel {name!r} was asked for, but {unsupported}. Choose 'auto' or 'sdpa'."
        )
    return kernel


@functools.lru_cache(maxsize=64)
def _auto_kernel(device_type: str, dtype: torch.dtype, head_dim: int) -> Kernel:
    """Cached, so that installed packages are searched once and the choice is logged once."""
    device = torch.device(device_type)
    for kernel in KERNELS:
        if kernel.unsupported(device, dtype, head_dim) is None and kernel.missing() is None:
            _LOG.info(
                "attention on %s in %s with head_dim %d: kernel '%s' (auto)",
                device_type,
                dtype,
                head_dim,
                kernel.name,
            )
            return kernel
    raise AssertionError("the last kernel supports everything and is always installed")
