"""The step after a failed one: right if all ranks have failed, otherwise refused on all of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from internsp.errors import CollectiveError
from internsp.optim import ZeroOptimizer
from internsp.pipeline import ComputeAction, Pipeline, SchedulerHook
from tests.support.compare import TOLERANCE, gap
from tests.support.pipeline import Case, batches, compare, make, plain_loss
from tests.support.ranks import ranks, run_ranks

TIMEOUT = 12  # seconds: the groups'; a rank that gets the error does not wait for it


class Boom(Exception):
    """The exception of a user's hook."""


class _Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, hook: _Trips) -> Tensor:
        ctx.hook = hook
        hook.trip("module")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.hook.trip("gradient")
        return gradient, None


class _Trips(SchedulerHook):
    """Raises at one point, on every rank that reaches it."""

    def __init__(self) -> None:
        self.where, self.micro_batch, self.now = "", 0, 0
        self.late = 0.0  # seconds until it raises

    def trip(self, where: str, micro_batch: int | None = None) -> None:
        self.now = self.now if micro_batch is None else micro_batch
        if (where, self.now) == (self.where, self.micro_batch):
            time.sleep(self.late)
            raise Boom(f"{where} of micro-batch {self.now}")

    def before_forward(self, action: ComputeAction) -> None:
        self.trip("before_forward", action.micro_batch)

    def after_forward(self, action: ComputeAction, output: Any) -> None:
        self.trip("after_forward", action.micro_batch)

    def before_criterion(self, action: ComputeAction, output: Any) -> None:
        self.trip("before_criterion", action.micro_batch)

    def before_backward(self, action: ComputeAction) -> None:
        self.trip("before_backward", action.micro_batch)

    def after_backward(self, action: ComputeAction) -> None:
        self.trip("after_backward", action.micro_batch)

    def after_last_micro_batch(self, action: ComputeAction) -> None:
        self.trip("after_last_micro_batch", action.micro_batch)


def _setup(case: Case) -> tuple[Pipeline, nn.Module, _Trips, list[torch.optim.Optimizer]]:
    hook = _Trips()
    pipeline, plain = make(case, hooks=[hook])
    for chunk in pipeline.chunks:
        for block in chunk.layers.values():
            block.register_forward_hook(lambda _, args, output: _Trap.apply(output, hook))
    made = [torch.optim.SGD(module.parameters(), lr=0.05) for module in (plain, *pipeline.chunks)]
    return pipeline, plain, hook, made


def _fails(call: Callable[[], Any], what: str) -> str:
    """It raises, and names the cause: its own, an error of torch, or another rank's error."""
    try:
        call()
    except Exception as error:
        text = f"{error} {root(error)}"
        assert what in text, text
        return text
    raise AssertionError(f"no rank may get through a step that fails by {what}")


def root(error: BaseException) -> BaseException:
    while error.__cause__ is not None and not isinstance(error, CollectiveError):
        error = error.__cause__
    return error


PLACES = [
    ("before_forward", 0), ("before_forward", 2), ("after_forward", 1), ("before_criterion", 1),
    ("before_backward", 0), ("after_backward", 1), ("module", 3), ("gradient", 2),
    ("after_last_micro_batch", -1), ("after_last_micro_batch", -1),
]  # fmt: skip


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (2, Case("InterleavedZeroBubble", chunks=2, timeout=TIMEOUT)),
        pytest.param(2, Case(timeout=TIMEOUT), marks=pytest.mark.thorough(3)),
        pytest.param(
            4, Case("Interleaved1F1B", chunks=2, weight=2, timeout=TIMEOUT),
            marks=pytest.mark.thorough(8),
        ),
    ],
)
@ranks()
def test_the_step_after_one_that_failed_on_all_ranks_is_right(
    world_size: int, case: Case
) -> None:
    # torch logs the whole schedule after any error, line by line.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL + 1)
    pipeline, plain, hook, optimizers = _setup(case)
    given = batches(case, pipeline.mesh)
    for hook.where, hook.micro_batch in PLACES:
        for call in (pipeline.step, pipeline.evaluate):
            what = f"{hook.where} of micro-batch {hook.micro_batch}"
            if call == pipeline.evaluate and "forward" not in hook.where:
                continue
            start = time.monotonic()
            # Messages that it has sent must not reach the next step, which has other micro-batches.
            _fails(lambda call=call: call(given[::-1]), what)
            assert time.monotonic() - start < TIMEOUT / 2, what
        where, hook.where = hook.where, ""
        # Sums of an aborted step are discarded, without zero_grad().
        for optimizer in optimizers if where == "after_last_micro_batch" else ():
            optimizer.zero_grad()
        found = compare(case, pipeline, plain, pipeline.step(given))
        assert found.loss < TOLERANCE, (where, found)
        assert found.gradient < TOLERANCE, (where, found)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@ranks(4)
