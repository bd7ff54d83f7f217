"""Checks of a run's numbers: equal replicas, spikes of loss or gradient norm, early stopping."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

from internsp.app.config import Config
from internsp.app.report.metrics import StepMetrics
from internsp.app.session.session import Session
from internsp.base.bits import checksum
from internsp.errors import ReplicaError
from internsp.failure.objects import Objects
from internsp.wp.parameter import ShardedParameter

_REMEMBERED = 50  # steps whose median a spike is compared with
_FEWEST = 10  # steps before the first spike is reported
_LISTED = 5


def compare_replicas(session: Session, step: int) -> None:
    """Compare, bit for bit, the weights that several ranks hold. Collective; blocks.

    A replica that has drifted (a flipped bit, a device that computes wrongly, a lost message) does
    not show in the loss for a long time: gradients are summed over replicas, weights are not.

    Raises:
        ReplicaError: on every rank; names the weights and the ranks.
    """
    for communicator in session.communicators:
        communicator.wait_until_ready()
    mesh = session.mesh
    mine = [
        (member.name, _part(member), checksum(member.parameter))
        for communicator in session.communicators
        for member in communicator.replicated.all_parameters()
    ]
    found = _differing(Objects(mesh.stage_group).gather(mine), mesh.stage_ranks)
    gathered = Objects().gather(found)  # so that all pipeline stages stop together
    lines = list(dict.fromkeys(line for lines in gathered for line in lines))
    if lines:
        more = f"; and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
        raise ReplicaError(
            f"after step {step} replicas of weights are not equal: {'; '.join(lines[:_LISTED])}"
            f"{more} (this is rank {mesh.rank}). Nothing was saved: look at the machines of the "
            "ranks that differ, and resume from the newest checkpoint"
        )


def _part(member: Any) -> tuple[str, int, int]:
    """Which part of a weight a rank holds; equal for all replicas of that part."""
    if isinstance(member, ShardedParameter):
        return member.axis.name, member.axis.expert_rank, member.rank
    return "", 0, 0


def _differing(everyone: Sequence[Sequence[Any]], ranks: Sequence[int]) -> list[str]:
    """A message for each part of a weight whose bits differ between ranks."""
    holders: dict[Any, dict[int, list[int]]] = {}
    for rank, reported in zip(ranks, everyone, strict=True):
        for name, part, value in reported:
            holders.setdefault((name, part), {}).setdefault(value, []).append(rank)
    lines = []
    for (name, _), by_value in holders.items():
        if len(by_value) > 1:
            most, *few = sorted(by_value.values(), key=len, reverse=True)
            others = ", another on ".join(str(ranks) for ranks in few)
            lines.append(f"{name} differs: one value on ranks {most}, another on {others}")
    return lines


class Spikes:
    """Reports a step whose loss or gradient norm is far above those of the steps before."""

    def __init__(self, config: Config) -> None:
        train = config.train
        self._ratios = {"loss": train.loss_spike, "gradient norm": train.norm_spike}
        self._before: dict[str, deque[float]] = {
            what: deque(maxlen=_REMEMBERED) for what in self._ratios
        }

    def check(self, metrics: StepMetrics) -> str:
        """A message about this step; empty if there is no spike."""
        messages = []
        for what, value in (("loss", metrics.loss), ("gradient norm", metrics.grad_norm)):
            before, ratio = self._before[what], self._ratios[what]
            if value is None or not math.isfinite(value):
                continue  # reported by `finite.remark`
            usual = statistics.median(before) if len(before) >= _FEWEST else math.inf
            if ratio and value > ratio * usual:
                messages.append(
                    f"step {metrics.step}: the {what} is {value:.4g}, {value / usual:.1f} times "
                    f"the median of the {len(before)} steps before"
                )
            before.append(value)
        return "; ".join(messages)


class EarlyStop:
    """Detects that the held-out loss has stopped falling; the same on all ranks, as the loss is."""

    def __init__(self, config: Config) -> None:
        self._patience = config.train.early_stop
        self._best, self._since = math.inf, 0

    def reached(self, eval_loss: float | None) -> bool:
        """Whether to stop, after an evaluation (``None``: there was no evaluation)."""
        if eval_loss is None or not self._patience:
            return False
        if eval_loss < self._best:
            self._best, self._since = eval_loss, 0
        else:
            self._since += 1
        return self._since >= self._patience
