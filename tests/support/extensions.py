"""Classes of parameters with all-gather functions of their own, as libraries of low precision have.

Each shard of a class sends something else than its values, and the unsharded weight is of another
class, or plain. FSDP2 takes uneven rows only from a class that sends one tensor, and pads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as unseen
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_SAME_CLASS = {
    _aten.detach.default, _aten.clone.default, _aten.new_zeros.default, _aten.slice.Tensor,
    _aten.split.Tensor, _aten.view.default, _aten._to_copy.default, _aten.zeros_like.default,
    _aten.empty_like.default,
}  # fmt: skip


def _new(cls: Any, like: Tensor, dtype: torch.dtype) -> Any:
    return Tensor._make_wrapper_subclass(cls, like.shape, like.stride(), dtype=dtype)  # type: ignore[attr-defined]


class Held(Tensor):
    """A trained weight in a plain tensor. It sends fp32 of the shard by its largest element, and
    that; what the program computes with is :class:`Coded`."""

    def __new__(cls, data: Tensor) -> Any:
        return _new(cls, data, data.dtype)

    def __init__(self, data: Tensor) -> None:
        self._data = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map_only(cls, lambda x: x._data, (args, kwargs or {}))
        found = func(*given[0], **given[1])
        if func._schema.is_mutable and isinstance(args[0], Tensor):
            return args[0]
        return tree_map_only(Tensor, cls, found) if func in _SAME_CLASS else found

    def __tensor_flatten__(self) -> Any:
        return ["_data"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_data"])

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        assert module is not None
        largest = self._data.abs().amax().view(1)
        return ((self._data / largest).float(), largest), None

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        codes, largest = gathered
        if out is not None:  # FSDP2 has the codes where they were
            assert out._codes.untyped_storage().data_ptr() == codes.untyped_storage().data_ptr()
            out._largest = largest
            return None
        return Coded(codes, largest, len(codes) // len(largest), param_dtype), (codes,)


class Coded(Tensor):
    """Codes and, for so many ``rows`` each, the largest element."""

    def __new__(cls, codes: Tensor, largest: Tensor, rows: int, dtype: torch.dtype) -> Any:
        return _new(cls, codes, dtype)

    def __init__(self, codes: Tensor, largest: Tensor, rows: int, dtype: torch.dtype) -> None:
        assert codes.storage_offset() == 0, "as torch's own TwoTensor checks"
        self._codes, self._largest, self._rows = codes, largest, rows

    def plain(self) -> Tensor:
        by_row = self._largest.repeat_interleave(self._rows)[: len(self._codes)]
        shape = [-1, *[1] * (self._codes.ndim - 1)]
        return (self._codes.double() * by_row.view(shape)).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_aten.detach.default, _aten.as_strided.default):
            self = args[0]
            return cls(func(self._codes, *args[1:]), self._largest, self._rows, self.dtype)
        given = tree_map_only(cls, lambda x: x.plain(), (args, kwargs or {}))
        return func(*given[0], **given[1])

    def __tensor_flatten__(self) -> Any:
        return ["_codes", "_largest"], (self._rows, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_codes"], inner["_largest"], *context)


class Rounded(Held):
    """Sends 16 bits; what the program computes with is plain."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        rows = self._data.to(torch.bfloat16)
        missing = -(-outer_size[0] // mesh.size()) - len(rows)
        return (torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]),), "metadata"

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        assert metadata == "metadata"
        (values,) = gathered
        if out is None:
            wide = values.to(param_dtype)
            return wide, (values, wide)
        with torch.no_grad(), unseen(out):
            out.copy_(values[: len(out)])
        return None


class Quantized(Tensor):
    """A frozen weight that is nothing but codes and, for each row, a scale (as in QLoRA)."""

    def __new__(cls, codes: Tensor, scales: Tensor) -> Any:
        return _new(cls, codes, torch.double)

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self._codes, self._scales = codes, scales

    @classmethod
    def of(cls, values: Tensor) -> Any:
        scales = values.abs().amax(1) / 127
        return cls((values / scales[:, None]).round().to(torch.int8), scales)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        both: list[Callable[[Any], Any]] = [lambda x: x._codes, lambda x: x._scales]
        if func is _aten.copy_.default and type(args[1]) is cls:
            for part in both:
                part(args[0]).copy_(part(args[1]))
            return args[0]
        if func is _aten.view.default:  # torch keeps what is no plain tensor flat, and unused
            return cls(args[0]._codes, args[0]._scales)
        if func is _aten.as_strided.default:
            (rows, _), self = args[1], args[0]
            return cls(self._codes[:rows], self._scales[:rows])
        if func is _aten.new_zeros.default:
            codes, scales = args[0]._codes, args[0]._scales
            return cls(codes.new_zeros(args[1]), scales.new_zeros(args[1][0]))
        if func in {_aten.detach.default, _aten.slice.Tensor, _aten.split.Tensor}:
            found = [func(part(args[0]), *args[1:], **(kwargs or {})) for part in both]
            pairs = zip(*found, strict=True) if func is _aten.split.Tensor else None
            return cls(*found) if pairs is None else [cls(*pair) for pair in pairs]
        given = tree_map_only(
            cls, lambda x: x._codes.double() * x._scales[:, None], (args, kwargs or {})
        )
        return func(*given[0], **given[1])

    def __tensor_flatten__(self) -> Any:
        return ["_codes", "_scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_codes"], inner["_scales"])

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        return (self._codes, self._scales), None

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        return (Quantized(*gathered), gathered) if out is None else None
