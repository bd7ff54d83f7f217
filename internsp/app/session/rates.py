"""The learning rate of each step: a linear warm-up, then ``optimizer.schedule``.

Every schedule is a closed form of the step, given to torch's ``LambdaLR``. A run that resumes with
another number of steps, warm-up or schedule therefore has at once the rate that a run with these
settings would have at that step. Where torch has the schedule, the values are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from internsp.app.config import Config


def rate_factor(config: Config, steps: int) -> Callable[[int], float]:
    """The learning rate of a step, counted from 0, as a factor of ``optimizer.lr``.

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

    Args:
        steps: length of the run.
    """
    optimizer = config.optimizer
    schedule, warmup, floor = optimizer.schedule, optimizer.warmup_steps, optimizer.min_lr_ratio
    start = warmup
    if schedule == "wsd":
        decay = max(steps // 10, 1) if optimizer.decay_steps is None else optimizer.decay_steps
        start = max(steps - decay, warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule == "constant":
            return 1.0
        if schedule == "inverse_sqrt":
            return max(math.sqrt(max(warmup, 1) / (step + 1)), floor)
        progress = min(max(step - start, 0) / max(steps - start, 1), 1.0)
        if schedule == "cosine":
            cosine = 0.5 * (1 + math.cos(math.pi * progress))
            return floor + (1 - floor) * cosine
        return 1.0 + (floor - 1.0) * progress

    return factor
