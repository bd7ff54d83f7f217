"""Scheduler hooks fire for every chunk and micro-batch."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from internsp.base.trace import Trace
from internsp.optim import ZeroOptimizer
from internsp.pipeline import ComputeAction, SchedulerHook
from internsp.wp.perform import Chunk
from tests.support.compare import TOLERANCE
from tests.support.pipeline import Case, batches, compare, make
from tests.support.ranks import run_ranks

SCHEDULES = [
    ("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("InterleavedZeroBubble", 2),
    ("ZBVZeroBubble", 2), ("DualPipeV", 2),
]  # fmt: skip


class _Record(SchedulerHook):
    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int, int, str]] = []

    def _note(self, what: str, at: ComputeAction) -> None:
        self.calls.append((what, at.stage, at.chunk, at.micro_batch, at.part))

    def before_forward(self, action: ComputeAction) -> None:
        self._note("before_forward", action)

    def after_forward(self, action: ComputeAction, output: Any) -> None:
        assert isinstance(output, Tensor)
        self._note("after_forward", action)

    def before_criterion(self, action: ComputeAction, output: Any) -> None:
        self._note("before_criterion", action)

    def after_criterion(self, action: ComputeAction, loss: Any) -> None:
        assert loss.requires_grad
        self._note("after_criterion", action)

    def before_backward(self, action: ComputeAction) -> None:
        self._note("before_backward", action)

    def after_backward(self, action: ComputeAction) -> None:
        self._note("after_backward", action)

    def after_last_micro_batch(self, action: ComputeAction) -> None:
        self._note("after_last_micro_batch", action)


def recorded(rank: int, world_size: int, case: Case) -> list[tuple[str, int, int, int, str]]:
    record = _Record()
    pipeline, _ = make(case, hooks=[record])
    pipeline.step(batches(case, pipeline.mesh))
    return record.calls


@pytest.mark.thorough(3)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("static", [True, False])
def test_hooks_fire_once_for_every_chunk_and_micro_batch(
    schedule: str, chunks: int, static: bool
) -> None:
    case = Case(schedule, chunks=chunks, static=static)
    everyone = [call for calls in run_ranks(recorded, 2, case) for call in calls]
    places = {(stage, m) for stage in range(2 * chunks) for m in range(4)}
    last = 2 * chunks - 1
    for what in ("before_forward", "after_forward"):
        seen = [(stage, m) for w, stage, _, m, _ in everyone if w == what]
        assert sorted(seen) == sorted(places), what
    for what in ("before_criterion", "after_criterion"):
        seen = [(stage, m) for w, stage, _, m, _ in everyone if w == what]
        assert sorted(seen) == [(last, m) for m in range(4)], what
    for what in ("before_backward", "after_backward"):
        for parts in (("full", "input"), ("full", "weight")):
            seen = [(stage, m) for w, stage, _, m, p in everyone if w == what and p in parts]
            assert sorted(seen) == sorted(places), (what, parts)
    ends = [stage for w, stage, *_ in everyone if w == "after_last_micro_batch"]
    assert sorted(ends) == list(range(2 * chunks))


class _Rest(SchedulerHook):
    """What a chunk has in flight, or holds, when our own hook returns after a pass."""

    def __init__(self) -> None:
        self.states: list[Chunk] = []
        self.flying: list[int] = []
        self.held: list[int] = []

    def after_backward(self, action: ComputeAction) -> None:
        self.flying.append(len(self.states[action.chunk].reducer))

    def after_last_micro_batch(self, action: ComputeAction) -> None:
        state = self.states[action.chunk]
        assert not state.queue.progress.split
        self.held.append(len(state.queue.slots.held))


def rests(rank: int, world_size: int, case: Case) -> tuple[set[int], list[int]]:
    rest = _Rest()
    pipeline, _ = make(case, hooks=[rest])
    for communicator in pipeline.communicators:  # with it only the hook finishes reductions
        ZeroOptimizer(communicator, torch.optim.SGD, lr=0.1)
        rest.states.append(communicator.state)
    pipeline.step(batches(case, pipeline.mesh))
    return set(rest.flying), rest.held


@pytest.mark.thorough(4)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_nothing_is_in_flight_after_a_micro_batch_nor_held_after_the_last(
    schedule: str, chunks: int
) -> None:
    for flying, held in run_ranks(rests, 2, Case(schedule, chunks=chunks, layers=9)):
        assert flying == {0}
        assert held == [0] * chunks


class _Slow(SchedulerHook):
    def before_forward(self, action: ComputeAction) -> None:
        time.sleep(0.2)


def waiting(rank: int, world_size: int) -> tuple[float, float]:
    """Seconds without an action on each rank (bubble) in an ordinary step; rank 0 is slow."""
    case = Case("GPipe", micro_batches=2)
    pipeline, _ = make(case)
    seconds = []
    for slow in (False, True):
        if slow and rank == 0:
            pipeline.hooks.append(_Slow())
        dist.barrier()
        start = time.perf_counter()
        pipeline.step(batches(case, pipeline.mesh))
        seconds.append(pipeline.stage_wait_seconds)
        assert 0 < seconds[-1] < time.perf_counter() - start
    return seconds[0], seconds[1]


def test_a_rank_tells_how_long_it_waited_for_other_stages() -> None:
    _, (before, after) = run_ranks(waiting, 2)
    assert after > 0.35  # twice 0.2 s, less what rank 1 computes meanwhile
    assert after > before


def test_hooks_fire_in_the_order_of_the_work() -> None:
    calls = run_ranks(recorded, 2, Case("1F1B", micro_batches=2))[1]
    assert [(what, m) for what, _, _, m, _ in calls] == [
        (f"{when}_{what}", m)
        for m in range(2)
        for what in ("forward", "criterion", "backward")
        for when in ("before", "after")
    ] + [("after_last_micro_batch", -1)]


def after_a_step(rank: int, world_size: int, static: bool) -> dict[str, Any]:
    """All state of a communicator, after a step with a given shape and with one that it learns."""
    case = Case("ZBVZeroBubble", chunks=2, layers=9, static=static)
    trace = Trace(enabled=True)
    pipeline, _ = make(case, trace=trace)
    pipeline.step(batches(case, pipeline.mesh))
    found: dict[str, Any] = {"events": trace.lines(("AG", "RS", "USE", "FINISH"))}
    for chunk, communicator in enumerate(pipeline.communicators):
        state = communicator.state
        found[f"{chunk} counters"] = vars(state.collectives.counters)
        found[f"{chunk} held"] = [group.name for group in state.queue.slots.held]
        found[f"{chunk} contents"] = sorted(weight.name for weight in state.queue.slots.contents)
        flying = (len(state.handles), len(state.reducer), len(state.reducer.had_gradient))
        found[f"{chunk} in flight"] = flying
    return found


def test_a_shape_that_is_learned_at_the_first_step_leaves_no_trace() -> None:
    assert run_ranks(after_a_step, 2, True) == run_ranks(after_a_step, 2, False)


def reentrant(rank: int, world_size: int, case: Case) -> tuple[float, float]:
    pipeline, plain = make(case)
    found = compare(case, pipeline, plain, pipeline.step(batches(case, pipeline.mesh)))
    return found.loss, found.gradient


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("schedule", "chunks"), [("1F1B", 1), ("ZBVZeroBubble", 2)])
def test_a_learned_shape_gets_along_with_reentrant_checkpoints(schedule: str, chunks: int) -> None:
    checkpoint = {"mode": "full", "reentrant": True}
    case = Case(schedule, chunks=chunks, static=False, checkpoint=checkpoint)
    for loss, gradient in run_ranks(reentrant, 2, case):
        assert loss < TOLERANCE
        assert gradient < TOLERANCE


class _Outputs(SchedulerHook):
    """Records the memory of hidden states without keeping it alive."""

    def __init__(self) -> None:
        self.storages: list[StorageWeakRef] = []

    def after_forward(self, action: ComputeAction, output: Any) -> None:
        self.storages.append(StorageWeakRef(output.untyped_storage()))


def left_behind(rank: int, world: int) -> int:
    """Hidden states that are alive after a step, with Python's collector off."""
    hook, case = _Outputs(), Case(micro_batches=6)
    pipeline, _ = make(case, [hook])
    gc.collect()
    gc.disable()
    try:
        pipeline.step(batches(case, pipeline.mesh))
        return sum(not storage.expired() for storage in hook.storages)
    finally:
        gc.enable()


def test_what_a_stage_has_sent_is_freed_without_a_collection() -> None:
    """A reference cycle between a message and its operation would keep all hidden states alive."""
    assert run_ranks(left_behind, 2)[0] <= 1  # the last one's gradient was computed from it
