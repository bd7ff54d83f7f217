"""``unshard``, ``reshard`` and ``prefetch_all``: gathers before a step, and the same values."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import internsp
from internsp.config import ActivationCheckpointConfig
from internsp.errors import OrderError, StaleWeightError, StructureError
from internsp.mesh import ParallelMesh
from internsp.optim import ZeroOptimizer
from tests.support.compare import close
from tests.support.models import ALL, Tiny, Twin, raises
from tests.support.ranks import ranks

HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
CASES: tuple[tuple[dict[str, Any], ActivationCheckpointConfig | None, int], ...] = (
    ({}, None, 2),
    ({"prefetch_depth": 0, "memory_pool": False}, HALF, 1),
    ({"gather_before": "rolling", "keep_unsharded": 1}, None, 3),
    ({"granularity": "module", **ALL}, HALF, 2),
)


def gathered(twin: Twin) -> list[str]:
    """Weights gathered since the last call."""
    return [line.rpartition(" ")[2] for line in twin.lines("AG")]


@pytest.mark.thorough(3)
@ranks(2)
def test_what_is_prefetched_is_not_gathered_again_and_every_step_is_right() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for options, checkpoint, blocks in CASES:
        twin = Twin(partial(Tiny, layers=5), mesh, checkpoint, **options)
        ours = ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.1)
        plain = torch.optim.SGD(twin.plain.parameters(), lr=0.1)
        twin.lines()
        twin.backward()
        usual = gathered(twin)
        twin.zero_grad()
        for step in range(3):
            twin.communicator.prefetch_all()
            early = gathered(twin)
            whole = {name for name in early if name.endswith("w1.weight")}
            assert {"embed.weight", "head.weight"} <= set(early)
            assert len(whole) == blocks, f"{options}: {early}"
            twin.backward()
            assert sorted(early + gathered(twin)) == sorted(usual), f"{options} step {step}"
            ours.step()
            plain.step()
            twin.zero_grad()
        twin.check_parameters(str(options))


@pytest.mark.thorough(1)
@ranks(2)
def test_resharded_weights_are_gathered_again_wherever_they_are_used_next() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for options, checkpoint, _ in CASES:
        twin = Twin(Tiny, mesh, checkpoint, **options)
        pool = twin.communicator.state.pool
        everybody, mine = twin.batch()
        twin.plain(*everybody).backward()
        loss = twin.ours(*mine)
        before = pool.live_nbytes()
        twin.lines()
        twin.communicator.reshard(twin.ours)  # between a forward and its backward
        assert pool.live_nbytes() == (before if options.get("memory_pool", True) else 0)
        loss.backward()
        assert "layers.3.w1.weight" in gathered(twin), f"{options}: was in its slot"
        twin.check_gradients(str(options))
        twin.zero_grad()
        with twin.communicator.unchanged(), torch.no_grad():
            everybody, _ = twin.batch()
            wanted = twin.plain(*everybody)
            for again in range(3):
                if again == 2:
                    twin.communicator.reshard(twin.ours.head)
                twin.lines()
                close(twin.ours(*everybody), wanted, f"{options}: evaluation", 1e-10)
                assert ("head.weight" in gathered(twin)) == (again != 1), f"{options} {again}"


@ranks(2)
def test_one_part_is_unsharded_and_mistakes_are_told_and_leave_order_behind() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    twin = Twin(Tiny, mesh)
    communicator = twin.communicator
    twin.lines()
    communicator.unshard(twin.ours.layers[1].wo)  # type: ignore[index]
    communicator.unshard(twin.ours.head)
    names = {f"layers.1.{n}.weight" for n in ("q", "wo", "w1", "w2")} | {"head.weight"}
    assert set(gathered(twin)) == names
    twin.backward()
    found = gathered(twin)
    assert "head.weight" not in found
    assert found.count("layers.1.w1.weight") == 1, "in backward alone"
    twin.check_gradients("after unshard")
    twin.zero_grad()
    told = raises(OrderError, lambda: communicator.unshard(twin.ours.layers[2]))  # type: ignore[index]
    assert "layers.2 shares its slot" in told
    assert "embed, layers.0, layers.1, head" in told
    for call in (communicator.unshard, communicator.reshard):
        raises(StructureError, partial(call, twin.ours.norm), "no sharded weight", "RMSNorm")
        raises(StructureError, partial(call, nn.Linear(2, 2)), "no sharded weight")

    handle = twin.ours.layers[1].register_forward_pre_hook(  # type: ignore[index]
        lambda *_: communicator.prefetch_all()
    )
    raises(OrderError, twin.backward, "between two passes")
    handle.remove()
    twin.zero_grad()

    communicator.prefetch_all()
    with torch.no_grad():
        for model in (twin.plain, twin.ours):
            model.get_parameter("layers.1.w1.weight").mul_(0.5)
    raises(StaleWeightError, twin.backward, "layers.1.w1.weight", "after the last write")
    twin.zero_grad()
    for what in ("the step after an error", "the next"):
        twin.backward()
        twin.check_gradients(what)
        twin.zero_grad()
        communicator.prefetch_all()
        assert communicator.state.queue.slots.flying
        with internsp.full_params(twin.ours, write="shards"):
            assert not communicator.state.queue.slots.flying, "they would read what is written"
        communicator.reshard(twin.ours)


@ranks(2)
def test_a_model_thrown_away_with_gathers_in_flight_leaves_its_mesh_usable(rank: int) -> None:
    """gloo stops reading from a connection when a message arrives for a destroyed work handle."""
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    store = dist.distributed_c10d._get_default_store()
    for number in range(2):
        twin = Twin(partial(Tiny, layers=2), mesh)
        twin.trace.enabled = False  # otherwise a thread waits for them, and keeps them alive
        if rank == number:
            twin.communicator.prefetch_all()
            del twin
            gc.collect()
            store.set(f"thrown away {number}", "")
        else:
            store.wait([f"thrown away {number}"])
            twin.communicator.prefetch_all()
            del twin
    twin = Twin(partial(Tiny, layers=2), mesh)
    twin.backward()
    twin.check_gradients("the next model")
