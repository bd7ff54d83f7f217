"""Paired rounds: each runs every variant; their order, and comparison of losses and times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


def order(variants: Sequence[T], number: int) -> list[T]:
    """The order of a round: every second round is the reverse of the one before, and each pair is
    rotated, so that neither slow drift nor the preceding variant biases one variant."""
    first = number // 2 % len(variants)
    turned = [*variants[first:], *variants[:first]]
    return turned[::-1] if number % 2 else turned


@dataclass(frozen=True)
class Spread:
    """Median and range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Median, and the quartiles (of fewer than four values: the extremes)."""
        if len(values) < 4:
            return cls(statistics.median(values), min(values), max(values))
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high)


@dataclass(frozen=True)
class Agreement:
    """Allowed relative differences between losses of the same training, due to bf16 rounding.

    Attributes:
        first: for the first loss, which tests weights, data and forward.
        decrease: for the decrease of the loss since the first step, which tests gradients and their
            scale: a sum instead of a mean is wrong by a factor of the number of ranks.
        each: for every loss.
        seen: the decrease is compared only if it is more than this share of the first loss.
    """

    first: float = 2e-3
    decrease: float = 5e-2
    each: float = float("inf")
    seen: float = 0.0

    def refuses(self, losses: Sequence[float], reference: Sequence[float]) -> str | None:
        """Why two loss curves are not the same training, or ``None`` if they agree.

        Args:
            losses: at most as many as the reference's. NaN never agrees.
        """
        if not losses or len(losses) > len(reference):
            return f"{len(losses)} losses where the reference has {len(reference)}"
        start, expected = losses[0], reference[0]
        if not abs(start - expected) <= self.first * abs(expected):
            return f"first loss {start:.6g}, reference {expected:.6g}"
        for step in range(1, len(losses)):
            loss, wanted = losses[step], reference[step]
            if not abs(loss - wanted) <= self.each * abs(wanted):
                return f"the loss of step {step} is {loss:.6g}, the reference's {wanted:.6g}"
            fell, should = start - loss, expected - wanted
            unseen = abs(should) < self.seen * abs(expected)
            if not unseen and not abs(fell - should) <= self.decrease * abs(should):
                return (
                    f"the loss fell by {fell:.4g} in {step} steps, the reference's by {should:.4g}"
                )
        return None
