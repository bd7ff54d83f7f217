"""Forward and backward of a step's micro-batches: of the full model, or through a pipeline.

Both call the session's hooks at the same points (:class:`internsp.pipeline.SchedulerHook`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from internsp.app.session.session import Session
from internsp.layers.router import router_loss, routers
from internsp.pipeline import ComputeAction, MicroBatch
from internsp.sp import SequenceLayout


class PlainStep:
    """A step without a pipeline: one micro-batch after another through the full model."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._routers = routers(session.modules)

    def train(self, layouts: Sequence[SequenceLayout], divisor: Tensor) -> Tensor:
        """Run forward and backward of all micro-batches.

        Args:
            layouts: one for each micro-batch.
            divisor: valid tokens of the step over all ranks (design.md 6), without dimensions.

        Returns:
            This rank's sum of token losses: on the device, like ``divisor``, in fp64 and without
            dimensions, since reading a value would make the host wait for all that it has queued.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.session.mesh.device)
        communicator = self.session.communicators[0]
        full = communicator.queue.passes.order.policy.accumulate_whole
        with communicator.unchanged():
            for number, layout in enumerate(layouts):
                last = number == len(layouts) - 1
                sync = communicator.no_sync() if full and not last else nullcontext()
                with sync, communicator.replica_sync(last):
                    total += self._micro_batch(number, layout, divisor)
        for hook in self.session.hooks:
            hook.after_last_micro_batch(ComputeAction(0, 0, -1))
        return total

    def evaluate(self, layouts: Sequence[SequenceLayout]) -> Tensor:
        """Run forward only; returns this rank's sum of token losses as :meth:`train` does."""
        total = torch.zeros((), dtype=torch.float64, device=self.session.mesh.device)
        one = torch.ones_like(total)
        with self.session.communicators[0].unchanged():
            for number, layout in enumerate(layouts):
                total += self._forward(ComputeAction(0, 0, number), layout, one)[0]
        for hook in self.session.hooks:
            hook.after_last_micro_batch(ComputeAction(0, 0, -1))
        return total

    def _forward(
        self, action: ComputeAction, layout: SequenceLayout, divisor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run one forward; returns the sum of token losses, and the value backward starts from."""
        session = self.session
        for hook in session.hooks:
            hook.before_forward(action)
        output = self._loss(layout)
        for hook in session.hooks:
            hook.after_forward(action, output)
        for hook in session.hooks:
            hook.before_criterion(action, output)
        total = output
        if self._routers:  # what is told is the loss of tokens alone
            total = output + router_loss(*self._routers)
        loss = session.optimizer.scale(_quotient(total, divisor))
        for hook in session.hooks:
            hook.after_criterion(action, loss)
        return output, loss

    def _micro_batch(self, number: int, layout: SequenceLayout, divisor: Tensor) -> Tensor:
        session = self.session
        begin = session.trace.now()
        output, loss = self._forward(ComputeAction(0, 0, number), layout, divisor)
        middle = session.trace.now()
        session.trace.record("FORWARD", start=begin, end=middle)
        action = ComputeAction(0, 0, number, "full")
        for hook in session.hooks:
            hook.before_backward(action)
        loss.backward()
        for hook in session.hooks:
            hook.after_backward(action)
        session.trace.record("BACKWARD", start=middle, end=session.trace.now())
        return output.detach().double()

    def _loss(self, layout: SequenceLayout) -> Tensor:
        own = self.session.custom
        if own.loss is not None:
            return own.checked_loss(own.loss(self.session.modules[0], layout))
        loss: Tensor = self.session.modules[0](
            layout.input_ids,
            layout=layout,
            labels=layout.labels,
            loss_chunk=self.session.config.train.loss_chunk,
        )[0]
        return loss


class PipelinedStep:
    """A pipelined step: every rank has some chunks; torch's schedule runs all micro-batches."""

    def __init__(self, session: Session) -> None:
        assert session.pipeline is not None, "a session with a pipeline"
        self.session = session
        self.pipeline = session.pipeline
        self.pipeline.criterion = self._criterion
        for router in routers(session.modules):
            router.loss_scale = self._scale
        self._divisor = torch.ones((), dtype=torch.float64, device=session.mesh.device)
        self._total = torch.zeros_like(self._divisor)

    def train(self, layouts: Sequence[SequenceLayout], divisor: Tensor) -> Tensor:
        """See :meth:`PlainStep.train`; returns zero except on the last stage."""
        self._divisor, self._total = divisor, torch.zeros_like(divisor)
        self.pipeline.step(self._batches(layouts))
        return self._total

    def evaluate(self, layouts: Sequence[SequenceLayout]) -> Tensor:
        """See :meth:`PlainStep.evaluate`; returns zero except on the last stage."""
        self._divisor, self._total = torch.ones_like(self._divisor), torch.zeros_like(self._divisor)
        self.pipeline.evaluate(self._batches(layouts))
        return self._total

    def _criterion(self, output: Tensor, batch: MicroBatch) -> Tensor:
        self._total += output.detach()
        return self.session.optimizer.scale(_quotient(output, self._divisor))

    def _scale(self) -> Tensor:
        """By what :meth:`_criterion` multiplies a sum of token losses."""
        one = torch.ones_like(self._divisor)
        return self.session.optimizer.scale(_quotient(one, self._divisor))

    def _batches(self, layouts: Sequence[SequenceLayout]) -> list[MicroBatch]:
        chunk = self.session.config.train.loss_chunk
        return [
            MicroBatch((at.input_ids,), {"layout": at, "labels": at.labels, "loss_chunk": chunk})
            for at in layouts
        ]


def _quotient(total: Tensor, divisor: Tensor) -> Tensor:
    """``total / divisor`` in the dtype of ``total``; computed in fp32 at least, as a number is."""
    wide = torch.promote_types(total.dtype, torch.float32)
    return (total.to(wide) / divisor.to(wide)).to(total.dtype)
