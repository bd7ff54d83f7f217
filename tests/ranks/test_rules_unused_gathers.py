"""WP-3 in reverse: an optimizer writes no shard that an all-gather may still be reading."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from internsp.mesh import ParallelMesh
from internsp.optim import ZeroOptimizer
from tests.support.models import Tiny, Twin
from tests.support.ranks import ranks


@pytest.mark.thorough(2)
@ranks(2)
def test_a_gather_that_nobody_used_arrives_before_its_shard_is_written() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for zero in (False, True):
        twin = Twin(Tiny, mesh)
        optimizer: Any = (
            ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.1)
            if zero
            else torch.optim.SGD(twin.ours.parameters(), lr=0.1)
        )
        plain = torch.optim.SGD(twin.plain.parameters(), lr=0.1)
        state = twin.communicator.state
        for _ in range(2):
            twin.backward()
            block = twin.communicator.blocks[0]
            twin.communicator.queue.slots.contents.clear()
            twin.communicator.prefetch_pass("forward")  # and the pass does not follow
            flying = len(state.handles)
            assert flying > sum(w.needs_gather for w in block.weights), "embedding and first block"
            twin.trace.clear()
            optimizer.step()
            plain.step()
            assert not state.handles
            waits = [line for line in twin.trace.lines() if line.startswith("WAIT settle")]
            assert len(waits) == flying
            lines = twin.trace.lines(("WAIT", "STEP"))
            if zero:
                first = next(i for i, line in enumerate(lines) if line.startswith("STEP"))
                last = max(i for i, line in enumerate(lines) if line.startswith("WAIT settle"))
                assert last < first, "the wait comes before the write"
            twin.check_parameters(f"zero {zero}")
            twin.plain.zero_grad()
            optimizer.zero_grad()


@ranks(2)
def test_a_gather_of_older_values_arrives_before_newer_ones_are_sent_to_its_place() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    twin = Twin(Tiny, mesh)
    communicator, state = twin.communicator, twin.communicator.state
    communicator.prefetch_pass("forward")
    older = list(state.handles.values())
    assert len(older) > len(communicator.blocks[0].weights)
    communicator.invalidate()
    communicator.queue.slots.contents.clear()
    communicator.prefetch_pass("forward")
    assert all(handle.work is None for handle in older), "they have arrived"
    assert not set(map(id, older)) & set(map(id, state.handles.values()))
    twin.backward()
    twin.check_gradients("gathered twice in a row")
