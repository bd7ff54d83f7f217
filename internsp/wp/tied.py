"""Gradients that one step of a pipeline adds to weights of which other stages have copies."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from internsp.dtensor.placed import dtensor_like, grad_dtype
from internsp.wp.parameter import Member


class StepGradients(Protocol):
    """This rank's part of the gradients that one step of a pipeline adds to tied weights.

    They are in ``.grad``, or in the slices of a ``ZeroOptimizer``.
    """

    def trains(self, member: Member) -> bool:
        """Whether ``member`` gets gradients."""

    def begin_step(self, member: Member) -> None:
        """Begin a step: set the gradients of earlier steps aside."""

    def finish(self) -> None:
        """Finish all reductions, after the chunk's last micro-batch. Collective over the stage."""

    def local_sum(self, member: Member) -> tuple[Tensor, bool]:
        """The gradient of this step, and whether any rank of the stage has used the weight.

        The gradient is flat, on the device, in fp32 or wider, and has one length on all stages.
        """

    def set_total(self, member: Member, total: Tensor | None) -> None:
        """Set this step's gradient to ``total``, the sum over all stages, and add earlier ones."""

    def discard_step(self) -> None:
        """Drop the gradients of a failed step."""

    def values(self, member: Member) -> list[Tensor]:
        """Tensors that hold this rank's part of the weight (values, master), to read and write."""


class PlainGradients:
    """Gradients in ``.grad``, for a training loop without ``ZeroOptimizer``."""

    def __init__(self) -> None:
        self._before: dict[Member, Tensor | None] = {}

    def trains(self, member: Member) -> bool:
        """See :class:`StepGradients`."""
        return member.requires_grad

    def begin_step(self, member: Member) -> None:
        """See :class:`StepGradients`."""
        self._before[member] = member.parameter.grad
        member.parameter.grad = None

    def finish(self) -> None:
        """See :class:`StepGradients`; does nothing: each backward finishes its reductions."""

    def local_sum(self, member: Member) -> tuple[Tensor, bool]:
        """See :class:`StepGradients`."""
        gradient: Any = member.parameter.grad
        wide, device = torch.promote_types(member.dtype, torch.float32), member.device
        if gradient is None:
            local = member.parameter._local_tensor  # type: ignore[attr-defined]
            return torch.zeros(local.numel(), dtype=wide, device=device), False
        return gradient._local_tensor.to(device, wide).reshape(-1), True

    def set_total(self, member: Member, total: Tensor | None) -> None:
        """See :class:`StepGradients`."""
        before, parameter = self._before.pop(member), member.parameter
        if total is None:
            parameter.grad = before
            return
        local = parameter._local_tensor  # type: ignore[attr-defined]
        made = total.view(local.shape).to(local.device, grad_dtype(parameter), copy=True)
        if before is None:
            parameter.grad = dtensor_like(parameter, made)
        else:
            before._local_tensor.add_(made)  # type: ignore[attr-defined]
            parameter.grad = before

    def discard_step(self) -> None:
        """See :class:`StepGradients`."""
        for member, before in self._before.items():
            member.parameter.grad = before
        self._before.clear()

    def values(self, member: Member) -> list[Tensor]:
        """See :class:`StepGradients`."""
        return [member.parameter._local_tensor]  # type: ignore[attr-defined]
