"""Errors of predictions in sum: mean, quantiles, order inside groups, and regret. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from tools.planner.score import Prediction, by_group

FEWEST = 4  # rows of a group whose order counts


@dataclass(frozen=True)
class Accuracy:
    """Absolute relative errors of seconds, as shares.

    Attributes:
        rows: number of predictions.
        tau: Kendall's rank correlation of tokens/s a device inside groups, mean of groups with at
            least four rows; ``None``: there is none.
    """

    rows: int
    mean: float
    median: float
    p90: float
    worst: float
    tau: float | None


def accuracy(found: Sequence[Prediction]) -> Accuracy | None:
    """Of all predictions with an error; ``None``: there is none."""
    errors = sorted(abs(each.error) for each in found if each.error is not None)
    if not errors:
        return None
    return Accuracy(
        len(errors), mean(errors), median(errors), quantile(errors, 0.9), errors[-1], _tau(found)
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the sorted values are."""
    at = share * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (at - low) * (values[high] - values[low])


def _rates(found: Sequence[Prediction]) -> list[tuple[float, float]]:
    """(measured, predicted) tokens a second and device."""
    return [
        (each.tokens / each.row.seconds, each.tokens / each.seconds)
        for each in found
        if each.row.seconds and each.seconds
    ]


def _tau(found: Sequence[Prediction]) -> float | None:
    each = [kendall(_rates(own)) for own in by_group(found) if len(own) >= FEWEST]
    taus = [one for one in each if one is not None]
    return mean(taus) if taus else None


def kendall(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's tau-b of pairs; ``None`` if all values of one side are equal."""
    agree = left = right = 0
    for i, (a, b) in enumerate(pairs):
        for c, d in pairs[:i]:
            sign = ((a > c) - (a < c)) * ((b > d) - (b < d))
            agree += sign
            left += a != c
            right += b != d
    if not left or not right:
        return None
    return agree / (left * right) ** 0.5


@dataclass(frozen=True)
class Choice:
    """What prediction chooses among the layouts of one task.

    Attributes:
        chosen, best: the layout with the fewest predicted and measured seconds.
        place: of ``chosen`` by measured seconds, from 1 on.
        layouts: of the task.
    """

    chosen: Prediction
    best: Prediction
    place: int
    layouts: int

    @property
    def loss(self) -> float:
        """How much slower the chosen one is, as a share."""
        return (self.chosen.row.seconds or 0.0) / (self.best.row.seconds or 1.0) - 1


@dataclass(frozen=True)
class Regret:
    """What choosing by prediction costs.

    Attributes:
        tasks: number of groups of layouts of one task.
        mean: how much slower the predicted best is than the measured best, mean of tasks.
        among_three: share of tasks whose predicted best is among the three measured best.
    """

    tasks: int
    mean: float
    among_three: float


def choices(found: Sequence[Prediction]) -> list[Choice]:
    """Of tasks with at least four layouts: same group, devices, sequence, batch and dtype."""
    tasks: dict[tuple[str, ...], list[Prediction]] = {}
    for each in found:
        if each.error is not None:
            key = (each.row.group, *(each.row.text(column) for column in _TASK))
            tasks.setdefault(key, []).append(each)
    made = []
    for own in tasks.values():
        if len(own) < FEWEST:
            continue
        chosen = min(own, key=lambda each: each.seconds or 0.0)
        took = chosen.row.seconds or 0.0
        faster = sum((each.row.seconds or 0.0) < took for each in own)
        best = min(own, key=lambda each: each.row.seconds or 0.0)
        made.append(Choice(chosen, best, faster + 1, len(own)))
    return made


def regret(found: Sequence[Prediction]) -> Regret | None:
    """Of all :func:`choices`; ``None``: there is none."""
    made = choices(found)
    if not made:
        return None
    return Regret(
        len(made), mean(one.loss for one in made), mean(one.place <= 3 for one in made)
    )


_TASK = ("gpus", "seq_len", "global_batch", "dtype", "layers", "software")
