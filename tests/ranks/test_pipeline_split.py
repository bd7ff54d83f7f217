"""Split backward: every weight gets its gradient in its weight backward, not gathered again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

from internsp.base.trace import Trace
from internsp.mesh import ParallelMesh
from internsp.pipeline import Chunk, ComputeAction, SchedulerHook, schedule_kind, split_model
from internsp.pipeline.pipeline import meta_stage_args
from tests.support.compare import TOLERANCE
from tests.support.few import some
from tests.support.pipeline import Case, batches, compare, make, plain_loss
from tests.support.ranks import run_ranks
from tests.support.versions import since

SPLIT = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def fsdp(rank: int, world_size: int, case: Case, reshard: bool) -> tuple[int, int, int]:
    """FSDP2 in torch's own stages: how many gradients are absent, wrong and right on this rank."""
    mesh = ParallelMesh.create(case.weight, 1, case.pipeline, device_type="cpu", timeout_seconds=30)
    model, kind, count = case.build(), schedule_kind(case.schedule), case.pipeline * case.chunks
    blocks, tokens = split_model(model, count), case.tokens(mesh.data)
    stages: list[PipelineStage] = []
    for stage in kind.stages_of(mesh.pipeline_rank, case.pipeline, case.chunks):
        chunk = Chunk(model, blocks[stage], stage == 0, stage == count - 1)
        group = DeviceMesh.from_group(mesh.weight_group, "cpu")
        for module in (*chunk.layers.values(), chunk):
            fully_shard(module, mesh=group, reshard_after_forward=reshard)
        given = meta_stage_args(chunk, 12, torch.float64, torch.Size((1, case.length)))
        stages.append(
            PipelineStage(chunk, stage, count, mesh.device, group=mesh.pipeline_group, **given)
        )
        stages[-1].has_backward = True
    schedule = kind.cls(
        stages, case.micro_batches, loss_fn=lambda loss, _: loss / tokens, scale_grads=False
    )
    mine = [case.mine(mesh, m) for m in range(case.micro_batches)]
    schedule._step_microbatches(
        [(at.input_ids,) for at in mine],
        [{"labels": at.labels} for at in mine],
        list(torch.arange(case.micro_batches)),
        return_outputs=False,
    )
    plain = case.build()
    plain_loss(case, plain, mesh.data).backward()
    return judged(plain, [stage.submod for stage in stages], mesh.weight)


def judged(plain: nn.Module, chunks: list[nn.Module], averaged: int) -> tuple[int, int, int]:
    wanted = dict(plain.named_parameters())
    absent = wrong = right = 0
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            one = wanted[name].grad
            assert one is not None, name
            if parameter.grad is None:
                absent += 1
                continue
            mine: Tensor = parameter.grad.full_tensor() * averaged  # type: ignore[attr-defined]
            close = float((mine - one).abs().max()) < 1e-8 * float(one.abs().max())
            right, wrong = right + close, wrong + (not close)
    return absent, wrong, right


@pytest.mark.thorough(4)
@pytest.mark.unmeasured
@pytest.mark.parametrize("schedule", some(SPLIT, 1))
def test_ours_are_right_on_the_case_where_fsdp2_loses_gradients(schedule: str) -> None:
    case = Case(schedule, chunks=2, weight=2)
    if since("2.12") or "V" not in schedule:  # torch's stages send to their own rank before
        resharded = run_ranks(fsdp, 4, case, True)
        assert sum(absent + wrong for absent, wrong, _ in resharded) > 0
        kept = run_ranks(fsdp, 4, case, False)  # without the split the comparison succeeds
        assert all(absent + wrong == 0 and right > 0 for absent, wrong, right in kept)
    for loss, gradient, *_ in run_ranks(ours, 4, case):
        assert loss < TOLERANCE
        assert gradient < TOLERANCE


class _Parts(SchedulerHook):
    """Events of the trace at the end of each pass, with the kind of pass."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.seen: list[tuple[ComputeAction, int, int]] = []
        self._at = 0

    def before_backward(self, action: ComputeAction) -> None:
        self._at = len(self.trace.events)

    def after_backward(self, action: ComputeAction) -> None:
        new = [event.kind for event in self.trace.events[self._at :]]
        self.seen.append((action, new.count("USE"), new.count("RS")))


def ours(
    rank: int, world_size: int, case: Case
) -> tuple[float, float, list[tuple[ComputeAction, int, int]], list[int]]:
    trace = Trace(enabled=True)
    watch = _Parts(trace)
    pipeline, plain = make(case, hooks=[watch], trace=trace)
    losses = pipeline.step(batches(case, pipeline.mesh))
    found = compare(case, pipeline, plain, losses)
    cut = [len(communicator.replicated.sharded) for communicator in pipeline.communicators]
    return found.loss, found.gradient, watch.seen, cut


@pytest.mark.thorough(2)
@pytest.mark.parametrize("schedule", some(SPLIT, 1))
def test_weights_get_gradients_in_the_weight_part_and_are_not_used_there(schedule: str) -> None:
    case = Case(schedule, chunks=2, weight=2, layers=9)
    parts = 0
    for _, _, seen, cut in run_ranks(ours, 4, case):
        for action, uses, reductions in seen:
            if action.part == "weight":
                assert (uses, reductions) == (0, cut[action.chunk])
                parts += 1
            elif action.part == "input":
                assert uses > 0
                assert reductions == 0
            else:
                assert reductions == cut[action.chunk]
    assert parts > 0, "no backward was split: the test would say nothing"


@pytest.mark.parametrize("schedule", SPLIT)
def test_a_chunk_that_recomputes_computes_both_gradients_at_once(schedule: str) -> None:
    case = Case(schedule, chunks=2, layers=9, checkpoint={"mode": "full"})
    for loss, gradient, seen, _ in run_ranks(ours, 2, case):
        assert loss < TOLERANCE
        assert gradient < TOLERANCE
        assert {action.part for action, *_ in seen} == {"full"}


@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("together", [0, 65536])
def test_a_weight_part_is_right_when_its_weights_memory_is_gone(
    schedule: str, together: int
) -> None:
    # Three blocks in every split chunk: between its two parts other blocks have used their slots.
    weights = {"memory_pool": False, "coalesce_bytes": together}
    case = Case(schedule, chunks=2, weight=2, layers=14, weights=weights)
    for loss, gradient, *_ in run_ranks(ours, 4, case):
        assert loss < TOLERANCE
        assert gradient < TOLERANCE
