"""The learning rate of each step: a linear warm-up, then ``optimizer.schedule``.

Every schedule is a closed form of the step, given to torch's ``LambdaLR``. A run that resumes with
another number of steps, warm-up or schedule therefore has at once the rate that a run with these
settings would have at that step. Where torch has the schedule, the values are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from internsp.app.config import Config


class RateFactor:
    """The learning rate of a step as a factor of ``optimizer.lr``.

    ============== =========================================================== =================
    schedule       after the warm-up                                           torch
    ============== =========================================================== =================
    constant       1                                                           ConstantLR
    linear         a line down to ``min_lr_ratio`` at the last step            LinearLR
    cosine         half a cosine down to it (arXiv 1608.03983)                 CosineAnnealingLR
    wsd            1, then a line down to it within the last ``decay_steps``
                   (warm-up, stable, decay; MiniCPM, arXiv 2404.06395)         ConstantLR, LinearLR
    inverse_sqrt   ``sqrt(warmup / step)``, not below ``min_lr_ratio``
                   (arXiv 1706.03762)
    ============== =========================================================== =================
    """

    def __init__(self, config: Config, steps: int | None = None) -> None:
        """Build the schedule; ``steps`` is the length of the run, if it is not ``train.steps``."""
        optimizer = config.optimizer
        self.warmup = optimizer.warmup_steps
        self.steps = config.train.steps if steps is None else steps
        self.floor = optimizer.min_lr_ratio
        given = optimizer.decay_steps
        self.decay = max(self.steps // 10, 1) if given is None else given
        shapes: dict[str, Callable[[int], float]] = {
            "constant": lambda step: 1.0,
            "linear": lambda step: self._down(self._progress(step, self.warmup)),
            "cosine": self._cosine,
            "wsd": lambda step: self._down(self._progress(step, self.steps - self.decay)),
            "inverse_sqrt": self._inverse_sqrt,
        }
        self._shape = shapes[optimizer.schedule]

    def __call__(self, step: int) -> float:
        """The factor of step ``step``, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return self._shape(step)

    def _progress(self, step: int, start: int) -> float:
        """Position of ``step``: 0 at ``start``, 1 at the end of the run."""
        start = max(start, self.warmup)
        return min(max(step - start, 0) / max(self.steps - start, 1), 1.0)

    def _down(self, progress: float) -> float:
        return 1.0 + (self.floor - 1.0) * progress

    def _cosine(self, step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * self._progress(step, self.warmup)))
        return self.floor + (1 - self.floor) * cosine

    def _inverse_sqrt(self, step: int) -> float:
        return max(math.sqrt(max(self.warmup, 1) / (step + 1)), self.floor)
