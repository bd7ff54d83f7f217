"""Dynamic loss scale for fp16 (Micikevicius et al., arXiv 1710.03740)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from internsp.optim.verdict import Outcome


class LossScaler:
    """A factor on the loss that keeps fp16 gradients within their range.

    After a step with a gradient that is not finite the factor falls; after ``growth_interval``
    good steps in a row it rises. It does not communicate: the optimizer calls :meth:`update` with
    the same verdict on every rank, so that the factor stays the same on all of them.

    Args:
        init_scale: the first factor. Powers of two make scaling and unscaling exact.
        growth_factor, backoff_factor: how it rises (above 1) and falls (between 0 and 1).
        growth_interval: good steps in a row before it rises.
        min_scale, max_scale: its bounds.

    Raises:
        ValueError: for settings with which the scale could not adapt.
    """

    scale, good_steps, skipped_steps = Outcome[float](), Outcome[int](), Outcome[int]()
    unread: Callable[[], None] | None = None  # calls `update`, see `settle`

    def __init__(
        self,
        init_scale: float = 65536.0,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
    ) -> None:
        if growth_factor <= 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise ValueError(
                f"loss scale: growth_factor={growth_factor} must be above 1, backoff_factor="
                f"{backoff_factor} between 0 and 1, growth_interval={growth_interval} at least 1"
            )
        if not 0 < min_scale <= init_scale <= max_scale:
            raise ValueError(
                f"loss scale: 0 < min_scale={min_scale} <= init_scale={init_scale} <= "
                f"max_scale={max_scale} must hold"
            )
        self.scale = float(init_scale)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.min_scale = min_scale
        self.max_scale = max_scale
        self.good_steps = 0
        self.skipped_steps = 0

    def scaled(self, loss: Tensor) -> Tensor:
        """``loss`` times the scale, in fp32 or wider (65536 is beyond fp16)."""
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.scale

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step. ``overflow``: whether a gradient was not finite; it must be
        the same on every rank."""
        if overflow:
            self.skipped_steps += 1
            self.good_steps = 0
            self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.good_steps = 0
            self.scale = min(self.scale * self.growth_factor, self.max_scale)

    def state_dict(self) -> dict[str, float]:
        """Scale and counters."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from :meth:`state_dict`."""
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
        self.skipped_steps = int(state["skipped_steps"])
