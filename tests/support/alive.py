"""Counts what lives: the peak of all tensors in memory."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):
    """Peak bytes of live storages that operations have created or read."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.now = self.most = self.largest = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in (*args, *(out if isinstance(out, (tuple, list)) else (out,))):
            if type(tensor) is Tensor and not tensor.is_meta:
                self._count(tensor)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if storage.data_ptr() in self.known or key in self._seen:
            return
        self._seen[key] = size
        self.now += size
        self.most, self.largest = max(self.most, self.now), max(self.largest, size)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._seen.pop(key, 0)
