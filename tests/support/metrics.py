"""A row of metrics with usual values, for tests that check only a few of them."""

from __future__ import annotations

from typing import Any

from internsp.app.report.metrics import StepMetrics


def step(number: int, loss: float = 2.5, **changes: Any) -> StepMetrics:
    """The row of step ``number``."""
    values = {
        "grad_norm": 0.75,
        "lr": 3e-4,
        "tokens": 1000,
        "step_seconds": 0.5,
        "tokens_per_second": 2000.0,
        "exposed_comm_seconds": 0.05,
        "gathered_bytes": 4096,
        "reduced_bytes": 2048,
        "peak_memory_bytes": 1 << 20,
    }
    return StepMetrics(step=number, loss=loss, **{**values, **changes})
