"""Subclasses of ``DTensor`` whose ``__torch_dispatch__`` every supported torch calls.

torch 2.11 computes a subclass of ``DTensor`` as a plain one, in C++, and asks the subclass nothing:
a parameter would be read before its all-gather, and a gradient without values would read as zeros.
There every call from Python goes through a mode that asks. What autograd adds in C++ does not.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

C = TypeVar("C", bound=type)

TORCH_ASKS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def asked(kind: C) -> C:
    """A decorator of a subclass of ``DTensor`` that has a ``__torch_dispatch__`` of its own."""
    return kind if TORCH_ASKS else _asked_by_mode(kind)


def _asked_by_mode(kind: C) -> C:
    described: Any = kind
    compute = described.__torch_function__

    def through_mode(_: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _Asking(kind):
            return compute(func, types, args, kwargs or {})

    described.__torch_function__ = classmethod(through_mode)
    return kind


class _Asking(TorchDispatchMode):
    """Calls the ``__torch_dispatch__`` of ``kind`` for operations on tensors of it."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, self._kind) for each in types):
            return self._kind.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
