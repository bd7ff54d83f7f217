"""WP-11, WP-14: a block asks for all its weights at once, where nobody keeps a record of it."""

from __future__ import annotations

from typing import Any

import torch

from internsp.config import ActivationCheckpointConfig
from internsp.errors import StaleWeightError
from internsp.mesh import ParallelMesh
from tests.support.models import ALL, Tiny, Twin, raises
from tests.support.ranks import run_ranks

HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)


def unrecorded(rank: int, world_size: int) -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    cases: tuple[tuple[dict[str, Any], Any], ...] = (
        ({}, None), ({}, HALF), ({"overlap": False}, None), ({"trigger": "rolling"}, HALF),
    )  # fmt: skip
    for config, checkpoint in cases:
        twin = Twin(Tiny, mesh, checkpoint, **(ALL | config))
        twin.trace.enabled = False
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (twin.plain, twin.ours)]
        for step in range(3):
            for _ in range(2):
                twin.backward()
            twin.check_gradients(f"{config} {checkpoint}, step {step}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        loss = twin.ours(*twin.batch()[1])
        with torch.no_grad():
            twin.ours.layers[1].w1.weight.add_(1.0)  # type: ignore[index, union-attr, operator]
        raises(StaleWeightError, loss.backward, "layers.1.w1")


def test_gradients_are_right_and_a_stale_weight_is_found_without_a_trace() -> None:
    run_ranks(unrecorded, 2)
