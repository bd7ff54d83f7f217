"""Bytes of all live storages, counted at every operator; and operators of other devices."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from internsp.app.config import Config
from internsp.layers.norm import RMSNorm
from internsp.mesh.sequence import HEADS, RING
from internsp.sp.exchange import OPERATORS as EXCHANGES
from internsp.sp.ring import OPERATORS as RINGS
from internsp.structure.dtypes import DTYPES

_OPERATORS = {
    **{name: (HEADS, body) for name, body in EXCHANGES.items()},
    **{name: (RING, body) for name, body in RINGS.items()},
}

# Memory of CUDA kernels that a plan cannot measure, because it runs the CPU's kernels instead. Two
# operations differ on CUDA: a norm is one fused kernel that keeps its input, and attention's
# backward allocates buffers for its sums.

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


class Outputs:
    """Calls operators, each on the meta device once for the same sizes.

    Many of torch's functions for this device are written in Python, and take a tenth of a
    millisecond or more: a step calls a thousand.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Any] = {}

    def of(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``run`` returns for these arguments."""
        if getattr(run, "is_view", True) or torch.Tag.inplace_view in run.tags:
            return run(*args, **kwargs)
        key = (run, _sizes(args), _sizes((*kwargs.items(),)))
        found = self._known.get(key)
        if found is None:
            output = run(*args, **kwargs)
            self._remember(key, output, tree_leaves((args, kwargs)))
            return output
        if isinstance(found, int):  # it is written into
            return tree_leaves((args, kwargs))[found]
        shape, stride, dtype = found
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def _remember(self, key: tuple[Any, ...], output: Any, given: list[Any]) -> None:
        """Unless there are several outputs, values, or a storage that an argument has, too."""
        if not isinstance(output, Tensor) or not output.is_meta:
            return
        same = next((n for n, each in enumerate(given) if each is output), None)
        if same is not None:
            self._known[key] = same
        elif all(
            output.untyped_storage()._cdata != each.untyped_storage()._cdata
            for each in given if isinstance(each, Tensor)
        ):  # fmt: skip
            self._known[key] = output.shape, output.stride(), output.dtype


def _sizes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(map(_sizes, value))
    return type(value), value


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all live storages.

    Args:
        kernel_memory: temporary bytes of operators, by name.
        outputs: calls operators whose results have no values.
    """

    def __init__(self, kernel_memory: KernelMemory, outputs: Outputs | None = None) -> None:
        super().__init__()
        self._taken, self._outputs = kernel_memory, outputs
        self.now = self.peak = 0
        self.phases: list[tuple[int, Counter[str]]] = []
        self.kinds: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        self._counted: set[int] = set()
        self._paused = False
        self._kind = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kind, body = _OPERATORS.get(func._schema.name, ("", None))
        if body is not None:
            before, self._kind = self._kind, kind
            try:
                with self:
                    return body(*args, **(kwargs or {}))
            finally:
                self._kind = before
        run = _grouped_product if func is torch.ops.aten._grouped_mm.default else func
        outputs, kwargs = self._outputs, kwargs or {}
        output = run(*args, **kwargs) if outputs is None else outputs.of(run, args, kwargs)
        if not self._paused:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor):
                    self._count(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
            if (own := self._taken.get(func._schema.name)) is not None:
                nbytes = own(*args, **kwargs)
                self._add(self._kind, nbytes)
                self._update_peak()
                self._add(self._kind, -nbytes)
        return output

    def exclude(self, *tensors: Tensor) -> None:
        """Do not count these, nor views of them."""
        for tensor in tensors:
            self._count(tensor.untyped_storage(), 0)

    def _count(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if id(storage) in self._counted:
            return
        self._counted.add(id(storage))
        self._add(self._kind, nbytes)
        self._update_peak()
        weakref.finalize(storage, self._freed, id(storage), self._kind, nbytes)

    def _freed(self, key: int, kind: str, nbytes: int) -> None:
        self._counted.discard(key)
        self._add(kind, -nbytes)

    def end_phase(self) -> None:
        """End a phase: record its peak, and start the next from the live bytes."""
        self.phases.append((self.peak, self.at_peak))
        self.peak, self.at_peak = self.now, self.kinds.copy()

    def _update_peak(self) -> None:
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, self.kinds.copy()

    def _add(self, kind: str, nbytes: int) -> None:
        self.now += nbytes
        self.kinds[kind] += nbytes

    def uncounted(self, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that is not counted, nor views of it."""
        self._paused = True
        made = make()
        self._paused = False
        self.exclude(made)
        return made


def _grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    """What ``grouped_mm`` allocates; its own rule for fake tensors takes bf16 alone.

    A dimension that ``offs`` divides into groups is ``a``'s rows, ``b``'s columns, or the inner one
    of both.
    """
    ends = (a.shape[-2], b.shape[-1])
    if a.dim() == b.dim():
        groups = a.shape[0] if offs is None or a.dim() == 3 else offs.shape[0]
        return a.new_empty(groups, *ends)
    return a.new_empty(ends)
