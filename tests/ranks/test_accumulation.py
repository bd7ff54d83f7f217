"""Full accumulation: unsharded gradients are summed over micro-batches and reduced once.

Exactly.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from internsp.base.trace import Trace
from internsp.config import ActivationCheckpointConfig
from internsp.dtensor.unfinished import UnfinishedGradient
from internsp.errors import GradientError
from internsp.mesh import ParallelMesh
from internsp.optim import ZeroOptimizer
from internsp.pipeline import ComputeAction, SchedulerHook
from internsp.schedule.simulate import simulate
from tests.support.compare import TOLERANCE
from tests.support.few import some
from tests.support.models import ALL, SOME, Tiny, Twin, raises
from tests.support.pipeline import Case as PipelineCase
from tests.support.pipeline import batches, compare, make
from tests.support.ranks import ranks, run_ranks
from tests.support.zero import Case, batch, furthest, setup, share, train

FULL = ActivationCheckpointConfig(mode="full")
HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
REENTRANT = ActivationCheckpointConfig(mode="full", reentrant=True)
CASES: tuple[tuple[dict[str, Any], ActivationCheckpointConfig | None], ...] = (
    ({}, None), ({"granularity": "module"}, HALF),
    ({"overlap": False, "reductions_in_flight": 1}, FULL),
    (SOME, REENTRANT), (ALL, None), ({"memory_pool": False}, None),
)  # fmt: skip


def step(twin: Twin, micro_batches: int = 3) -> None:
    with twin.communicator.unchanged():
        for _ in range(micro_batches - 1):
            with twin.communicator.no_sync():
                twin.backward()
            for parameter in twin.ours.parameters():
                assert parameter.grad is not None, "zero_grad() must find something"
                with pytest.raises(GradientError, match="outside no_sync"):
                    parameter.grad.sum()
        twin.backward()


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("world_size", "weight", "cases"),
    [
        (2, 1, CASES[1::2]), (4, 2, CASES[:2]),
        pytest.param(2, 1, CASES[::2], marks=pytest.mark.thorough(2)),
        pytest.param(2, 2, CASES, marks=pytest.mark.thorough(7)),
        pytest.param(4, 2, CASES[2:], marks=pytest.mark.thorough(8)),
    ],
    ids=["replicas", "both", "replicas, others", "shards", "both, others"],
)
@ranks()
def test_gradients_of_a_plain_loop_equal_one_process_and_are_sent_once(
    world_size: int, weight: int, cases: list[Any]
) -> None:
    mesh = ParallelMesh.create(weight=weight, device_type="cpu", timeout_seconds=20)
    for config, checkpoint in cases:
        twin = Twin(Tiny, mesh, checkpoint, accumulation="full", **config)
        communicator, kinds = twin.communicator, ("AG", "RS", "FINISH")
        assert communicator.plan is not None
        planned = simulate(communicator.plan, 3, config.get("overlap", True)).lines(kinds)
        pool = communicator.state.pool
        allocations = []
        for number in range(3):
            step(twin)
            twin.check_gradients(f"{config}, step {number}")
            if number == 0:
                assert twin.lines(*kinds) == planned, config
            allocations.append(communicator.state.reducer.buffers.allocations)
            assert not communicator.state.reducer.unsharded_sums.nbytes
            twin.zero_grad()
            communicator.invalidate()
        if pool.reuse:
            assert allocations[2] == allocations[1], "a step allocates nothing after the second"
        cut = sum(weight.requires_grad for weight in communicator.replicated.sharded)
        assert sum(line.startswith("RS") for line in planned) == cut


def by_replicas(rank: int, world_size: int, weight: int) -> list[tuple[int, int]]:
    """Collectives of gradients and their bytes: in each backward, or only in the last."""
    found = []
    for together in (False, True):
        mesh = ParallelMesh.create(weight=weight, device_type="cpu", timeout_seconds=20)
        twin = Twin(Tiny, mesh)
        counters = twin.communicator.state.collectives.counters
        for number in range(2):
            counters.reset()
            for _ in range(2):
                with twin.communicator.no_replica_sync() if together else nullcontext():
                    twin.backward()
                unfinished = [type(p.grad) is UnfinishedGradient for p in twin.ours.parameters()]
                assert set(unfinished) == {together}
            twin.backward()
            twin.check_gradients(f"together {together}, step {number}")
            twin.zero_grad()
            twin.communicator.invalidate()
        found.append((counters.reductions, counters.reduced_bytes))
        cut = len(twin.communicator.replicated.sharded)
    return [*found, (cut, 0)]


@pytest.mark.thorough(2)
@pytest.mark.parametrize("weight", some([2, 1], 1))
def test_replicas_exchange_once_for_several_micro_batches(weight: int) -> None:
    for apart, together, (cut, _) in run_ranks(by_replicas, 4, weight):
        once = cut + 1  # sharded weights over replicas; replicated ones coalesced
        inside = apart[0] // 3 - once
        assert apart[0] == 3 * (inside + once)
        assert together[0] == 3 * inside + once
        assert together[1] < apart[1]


@ranks(2)
def test_a_failed_step_leaves_no_sum_behind() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    twin = Twin(Tiny, mesh, accumulation="full")

    def explode(*_: Any) -> None:
        raise RuntimeError("boom")

    with twin.communicator.no_sync():
        twin.backward()
        hook = twin.ours.layers[1].register_full_backward_hook(explode)  # type: ignore[union-attr]
        raises(RuntimeError, twin.backward, "boom")
        hook.remove()
    twin.zero_grad()
    step(twin)
    twin.check_gradients("after a failure")


def optimized(rank: int, world: int) -> tuple[float, float, int]:
    """ZeroOptimizer includes gradients that no backward has reduced, and drops them on request."""
    case = Case(weight=2, micro_batches=3, steps=3, config={"accumulation": "full"})
    plain, whole = setup(case), setup(case)
    wanted = train(plain, case, rank, world)
    with whole.communicator.no_sync():  # for a batch that is dropped
        whole.model(*(share(tensor, rank) for tensor in batch(99, world))).backward()
    whole.optimizer.zero_grad()
    with whole.communicator.no_sync():
        found = train(whole, case, rank, world)
        whole.model(*(share(tensor, rank) for tensor in batch(98, world)), side=True).backward()
    plain.model(*(share(tensor, rank) for tensor in batch(98, world)), side=True).backward()
    mine, theirs = whole.optimizer.gather_gradients(), plain.optimizer.gather_gradients()
    assert mine.keys() == theirs.keys()
    gap = max(float((mine[name] - theirs[name]).abs().max()) for name in mine)
    return furthest(wanted, found), gap, whole.communicator.state.reducer.unsharded_sums.nbytes


def test_an_optimizer_reduces_the_sums_that_no_backward_has_reduced() -> None:
    for apart, gap, left in run_ranks(optimized, 4):
        assert apart < 1e-12
        assert gap < 1e-12
        assert left == 0


@pytest.mark.parametrize("weight", [1, 2])
@ranks(2)
def test_an_optimizer_takes_over_what_a_plain_loop_has_summed(weight: int) -> None:
    mesh = ParallelMesh.create(weight=weight, device_type="cpu", timeout_seconds=20)
    for kind in ("no_sync", "no_replica_sync"):
        twin = Twin(Tiny, mesh)
        with getattr(twin.communicator, kind)():
            twin.backward()
        ours = ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.05)
        theirs = torch.optim.SGD(twin.plain.parameters(), lr=0.05)
        assert ours.unfinished
        again = partial(ZeroOptimizer, twin.communicator, torch.optim.SGD, lr=0.05)
        raises(ValueError, again, "has a ZeroOptimizer already")
        for step in range(2):
            twin.backward()
            for optimizer in (theirs, ours):
                optimizer.step()
                optimizer.zero_grad()
            twin.check_parameters(f"{kind}, step {step}")


class _Most(SchedulerHook):
    """The peak bytes of unsharded gradient sums of each chunk."""

    def __init__(self) -> None:
        self.nbytes: dict[int, int] = {}
        self.pending: list[Any] = []

    def after_backward(self, action: ComputeAction) -> None:
        now = self.pending[action.chunk].unsharded_sums.nbytes
        self.nbytes[action.chunk] = max(now, self.nbytes.get(action.chunk, 0))


Row = tuple[float, int, int, dict[int, int], dict[int, int]]


def pipelined(rank: int, world_size: int, case: PipelineCase) -> Row:
    trace, most = Trace(enabled=True), _Most()
    pipeline, plain = make(case, hooks=[most], trace=trace)
    most.pending = [communicator.state.reducer for communicator in pipeline.communicators]
    losses = pipeline.step(batches(case, pipeline.mesh))
    assert trace.lines(("AG", "RS", "FINISH")) == pipeline.planned().lines(("AG", "RS", "FINISH"))
    found = compare(case, pipeline, plain, losses)
    cut = sum(len(communicator.replicated.sharded) for communicator in pipeline.communicators)
    told = {}
    for chunk, communicator in enumerate(pipeline.communicators):
        assert communicator.plan is not None
        plan = communicator.plan
        units = (*plan.blocks, *plan.root_units, *((plan.head,) if plan.head else ()))
        told[chunk] = sum(w.sum_bytes for unit in units for w in unit.weights)
    return found.gradient, cut, sum(e.kind == "RS" for e in trace.events), most.nbytes, told


@pytest.mark.parametrize(
    ("schedule", "chunks"), some([("InterleavedZeroBubble", 2), ("1F1B", 1), ("DualPipeV", 2)], 1)
)
def test_a_pipeline_reduces_each_weight_once_in_the_memory_that_the_plan_tells(
    schedule: str, chunks: int
) -> None:
    case = PipelineCase(schedule, chunks=chunks, weight=2, weights={"accumulation": "full"})
    for gradient, cut, reductions, most, told in run_ranks(pipelined, 4, case):
        assert gradient < TOLERANCE
        assert reductions == cut
        assert most == told
    sharded = PipelineCase(schedule, chunks=chunks, weight=2)
    for gradient, cut, reductions, most, _ in run_ranks(pipelined, 4, sharded):
        assert gradient < TOLERANCE
        assert reductions == case.micro_batches * cut
        assert set(most.values()) == {0}


def summed(rank: int, world_size: int) -> list[float]:
    """256 + 1 + 1 is 258 in bf16 if rounded once, and 256 if each sum is rounded."""
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    twin = Twin(Tiny, mesh, dtype=torch.bfloat16, accumulation="full")
    state, unit = twin.communicator.state, twin.communicator.blocks[0]
    weight = unit.weights[0]
    one = torch.ones(weight.layout.shape, dtype=torch.bfloat16)
    for value in (256 * one, one):
        state.reducer.ready[weight] = value
        state.reducer.accumulate([weight])
    state.reducer.ready[weight] = one
    state.perform(state.queue.reduce(unit, weight))
    state.finish_reductions()
    assert weight.reduced.total is not None
    values: list[float] = weight.reduced.total.unique().tolist()
    return values


def test_sums_of_16_bit_gradients_are_wide() -> None:
    assert run_ranks(summed, 2) == [[2 * 258.0]] * 2
