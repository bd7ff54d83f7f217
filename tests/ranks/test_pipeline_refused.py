"""Errors that a pipeline raises before anything runs; it can be used normally afterwards."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch

from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import (
    CollectiveError,
    ConfigError,
    LayoutError,
    OrderError,
    StructureError,
)
from internsp.pipeline import ComputeAction, MicroBatch, Pipeline, SchedulerHook
from tests.support.compare import TOLERANCE
from tests.support.meshes import mesh_of
from tests.support.pipeline import Case, Found, batches, compare, gradient_gaps, make
from tests.support.ranks import ranks, run_ranks


def refused(rank: int, world_size: int, case: Case) -> Found:
    pipeline, plain = make(case)
    right = batches(case, pipeline.mesh)
    with pytest.raises(ValueError, match="3 micro-batches, but 4 were agreed"):
        pipeline.step(right[:3])
    with pytest.raises(TypeError, match="a micro-batch is a tuple, not a MicroBatch"):
        pipeline.step([(b.inputs, b.options) for b in right])  # type: ignore[misc]
    with torch.no_grad(), pytest.raises(ValueError, match=r"needs gradients.*use evaluate"):
        pipeline.step(right)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"needs gradients.*use evaluate"):
        pipeline.step(right)
    short = [MicroBatch((b.inputs[0][:, 1:],), b.options) for b in right]
    with pytest.raises(LayoutError, match=r"micro-batch 1 .* were agreed"):
        pipeline.step([short[0], *right[1:]])
    return compare(case, pipeline, plain, pipeline.step(right))


@pytest.mark.parametrize(("schedule", "chunks"), [("1F1B", 1), ("ZBVZeroBubble", 2)])
def test_a_refused_step_leaves_the_pipeline_usable(schedule: str, chunks: int) -> None:
    for found in run_ranks(refused, 2, Case(schedule, chunks=chunks, static=False)):
        assert found.loss < TOLERANCE
        assert found.gradient < TOLERANCE


def refused_by_one(rank: int, world_size: int, case: Case) -> tuple[list[str], float, Found]:
    pipeline, plain = make(case)
    right = batches(case, pipeline.mesh)
    pipeline.evaluate(right)  # an agreed shape, and no first-step work in the time below
    told, start = [], time.monotonic()
    for culprit in (3, 0):
        for call in (pipeline.step, pipeline.evaluate):
            with pytest.raises((ValueError, CollectiveError)) as error:
                call(right[:3] if rank == culprit else right)
            told.append(str(error.value))
    seconds = time.monotonic() - start
    return told, seconds, compare(case, pipeline, plain, pipeline.step(right))


@pytest.mark.parametrize(("schedule", "chunks"), [("1F1B", 1), ("ZBVZeroBubble", 2)])
def test_what_one_rank_refuses_no_rank_waits_for(schedule: str, chunks: int) -> None:
    case = Case(schedule, chunks=chunks, weight=2, static=False)
    for rank, (told, seconds, found) in enumerate(run_ranks(refused_by_one, 4, case)):
        for text, culprit in zip(told, (3, 3, 0, 0), strict=True):
            if rank == culprit:
                assert text == "3 micro-batches, but 4 were agreed"
            else:
                assert f"rank {culprit} refused this step before anything ran" in text
        assert seconds < 10, "no timeout went by"
        assert found.loss < TOLERANCE
        assert found.gradient < TOLERANCE


def unmatched(rank: int, world_size: int) -> list[str]:
    told = []
    for key, pattern in (
        ("blocks", "layer.*"), ("gather_before_modules", "attention.woo"),
        ("expert_parameters", "expert"),
    ):  # fmt: skip
        with pytest.raises(StructureError) as error:
            make(Case(weights={key: (pattern,)}))
        told.append(str(error.value))
    return told


def test_a_pattern_that_matches_nothing_in_the_whole_model_is_refused_by_name() -> None:
    for blocks, triggers, experts in run_ranks(unmatched, 2):
        assert "weight_parallel.blocks: 'layer.*' matches none of layers.0 to layers.4" in blocks
        assert "'attention.woo' matches no module of any block (did you mean" in triggers
        assert "'expert' matches no parameter" in experts


@ranks(2)
def test_a_pattern_of_all_blocks_changes_nothing() -> None:
    case = Case(weights={"blocks": ("layers.*",)})
    pipeline, plain = make(case)
    found = compare(case, pipeline, plain, pipeline.step(batches(case, pipeline.mesh)))
    assert found.loss < TOLERANCE
    assert found.gradient < TOLERANCE


class _Asks(SchedulerHook):
    pipeline: Pipeline

    def after_forward(self, action: ComputeAction, output: Any) -> None:
        self.pipeline.evaluate(self.pipeline.stages[0].batches)


def asked(rank: int, world_size: int) -> list[str]:
    hook = _Asks()
    case = Case(timeout=6)
    hook.pipeline, _ = make(case, hooks=[hook])
    found = []
    for _ in range(2):
        with pytest.raises((OrderError, CollectiveError)) as error:
            hook.pipeline.step(batches(case, hook.pipeline.mesh))
        found.append(str(error.value))
    return found


def test_a_hook_that_calls_evaluate_is_told_so() -> None:
    own, others = run_ranks(asked, 2)
    for error in own:  # and again in the next step, which starts fresh on both ranks
        assert "step() or evaluate() of a pipeline was called on rank 0 while it runs" in error
    for error in others:
        assert "rank 0, pipeline rank 0, failed first: OrderError: step() or evaluate()" in error


def logits(rank: int, world_size: int, case: Case) -> tuple[list[Any], str]:
    """Without labels the last chunk returns logits, but there is no loss."""
    pipeline, _ = make(case)
    pipeline.criterion = lambda output, batch: output
    without = batches(case, pipeline.mesh)
    for batch in without:
        batch.options.pop("labels")  # type: ignore[attr-defined]
    shapes = [tuple(output.shape) for output in pipeline.evaluate(without)]
    with contextlib.suppress(ValueError, CollectiveError):
        pipeline.step(without)
    with pytest.raises((ValueError, CollectiveError)) as error:  # the next step begins anew
        pipeline.step(without)
    return shapes, str(error.value)


@pytest.mark.parametrize(("schedule", "chunks"), [("1F1B", 1), ("ZBVZeroBubble", 2)])
def test_a_loss_that_is_not_one_number_is_refused(schedule: str, chunks: int) -> None:
    case = Case(schedule, chunks=chunks, timeout=6)
    last = {1: 1, 2: 0}[chunks]
    for rank, (shapes, error) in enumerate(run_ranks(logits, 2, case)):
        assert shapes == ([(1, case.length, 37)] * case.micro_batches if rank == last else [])
        assert "a loss is one number, but the criterion gave (1, 9, 37)" in error


def cut_off(rank: int, world_size: int, case: Case) -> list[str]:
    pipeline, plain = make(case)
    right, told = pipeline.criterion, []
    wrong: Any
    for wrong in (lambda loss, _: loss.detach(), lambda loss, _: loss.item(), lambda *_: None):
        pipeline.criterion = wrong
        with pytest.raises((ValueError, TypeError, CollectiveError)) as error:
            pipeline.step(batches(case, pipeline.mesh))
        told.append(str(error.value))
    pipeline.criterion = right
    found = compare(case, pipeline, plain, pipeline.step(batches(case, pipeline.mesh)))
    assert max(found.loss, found.gradient) < TOLERANCE
    return told


@pytest.mark.parametrize(("schedule", "chunks"), [("1F1B", 1), ("ZBVZeroBubble", 2)])
def test_a_loss_without_a_graph_is_refused_by_name(schedule: str, chunks: int) -> None:
    """torch's stages would send no gradient, and nothing would be trained."""
    for told in run_ranks(cut_off, 2, Case(schedule, chunks=chunks)):
        assert "the criterion gave a loss without a graph" in told[0]
        assert "a tensor of one element, but this one gave a float" in told[1]
        assert "a tensor of one element, but this one gave a NoneType" in told[2]


