"""What the norm decides of a step, and when the host learns of it.

Gradients of a step are clipped by the norm, and a step whose norm is not finite is skipped. Where
torch's optimizers take both from the device (``grad_scale``, ``found_inf``) no number of a step is
read before its update is queued: it is read when the next step begins, or when it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """Of a step that is made, as far as the host knows.

    Attributes:
        factor: of the gradients.
        found_inf: 1 on the device if the optimizers must skip the step there, else 0; ``None``: the
            host has read that it is made.
    """

    factor: float | Tensor
    found_inf: Tensor | None = None

    @cached_property
    def divisor(self) -> Tensor:
        """The inverse of ``factor``, a tensor, as fused steps take it (``grad_scale``): fp32."""
        assert isinstance(self.factor, Tensor), "the caller checks"
        return self.factor.reciprocal().to(torch.float32)


class Outcome(Generic[T]):
    """An attribute that steps change; asking for it reads first what is unread (:func:`settle`)."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, owner: Any, cls: type) -> T:
        settle(owner)
        value: T = getattr(owner, self._name)
        return value

    def __set__(self, owner: Any, value: T) -> None:
        settle(owner)
        setattr(owner, self._name, value)


def settle(owner: Any) -> None:
    """Let ``owner`` learn what became of its last step: calls its ``unread``, at most once."""
    unread, owner.unread = owner.unread, None
    if unread is not None:
        unread()
