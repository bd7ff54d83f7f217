"""What a stage adds to torch's, without ranks: torch's own methods are mocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from internsp.pipeline import ComputeAction, ISPPipelineStage, MicroBatch, SchedulerHook
from tools.bench.model import process_group


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes stages of two."""
    with process_group("fake", 2):
        yield partial(
            ISPPipelineStage, nn.Linear(2, 2), num_stages=2, device=torch.device("cpu"), chunk=0,
            communicator=None, hooks=[],
        )  # fmt: skip


class Watch(SchedulerHook):
    """Notes the part of each backward."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def before_backward(self, action: ComputeAction) -> None:
        self.parts.append(action.part)


@pytest.mark.parametrize(
    ("given", "parts"),
    [({}, ["input", "weight"]), ({"splits_backward": False}, ["full"])],
    ids=["default", "whole"],
)
def test_a_stage_splits_its_backward_unless_it_is_told_not_to(
    make: Any, given: dict[str, Any], parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("backward_one_chunk", "backward_weight_one_chunk"):
        monkeypatch.setattr(PipelineStage, name, lambda *_: None)
    watch = Watch()
    stage = make(stage_index=1, **given, hooks=[watch])
    stage.has_backward = True
    stage.backward_one_chunk(0, full_backward=False)
    stage.backward_weight_one_chunk(0)
    assert watch.parts == parts


def test_an_evaluation_first_takes_no_gradient_from_received_inputs_under_torch_2_11(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later versions ask in each forward, by ``tensor_meta``."""
    old, new = (SimpleNamespace(buffer=torch.ones(2)) for _ in range(2))
    new.tensor_meta = None

    def prepare(stage: Any) -> None:
        stage.args_recv_info = {0: (old,), 1: (new,)}

    monkeypatch.setattr(PipelineStage, "_prepare_forward_infra", prepare)
    make(stage_index=1)._prepare_forward_infra()
    assert old.buffer.requires_grad
    assert not new.buffer.requires_grad


def test_zeros_are_sent_where_no_gradient_reaches_an_input(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.13 does by itself; 2.11 and 2.12 raise."""
    hidden, ids = torch.ones(2, 3, requires_grad=True), torch.ones(2, dtype=torch.long)
    stage = make(stage_index=1)
    stage.args_recv_info = {0: [SimpleNamespace(buffer=buffer) for buffer in (hidden, ids, hidden)]}
    given = torch.full((2, 3), 5.0)
    monkeypatch.setattr(
        PipelineStage, "backward_one_chunk",
        lambda stage, *_: stage.bwd_cache.update({0: (None, None, given)}),
    )  # fmt: skip
    stage.has_backward = True
    stage.backward_one_chunk(0)
    zeros, nothing, kept = stage.bwd_cache[0]
    assert torch.equal(zeros, torch.zeros(2, 3))
    assert not zeros.requires_grad
    assert nothing is None
    assert kept is given


@pytest.mark.parametrize(("stage_index", "inputs"), [(0, "ids"), (1, "hidden")])
def test_torch_2_11_infers_shapes_from_the_first_micro_batch_too(
    make: Any, stage_index: int, inputs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later versions of torch have other methods instead, which the tests of pipelines run."""
    monkeypatch.setattr("internsp.pipeline.stage.shape_inference", nullcontext)
    monkeypatch.setattr(PipelineStage, "_shape_inference", lambda _, *given: given, raising=False)
    stage = make(stage_index=stage_index)
    assert stage._shape_inference(("hidden",), {"torch": "'s"}) == (("hidden",), {"torch": "'s"})
    stage.batches = [MicroBatch(("ids",), {"labels": "first"}), MicroBatch(("others",))]
    assert stage._shape_inference(("hidden",), {}) == ((inputs,), {"labels": "first"})
