"""Messages between stages: the compute dtype of weights, one shape, and clear refusals."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from internsp.config import WeightParallelConfig
from internsp.errors import CollectiveError, LayoutError
from internsp.parallel.parallelize import parallelize
from internsp.pipeline import ComputeAction, MicroBatch, Pipeline, SchedulerHook
from tests.support.compare import TOLERANCE
from tests.support.meshes import mesh_of
from tests.support.models import CUT, Block
from tests.support.pipeline import Case, Found, batches, compare, make
from tests.support.ranks import run_ranks

SCHEDULES = [
    ("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("InterleavedZeroBubble", 2),
    ("ZBVZeroBubble", 2), ("DualPipeV", 2),
]  # fmt: skip
NARROW: dict[str, Any] = {"compute_dtype": "float32"}  # of a model in fp64


class _Outputs(SchedulerHook):
    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()

    def after_forward(self, action: ComputeAction, output: Any) -> None:
        self.dtypes.add(output.dtype)


def narrow(rank: int, world_size: int) -> list[tuple[Found, set[torch.dtype]]]:
    found = []
    for (schedule, chunks), static in zip(SCHEDULES, [True, False] * 3, strict=True):
        watch = _Outputs()
        case = Case(schedule, chunks=chunks, weight=2, static=static, weights=NARROW)
        pipeline, plain = make(case, hooks=[watch])
        losses = pipeline.step(batches(case, pipeline.mesh))
        found.append((compare(case, pipeline, plain, losses), watch.dtypes))
    return found


def test_weights_and_hidden_states_have_the_compute_dtype_under_every_schedule() -> None:
    for ranks in run_ranks(narrow, 4, timeout=90):
        for (schedule, _), (found, dtypes) in zip(SCHEDULES, ranks, strict=True):
            assert dtypes == {torch.float32}, schedule
            assert TOLERANCE < found.gradient < 1e-4, schedule
            assert found.loss < 1e-5, schedule


class _Logits(SchedulerHook):
    def __init__(self) -> None:
        self.seen: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def before_criterion(self, action: ComputeAction, output: Any) -> None:
        self.seen.append((output.dtype, tuple(output.shape)))


def logits(rank: int, world_size: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    case, watch = Case(layers=2, micro_batches=2), _Logits()
    mesh = mesh_of(pipeline=2)
    pipeline = Pipeline.create(
        case.build().to(torch.bfloat16),  # type: ignore[arg-type]
        mesh,
        WeightParallelConfig(min_shard_elements=24),
        micro_batches=2,
        criterion=lambda output, _: output.square().mean(),
        hooks=[watch],
    )
    layouts = [case.mine(mesh, number) for number in range(2)]
    pipeline.evaluate([MicroBatch((at.input_ids,), {"layout": at}) for at in layouts])
    return watch.seen


@pytest.mark.thorough(1)
def test_logits_leave_the_last_stage_in_fp32() -> None:
    first, last = run_ranks(logits, 2)
    assert first == []
    assert last == [(torch.float32, (1, 9, Case().build().config.vocab_size))] * 2


def other_shapes(rank: int, world_size: int, static: bool) -> tuple[list[str], Found]:
    case = Case("ZBVZeroBubble", chunks=2, static=static)
    pipeline, plain = make(case)
    good = batches(case, pipeline.mesh)
    told = []
    if not static:  # the shape follows from the first step
        pipeline.evaluate(good)
    short = batches(replace(case, length=8), pipeline.mesh)
    for wrong in (good[:3], [*good[:2], short[2], good[3]]):
        for call in (pipeline.step, pipeline.evaluate):
            with pytest.raises(ValueError, match="agreed") as error:
                call(wrong)
            told.append(str(error.value))
    losses = pipeline.step(good)
    return told, compare(case, pipeline, plain, losses)


@pytest.mark.parametrize("static", [True, False])
def test_micro_batches_of_another_number_or_shape_are_refused_before_anything_runs(
    static: bool,
) -> None:
    for rank, (told, found) in enumerate(run_ranks(other_shapes, 2, static)):
        assert told[0] == told[1] == "3 micro-batches, but 4 were agreed"
        for text in told[2:]:
            assert f"micro-batch 2 on rank {rank} has rows and tokens (1, 8)" in text
        assert found.loss < TOLERANCE
        assert found.gradient < TOLERANCE


def wrong_promise(rank: int, world_size: int) -> tuple[type[Exception], str, float]:
    """The width of the hidden states differs from the pipeline's setting."""
    case, mesh = Case(), mesh_of(pipeline=2, timeout=6)
    pipeline = Pipeline.create(
        case.build(),  # type: ignore[arg-type]
        mesh,
        WeightParallelConfig(min_shard_elements=24),
        micro_batches=4,
        shape=(1, case.length, 16),
    )
    start = time.monotonic()
    with pytest.raises((LayoutError, CollectiveError)) as error:
        pipeline.step(batches(case, mesh))
    return type(error.value), str(error.value), time.monotonic() - start


def test_hidden_states_of_another_shape_than_promised_are_refused_by_their_stage() -> None:
    (kind, text, _), (other, told, seconds) = run_ranks(wrong_promise, 2)
    assert kind is LayoutError
    assert "stage 0 on rank 0 returns hidden states (1, 9, 12) torch.float64" in text
    assert "receives (1, 9, 16)" in text
    assert other is CollectiveError
    assert "rank 0, pipeline rank 0, failed first: LayoutError" in told
    assert seconds < 10


def layouts_text() -> str:
    return repr(Case().layout(0, slice(0, 4)))


def test_an_error_that_shows_a_layout_does_not_show_every_token() -> None:
    assert "tensor" not in layouts_text()
    assert "length=9" in layouts_text()


class _Floats(nn.Module):
    """Takes floats, like a model of patches or of embedded text."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, *, more: dict[str, Tensor]) -> Tensor:
        assert more["ids"].dtype == torch.int64
        h = x + more["shift"]
        for layer in self.layers:
            h = layer(h)
        return h


def floats(rank: int, world_size: int) -> tuple[torch.dtype, float]:
    torch.manual_seed(0)
    model = _Floats().double()
    wanted = copy.deepcopy(model).float()
    x, more = torch.randn(3, 6).double(), {"ids": torch.arange(2), "shift": torch.ones(6).double()}
    parallelize(model, mesh_of(weight=2), WeightParallelConfig(min_shard_elements=CUT, **NARROW))
    found = model(x, more=more)
    plain = wanted(x.float(), more={**more, "shift": more["shift"].float()})
    return found.dtype, float((found - plain).abs().max().detach())


def test_a_models_floating_inputs_are_cast_to_the_compute_dtype() -> None:
    for dtype, gap in run_ranks(floats, 2):
        assert dtype == torch.float32
        assert gap < 1e-5