@ranks(2)
def test_a_micro_batch_that_does_not_count_gives_its_output_times_zero() -> None:
    case = Case()
    pipeline, plain = make(case)
    right, seen = pipeline.criterion, []

    def criterion(output: Any, batch: MicroBatch) -> Any:
        seen.append(batch)
        return output.sum() * 0 if len(seen) == 1 else right(output, batch)

    pipeline.criterion = criterion
    pipeline.step(batches(case, pipeline.mesh))
    whole = case.layouts(range(1, case.micro_batches), slice(0, pipeline.mesh.data))
    loss = plain(whole.input_ids, layout=whole, labels=whole.labels)[0]
    (loss / case.tokens(pipeline.mesh.data)).backward()
    assert max(gradient_gaps(pipeline, plain).values()) < TOLERANCE


@pytest.mark.parametrize("checkpoint", [{}, {"mode": "full", "fraction": 0.4}])
@ranks(2)
def test_a_mesh_without_stages_runs_a_pipeline_of_one(checkpoint: dict[str, Any]) -> None:
    case = Case(pipeline=1, weight=2, checkpoint=checkpoint)
    pipeline, plain = make(case)
    found = compare(case, pipeline, plain, pipeline.step(batches(case, pipeline.mesh)))
    assert max(found.loss, found.gradient) < TOLERANCE


@ranks(2)
def test_numbers_that_make_no_pipeline_are_refused_in_words() -> None:
    case, mesh = Case(layers=5), mesh_of(pipeline=2)
    for chunks, micro_batches, what in ((0, 4, "chunks, not 0"), (2, 0, "micro-batches, not 0")):
        with pytest.raises(ConfigError, match=f"Interleaved1F1B takes 1 or more {what}"):
            Pipeline.create(
                case.build(),
                mesh,
                schedule="Interleaved1F1B",
                chunks=chunks,
                micro_batches=micro_batches,
            )
    again = ActivationCheckpointConfig(mode="full", blocks=(1, 5))
    with pytest.raises(ConfigError, match=r"blocks: no block 5: the model has 5 blocks"):
        Pipeline.create(case.build(), mesh, micro_batches=4, activation_checkpoint=again)


@ranks(2)
def test_a_pipeline_learns_no_order_and_the_model_stays_as_it_was() -> None:
    model, mesh = Case().build(), mesh_of(pipeline=2)
    before = dict(model.named_parameters())
    learn = WeightParallelConfig(unexpected_order="learn")
    with pytest.raises(ConfigError, match="planned before it, in the order in which blocks are"):
        Pipeline.create(model, mesh, learn, micro_batches=4)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    Pipeline.create(model, mesh, micro_batches=4)


@ranks(2)
def test_a_pipeline_on_tensor_ranks_is_refused_and_the_model_stays_as_it_was() -> None:
    case = Case("1F1B")
    mesh = mesh_of(tensor=2)
    model = case.build()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(ConfigError, match="a Pipeline on a mesh with 2 tensor ranks is not"):
        Pipeline.create(model, mesh, micro_batches=4)  # type: ignore[arg-type]
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
