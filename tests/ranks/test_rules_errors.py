"""WP-10: after errors the state is consistent, and no rank waits for a missing collective."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from internsp.config import ActivationCheckpointConfig
from internsp.errors import CollectiveError, OrderError, StructureError
from internsp.mesh import ParallelMesh
from tests.support.few import few
from tests.support.meshes import mesh_of
from tests.support.models import ALL, ROLLING, SOME, Block, Tiny, Twin, raises
from tests.support.ranks import ranks, run_ranks

HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
REENTRANT = ActivationCheckpointConfig(mode="full", reentrant=True)
TIMEOUT = 3.0


class Boom(Exception):
    """An exception of the user's code."""


class Failing(Block):
    """Raises where ``where`` says: before, in the middle or in backward."""

    where = ""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.tail = nn.Linear(width, 4)  # small: its gradient may wait for others when it fails

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "entry":
            raise Boom("at entry")
        x = x + self.wo(torch.tanh(self.q(self.norm(x))))
        if self.where == "middle":
            raise Boom("in the middle")
        y = self.w2(torch.tanh(self.w1(x)))
        if self.where == "backward" and y.requires_grad:
            y.register_hook(self.fail)
        x = x + y
        return x + nn.functional.pad(self.tail(x), (0, 2))

    def fail(self, gradient: Tensor) -> None:
        raise Boom("in backward")


class Classified(Tiny):
    """Its last layer is outside the blocks: it is reduced at the end of backward."""

    def __init__(self) -> None:
        super().__init__(Failing)
        self.classifier = nn.Linear(11, 11)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.classifier(super().forward(ids)).square().sum()


FAILING: tuple[tuple[dict[str, Any], Any], ...] = (
    (ALL, HALF), ({}, None), ({"granularity": "module"}, HALF),
    ({"memory_pool": False}, REENTRANT), (ROLLING, None), (SOME, None),
    ({"overlap": False, "reductions_in_flight": 1}, HALF),
)  # fmt: skip


@pytest.mark.unmeasured
@few("cases", FAILING, 2)
@ranks(2)
def test_the_step_after_an_exception_that_all_ranks_met_is_right(
    world_size: int, cases: list[tuple[dict[str, Any], Any]]
) -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=30)
    for config, checkpoint in cases:
        twin = Twin(Classified, mesh, checkpoint, **config)
        buffers = []
        for where in ("entry", "middle", "backward", "backward", "backward"):
            for block in (0, 3):
                layer: Any = twin.ours.layers[block]  # type: ignore[index]
                layer.where = where
                raises(Boom, lambda twin=twin: twin.ours(*twin.batch()[1]).backward())
                layer.where = ""
                # Nothing of the failed pass remains, and nothing is missing.
                twin.backward()
                twin.check_gradients(f"{config} after {where} of block {block}")
                twin.zero_grad()
            state = twin.communicator.state
            pooled = state.reducer.buffers
            buffers.append(pooled.allocations if state.pool.reuse else pooled.nbytes)
        assert buffers[-1] == buffers[-2], "a failed backward gives its buffers back"
        # A second backward right after a failed one, with no forward between.
        everybody, mine = twin.batch()
        loss = twin.ours(*mine)
        twin.ours.layers[1].where = "backward"  # type: ignore[index, union-attr, assignment]
        raises(Boom, twin.ours(*twin.batch()[1]).backward)
        twin.ours.layers[1].where = ""  # type: ignore[index, union-attr, assignment]
        twin.plain(*everybody).backward()
        loss.backward()
        twin.check_gradients("an older loss after a failed backward")
        # A failed evaluation.
        with torch.no_grad():
            twin.ours.layers[1].where = "middle"  # type: ignore[index, union-attr, assignment]
            raises(Boom, lambda twin=twin: twin.ours(*twin.batch()[1]))
        twin.ours.layers[1].where = ""  # type: ignore[index, union-attr, assignment]
        twin.zero_grad()
        twin.backward()
        twin.check_gradients("after a failed evaluation")
        # Blocks called directly after a failed forward, and after a failed backward.
        for where in ("middle", "backward"):
            twin.ours.layers[1].where = where  # type: ignore[index, union-attr, assignment]
            raises(Boom, lambda twin=twin: twin.ours(*twin.batch()[1]).backward())
            twin.ours.layers[1].where = ""  # type: ignore[index, union-attr, assignment]
            twin.zero_grad()
            x = torch.ones(1, 3, 6, dtype=torch.float64)
            for model, rows in ((twin.plain, world_size), (twin.ours, 1)):
                model.blocks(x.expand(rows, -1, -1) * 1.0).square().sum().backward()  # type: ignore[operator]
            twin.check_gradients(f"{config}, blocks after a failed pass ({where})")


class Short(Tiny):
    """May skip its last blocks."""

    last = 4

    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.last]:
            x = layer(x)
        return x


