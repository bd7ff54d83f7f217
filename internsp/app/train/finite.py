"""What a run does about values that are not finite: in gradients and in losses."""

from __future__ import annotations

import math

from internsp.app.session.session import Session
from internsp.errors import NotFiniteError


def remark(session: Session, step: int, loss: float) -> str:
    """A message about gradients or a loss that were not finite in ``step``; empty if all were."""
    optimizer = session.optimizer
    if optimizer.not_finite is not None:
        return (
            f"step {step} was skipped: gradients are {optimizer.not_finite} "
            f"({optimizer.skipped_in_a_row} in a row, train.max_skipped_steps = "
            f"{session.config.train.max_skipped_steps})"
        )
    if not math.isfinite(loss) and not optimizer.skipped:
        return f"step {step}: the loss is {loss}, but its gradients are finite: the step was taken"
    return ""


def too_many_skipped(session: Session, step: int) -> NotFiniteError | None:
    """The error that ends a run after ``train.max_skipped_steps``; the same on all ranks."""
    optimizer, most = session.optimizer, session.config.train.max_skipped_steps
    if optimizer.skipped_in_a_row < most:
        return None
    return NotFiniteError(
        f"gradients were not finite in {most} step{'s' * (most > 1)} in a row, the last of them "
        f"step {step}: {optimizer.not_finite}. Weights and optimizer are those of before: look at "
        "the data and the machine of that rank, lower optimizer.lr, or raise "
        "train.max_skipped_steps"
    )