def test_a_failed_step_does_not_take_earlier_steps_gradients_along_in_silence() -> None:
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL + 1)
    pipeline, plain, hook, _ = _setup(case := Case(weight=2, timeout=TIMEOUT))
    given = batches(case, pipeline.mesh)
    optimizer = ZeroOptimizer(pipeline.communicators[0], torch.optim.SGD, lr=0.1)
    plain_loss(case, plain, pipeline.mesh.data).backward()
    wanted = dict(plain.named_parameters())
    hook.micro_batch = 1

    def fail(call: Callable[[], Any]) -> None:
        hook.where = "after_forward"
        _fails(call, "after_forward of micro-batch 1")
        hook.where = ""

    for failing in (pipeline.step, pipeline.evaluate):
        pipeline.step(given)
        fail(lambda call=failing: call(given))
        pipeline.step(given)  # right in itself, but the sums to which it is added are lost
        _fails(optimizer.step, "has taken with it the gradients of the micro-batches before it")
        optimizer.zero_grad()
        fail(lambda: pipeline.step(given))  # there were no sums before it: nothing is missing
        pipeline.step(given)
        found = optimizer.gather_gradients()
        assert found
        for name, gradient in found.items():
            assert gap(gradient, wanted[name].grad) < TOLERANCE, name
        optimizer.zero_grad()


@pytest.mark.parametrize(("to_none", "tied"), [(True, False), (False, True)])
@ranks(2)
def test_what_a_failed_step_has_added_to_a_gradient_is_not_taken_for_one(
    to_none: bool, tied: bool
) -> None:
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL + 1)
    case = Case(timeout=TIMEOUT, model={"tie_embeddings": tied})
    pipeline, plain, hook, (_, own) = _setup(case)
    given = batches(case, pipeline.mesh)
    pipeline.step(given)
    hook.where, hook.micro_batch = "after_last_micro_batch", -1
    _fails(lambda: pipeline.step(given), hook.where)
    hook.where = ""
    for _ in range(2):  # before anything runs: the pipeline can continue
        _fails(lambda: pipeline.step(given), "has taken with it the gradients")
    for call in (own.step, lambda: own.param_groups[0]["params"][0].grad.full_tensor()):
        _fails(call, "a step of the pipeline that failed has added a part of its gradient")
    own.zero_grad(set_to_none=to_none)
    pipeline.step(given)
    plain_loss(case, plain, pipeline.mesh.data).backward()
    wanted = dict(plain.named_parameters())
    for name, p in pipeline.chunks[0].named_parameters():
        of = wanted["embed.weight" if tied and name == "head.weight" else name]
        assert gap(p.grad, of.grad) < TOLERANCE, name


def finished(rank: int, world_size: int, culprit: int) -> list[str]:
    """One rank fails when the other has, or may have, nothing left to do in the step."""
    case = Case(timeout=60)
    pipeline, _, hook, _ = _setup(case)
    given = batches(case, pipeline.mesh)
    start = time.monotonic()
    if rank == culprit:
        hook.where, hook.micro_batch, hook.late = "after_last_micro_batch", -1, 0.5
        _fails(lambda: pipeline.step(given), hook.where)
        hook.where = ""
    else:
        assert pipeline.step(given) is not None  # its part succeeded: it waits in the next step
    told = [_fails(lambda: pipeline.step(given), "failed first: Boom") for _ in range(2)]
    assert time.monotonic() - start < 30, "the wait is ended, not timed out"
    return told


@pytest.mark.unmeasured
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_step_that_only_some_ranks_have_finished_ends_the_pipeline_on_all(culprit: int) -> None:
    for first, second in run_ranks(finished, 2, culprit):
        assert "the pipeline has ended: rank" in second, (first, second)
