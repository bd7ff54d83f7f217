"""What a pipeline refuses before it runs; chunks and stages alone; first causes of failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import internsp.pipeline.pipeline as pipeline_module
from internsp.base.trace import Trace
from internsp.errors import ConfigError, GradientError, OrderError
from internsp.failure.consensus import default_store
from internsp.mesh import ParallelMesh
from internsp.pipeline.failure import PipelineRecovery
from tests.support.compare import TOLERANCE
from tests.support.pipeline import Case, Found, batches, compare, make
from tests.support.ranks import run_ranks


def refusal(kind: type[Exception], call: Callable[[], Any]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def refused(rank: int, world_size: int) -> tuple[list[str], list[list[bool]]]:
    """Errors for wrong numbers and a wrong plan; which chunks may split backward."""
    told = [refusal(ConfigError, lambda: make(Case("DualPipeV", chunks=1)))]
    real = pipeline_module.schedule_order

    def without_a_message(*args: Any) -> Any:
        order = real(*args)
        order[1].remove(next(step for step in order[1] if step.kind == "RECV_F"))
        return order

    pipeline_module.schedule_order = without_a_message
    told.append(refusal(OrderError, lambda: make(Case("ZBVZeroBubble", chunks=2))))
    pipeline_module.schedule_order = real
    whole = {"compile": True, "gather_before": "qkv"}
    cases = [Case("ZBVZeroBubble", chunks=2, weights=weights) for weights in ({}, whole)]
    return told, [[stage.splits_backward for stage in make(case)[0].stages] for case in cases]


def test_wrong_numbers_and_wrong_plans_are_refused_before_anything_runs() -> None:
    for (numbers, plan), splits in run_ranks(refused, 2):
        assert "DualPipeV takes 2 chunks a rank, not 1" in numbers
        assert "the schedule's lists do not fit each other" in plan
        assert splits == [[True, True], [False, False]], "compiled blocks bear both at once"


def alone(rank: int, world_size: int) -> list[tuple[bool, bool, str]]:
    """For each chunk: its gathers, all gradients, and the result of autograd.grad."""
    trace = Trace(enabled=True)
    case = Case(
        "ZBVZeroBubble", chunks=2, weight=2, layers=9, weights={"accumulation": "full"}
    )  # fmt: skip
    pipeline, _ = make(case, trace=trace)
    given = batches(case, pipeline.mesh)
    pipeline.step(given)
    pipeline.evaluate(given)
    found = []
    for chunk, communicator in zip(pipeline.chunks, pipeline.communicators, strict=True):
        for other in pipeline.communicators:
            other.invalidate()
        for parameter in chunk.parameters():
            parameter.grad = None
        trace.clear()
        hidden = torch.ones(1, case.length, 12, dtype=torch.float64, requires_grad=True)
        entry = given[0].inputs[0] if chunk.first else hidden
        chunk(entry).sum().backward()
        own = {weight.name for weight in communicator.replicated.sharded}
        gathered = {event.weight for event in trace.events if event.kind == "AG"}
        ready = all(parameter.grad is not None for parameter in chunk.parameters())
        small = communicator.replicated.members[0].parameter

        def ask(at: Any = chunk, x: Any = entry, parameter: Any = small) -> None:
            torch.autograd.grad(at(x).sum(), [parameter])

        found.append((own == gathered, ready, refusal(GradientError, ask)))
    return found


def test_a_chunk_by_itself_after_steps_and_evaluations_is_an_ordinary_model() -> None:
    for ranks in run_ranks(alone, 4):
        for own, ready, said in ranks:
            assert own, "it gathers its own weights and no other's"
            assert ready
            assert "torch.autograd.grad over a sharded weight is not supported" in said


def by_hand(rank: int, world_size: int, case: Case) -> Found:
    """Our stages under a schedule made by the user, with scaling left on."""
    pipeline, plain = make(case)
    tokens = case.tokens(pipeline.mesh.data)
    schedule: Any = pipeline.kind.cls(
        pipeline.stages, case.micro_batches, loss_fn=lambda loss, _: loss / tokens
    )
    for stage in pipeline.stages:
        stage.has_backward = True
    mine = [case.mine(pipeline.mesh, m) for m in range(case.micro_batches)]
    losses: list[torch.Tensor] = []
    schedule._step_microbatches(
        [(at.input_ids,) for at in mine],
        [{"layout": at, "labels": at.labels} for at in mine],
        list(torch.arange(case.micro_batches)),
        losses,
        return_outputs=False,
    )
    return compare(case, pipeline, plain, [loss.detach() for loss in losses])


def test_stages_under_a_schedule_of_ones_own_are_right_and_never_scaled() -> None:
    for found in run_ranks(by_hand, 4, Case("InterleavedZeroBubble", chunks=2, weight=2)):
        assert found.loss < TOLERANCE
        assert found.gradient < TOLERANCE


def watched(rank: int, world_size: int) -> list[str]:
    """Rank 0 fails first each time; returns the errors."""
    mesh = ParallelMesh.create(1, 1, 2, device_type="cpu", timeout_seconds=20)
    watches = [PipelineRecovery(mesh, (), lambda: "", lambda: None) for _ in range(3)]
    store, told = default_store(), []

    def fail(number: int, kind: type[BaseException]) -> None:
        try:
            with watches[number]:
                if rank == 1:
                    store.wait([f"failed/{number}"])
                try:
                    raise kind(f"cause {number} of rank {rank}")
                except Exception as cause:  # as torch wraps it
                    raise RuntimeError("a stage failed") from cause
        except BaseException as error:
            told.append(f"{type(error).__name__}: {error}")
        if rank == 0:
            store.set(f"failed/{number}", "")

    fail(0, ValueError)
    fail(1, ArithmeticError)
    fail(2, KeyboardInterrupt)
    return told


def test_the_first_cause_of_each_pipeline_is_told_to_all() -> None:
    first, second = run_ranks(watched, 2)
    cause = "a step of the pipeline has failed: rank 0, pipeline rank 0, failed first: "
    assert first == [
        "RuntimeError: a stage failed", "RuntimeError: a stage failed",
        "KeyboardInterrupt: cause 2 of rank 0",
    ]  # fmt: skip
    assert second == [
        f"CollectiveError: {cause}ValueError: cause 0 of rank 0",
        f"CollectiveError: {cause}ArithmeticError: cause 1 of rank 0",
        "KeyboardInterrupt: cause 2 of rank 1",
    ]
