"""The reduced gradient of one weight: what its reductions leave on this rank (WP-6)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from internsp.base.host import HostLink, HostSum


class ReducedGradient:
    """The sum of a weight's finished reductions, until ``.grad`` or an optimizer has it.

    Args:
        shape: of the padded shard.
        link: copies the sum to and from host memory; ``None``: it stays on the device.

    Attributes:
        total: the sum, of ``shape``, fp32 or wider (unless ``borrowed``); ``None`` if there is
            none. It may be in host memory: read it by :meth:`own` or :meth:`pop`.
        borrowed: ``total`` is autograd's own tensor; see :meth:`own`.
    """

    def __init__(self, shape: Sequence[int], link: HostLink | None) -> None:
        self._shape, self.link = shape, link
        self.total: Tensor | None = None
        self.borrowed = False
        self._host: HostSum | None = None

    def add(self, total: Tensor) -> None:
        """Add ``total``, of ``shape``, fp32 or wider; the caller must not use it again."""
        if self.link is not None:
            if self._host is None:
                self._host = HostSum(self.link, total.numel(), total.dtype)
            self._host.add(total)
            self.total = self._host.values.view(self._shape)
            return
        self.total = total if self.total is None else self.own().add_(total)

    def borrow(self, gradient: Tensor) -> None:
        """:meth:`add` of a tensor that autograd owns; copied when it is written to."""
        if self.link is not None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self.add(gradient.to(wide, copy=True))
        elif self.total is not None:
            self.own().add_(gradient.view(self._shape))
        else:
            self.total, self.borrowed = gradient.view(self._shape), True

    def pop(self) -> Tensor | None:
        """The sum, on the device; there is none here afterwards."""
        total = self.total
        if total is not None and self._host is not None:
            total = self._host.to_device().view(self._shape)
        self.drop()
        return total

    def own(self) -> Tensor:
        """The sum on the device, in fp32 or wider and in memory of its own, to be changed in
        place."""
        assert self.total is not None, "the caller has looked"
        if self._host is not None:
            return self._host.to_device().view(self._shape)
        if self.borrowed:
            wide = torch.promote_types(self.total.dtype, torch.float32)
            self.total, self.borrowed = self.total.to(wide, copy=True), False
        return self.total

    def drop(self) -> None:
        """Drop the sum: later gradients are a new one."""
        self.total, self.borrowed = None, False
        if self._host is not None:
            self._host.clear()
