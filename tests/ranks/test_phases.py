"""A step's compute is colored by phase, also in a recomputed block after its recompute."""

from __future__ import annotations

from functools import partial

import pytest

from internsp.app.report.timeline import build_timeline
from internsp.config import ActivationCheckpointConfig
from internsp.mesh import ParallelMesh
from tests.support.models import ALL, Tiny, Twin
from tests.support.ranks import ranks


@pytest.mark.thorough(2)
@pytest.mark.parametrize("reentrant", [False, True])
@ranks(2)
def test_every_recomputed_block_has_a_recompute_and_then_a_backward(reentrant: bool) -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    checkpoint = ActivationCheckpointConfig(mode="full", blocks=[0, 2], reentrant=reentrant)
    for config in ({}, ALL):
        twin = Twin(partial(Tiny, layers=4), mesh, checkpoint, **config)
        twin.backward()
        twin.trace.clear()
        twin.backward()
        lane = build_timeline(twin.trace.events)["compute"]
        found = [(bar.unit, bar.phase) for bar in lane if bar.kind == "COMPUTE"]
        order = [place for i, place in enumerate(found) if place not in found[:i]]
        wanted = [(f"layers.{i}", "forward") for i in range(4)]
        for block in (3, 2, 1, 0):
            wanted += [(f"layers.{block}", "recompute")] * (block in (0, 2))
            wanted.append((f"layers.{block}", "backward"))
        order = [place for place in order if place[0].startswith("layers.")]
        assert order == wanted, f"{config}: {order}"
        last = {unit: phase for unit, phase in found if unit.startswith("layers.")}
        assert set(last.values()) == {"backward"}, "nothing follows a block's backward"
