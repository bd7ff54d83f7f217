"""What a run does about values that are not finite: in gradients, losses and saved weights."""

from __future__ import annotations

import math

from torch import Tensor

from internsp.app.session.session import Session
from internsp.errors import NotFiniteError
from internsp.optim.finite import gather_not_finite, not_finite
from internsp.optim.slices import Slices
from internsp.wp.parameter import Member


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


def require_finite(session: Session, consequence: str) -> None:
    """Check every weight and all optimizer state on all ranks. Collective; blocks.

    Args:
        consequence: what is not done because of it; the end of the error message.

    Raises:
        NotFiniteError: some value is not finite; names parameters and ranks. The same error on
            every rank.
    """
    members: list[Member] = []
    bad: list[Tensor] = []
    mesh = session.mesh
    for communicator, optimizer in zip(session.communicators, session.optimizers, strict=True):
        communicator.wait_until_ready()
        own = communicator.replicated.all_parameters()
        held: dict[str, list[Tensor]] = {m.name_in_model: [m.storage] for m in own}
        for name, entry in optimizer.local_state_dict()["state"].items():
            for value in entry.values():
                if isinstance(value, Slices):
                    held[name] += value.parts.values()
        members += own
        bad += [not_finite(tensors, mesh.device) for tensors in held.values()]
    found = gather_not_finite(mesh, members, bad)
    if found.parameters:
        raise NotFiniteError(f"weights or optimizer state are {found}: {consequence}")