def alone(rank: int, world_size: int, where: str, other: str, block: int) -> list[str]:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=TIMEOUT)
    twin = Twin(partial(Short, Failing), mesh)
    layer: Any = twin.ours.layers[block]  # type: ignore[index]
    layer.where = "middle"
    raises(Boom, lambda: twin.ours(*twin.batch()[1]))
    layer.where = ""
    twin.backward()
    twin.check_gradients("after a failure that all ranks met")
    if where == "skipped" and rank == 0:
        twin.ours.last = 3
    layer.where = where if rank == 0 else other
    start, found = time.monotonic(), []
    for _ in range(3):  # a loop that catches everything and continues
        try:
            twin.ours(*twin.batch()[1]).backward()
        except (Boom, CollectiveError, OrderError) as error:
            found.append(f"{type(error).__name__}: {error}")
        layer.where = ""
    took = time.monotonic() - start
    assert took < 3 * TIMEOUT, f"{took:.1f} s"
    with pytest.raises(ValueError, match="not registered"):  # it was aborted
        dist.get_rank(mesh.weight_group)
    return found


@pytest.mark.thorough(2)
def test_a_failure_of_one_rank_ends_in_clear_errors_on_all_and_no_one_hangs() -> None:
    for where in ("middle", "backward", "skipped"):
        failed, waiting = run_ranks(alone, 2, where, "", 1)
        assert failed[0].startswith("OrderError" if where == "skipped" else "Boom"), failed
        assert "rank 0 failed alone" in failed[1], failed
        assert "Boom" in failed[1] or where != "middle", failed
        assert failed[2] == failed[1], "the first cause, again"
        assert len(waiting) == 3, waiting
        assert "rank 1" in waiting[0], waiting
        if where == "middle":
            assert "rank 0 failed first: Boom in forward: in the middle" in waiting[0], waiting
        assert "layers." in waiting[0] or where == "skipped", waiting
        assert waiting[2] == waiting[1] == waiting[0], "the first cause, again"


@pytest.mark.thorough(1)
def test_ranks_that_failed_in_different_places_do_not_go_on_together() -> None:
    results = run_ranks(alone, 2, "entry", "middle", 1)
    for rank, found in enumerate(results):
        assert found[0].startswith("Boom"), found
        assert found[1].startswith("CollectiveError"), found
        assert f"rank {rank}" in found[1], found
        assert found[2] == found[1], found


@ranks(2)
def test_a_second_model_on_the_mesh_of_one_that_ended_says_that_the_groups_are_gone(
    rank: int,
) -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=TIMEOUT)
    first, second = (Twin(partial(Tiny, Failing), mesh) for _ in range(2))
    kept = first.ours(*first.batch()[1])
    layer: Any = first.ours.layers[1]  # type: ignore[index]
    layer.where = "middle" if rank == 0 else ""
    with pytest.raises(Boom if rank == 0 else CollectiveError):
        first.ours(*first.batch()[1])
    layer.where = ""
    told = raises(CollectiveError, lambda: first.ours(*first.batch()[1]), "rank 0")
    for again in (kept.backward, first.communicator.prefetch_all):
        assert raises(CollectiveError, again) == told, "the first cause again"
    with pytest.raises((ValueError, RuntimeError)):
        second.ours(*second.batch()[1])
    start = time.monotonic()
    for _ in range(2):
        raises(CollectiveError, lambda: second.ours(*second.batch()[1]), f"rank {rank}")
    assert time.monotonic() - start < 2 * TIMEOUT


class Sparing(Failing):
    """Has a weight that a pass may not use."""

    spared = False

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.spare = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if self.spared else x + self.spare(x)


@ranks(2)
def test_a_failed_pass_leaves_no_mark_of_use_and_no_mark_of_presence() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for config, checkpoint in (({}, None), (ALL, HALF), (ROLLING, None)):
        twin = Twin(partial(Tiny, Sparing), mesh, checkpoint, **config)
        first, last = twin.ours.layers[0], twin.ours.layers[3]  # type: ignore[index]
        # The first all-gather could not be launched: its byte range in the slot is not valid.
        local = first.w1.weight._local_tensor
        kept = local.data
        local.data = kept.float()
        raises(StructureError, lambda twin=twin: twin.ours(*twin.batch()[1]), "layers.0.w1", "cast")
        local.data = kept
        twin.backward()
        twin.check_gradients(f"{config}: after a gather that was never launched")
        twin.zero_grad()
        first.where = "backward"
        raises(Boom, lambda twin=twin: twin.ours(*twin.batch()[1]).backward())
        first.where = ""
        # The last block's spare weight was used in the failed pass; from now on it is not.
        last.spared = twin.plain.layers[3].spared = True  # type: ignore[index, union-attr]
        twin.backward()
        twin.check_gradients(f"{config}: a weight that only the failed pass used")


@ranks(2)
def test_a_trace_or_a_fake_forward_is_refused_and_leaves_the_model_as_it_was() -> None:
    twin = Twin(Tiny, mesh_of(2))
    mine = twin.batch()[1]
    raises(StructureError, lambda: torch.jit.trace(twin.ours, mine), "torch.jit.trace")
    with FakeTensorMode(allow_non_fake_inputs=True):
        raises(StructureError, lambda: twin.ours(*mine), "FakeTensorMode", "full_params")
    twin.backward()
    twin.check_gradients("after what was refused")
