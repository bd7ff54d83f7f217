"""WP-1, WP-6: after the second step no slot or reduce-scatter buffer is allocated again.

Counted with torch's profiler, by size: the model is built so that no activation, gradient or sum is
as large as any of them (rows are odd, so that a padded shard is larger than its gradient). The
reduced gradient is not a buffer: it becomes the shard's ``.grad``, which belongs to the user.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from internsp.config import ActivationCheckpointConfig
from internsp.mesh import ParallelMesh
from internsp.schedule.chunk import aligned
from internsp.wp.collectives import Collectives, WorkHandles
from tests.support.models import ROLLING, SOME, Block, Tiny, Twin
from tests.support.ranks import run_ranks

HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
WIDTH = 7


class Odd(Block):
    """Every weight has an odd number of rows."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.w1 = torch.nn.Linear(WIDTH, 19)
        self.w2 = torch.nn.Linear(19, WIDTH)


def allocated(work: Any) -> Counter[int]:
    """How often a block of so many bytes was allocated while ``work`` ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [e.nbytes() for e in events if e.name() == "[memory]"]
    return Counter(nbytes for nbytes in sizes if nbytes > 0)


def without_copies(collectives: Collectives) -> None:
    """All-gather small weights one by one: gloo's collective for several allocates and copies."""

    transport = collectives.transport

    def send_all(outputs: list[Tensor], shards: list[Tensor]) -> WorkHandles:
        pairs = zip(outputs, shards, strict=True)
        return WorkHandles([transport.all_gather(o, s) for o, s in pairs])

    transport.all_gathers = send_all  # type: ignore[method-assign]


def counted(rank: int, world_size: int) -> list[tuple[str, int, dict[int, int]]]:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    found = []
    for config, checkpoint in (
        ({}, None), (ROLLING, None), (ROLLING, HALF), ({"granularity": "module"}, HALF),
        (SOME, None), ({"memory_pool": False}, None),
    ):  # fmt: skip
        made = partial(Tiny, Odd, layers=5, width=WIDTH)
        twin = Twin(made, mesh, checkpoint, **config)  # type: ignore[arg-type]
        without_copies(twin.communicator.state.collectives)
        optimizer = torch.optim.SGD(twin.ours.parameters(), lr=0.1)

        def step(twin: Twin = twin, optimizer: Any = optimizer) -> None:
            twin.ours(*twin.batch()[1]).backward()
            optimizer.step()
            optimizer.zero_grad()

        pool = twin.communicator.state.pool
        first = allocated(step)
        buffers = twin.communicator.state.reducer.buffers._free if pool.reuse else {}
        ours = {numel * dtype.itemsize for numel, dtype in buffers}
        ours |= {slot.nbytes for slot in pool.slots}
        if not pool.reuse:  # each weight has its own memory
            weights = [w for unit in twin.communicator.blocks for w in unit.weights]
            ours |= {aligned(weight.slot_nbytes) for weight in weights}
        step()
        later = allocated(lambda step=step: [step() for _ in range(3)])
        found.append((
            f"{config} {checkpoint}",
            sum(first[nbytes] for nbytes in ours),
            {nbytes: later[nbytes] for nbytes in ours if later[nbytes]},
        ))  # fmt: skip
    return found


@pytest.mark.thorough(7)
@pytest.mark.unmeasured
def test_after_the_second_step_no_slot_packed_input_or_received_piece_is_allocated() -> None:
    for ranks in run_ranks(counted, 2):
        *pooled, without = ranks
        for what, first, later in pooled:
            assert first > 0, f"{what}: the first step fills the pool, and the profiler sees it"
            assert later == {}, f"{what}: (bytes: times) {later}"
        assert without[2], "without the pool, weights are allocated again and again"
