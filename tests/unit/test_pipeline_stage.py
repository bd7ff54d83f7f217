"""What a stage adds to torch's, without ranks: torch's own methods are mocks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from internsp.errors import ConfigError, LayoutError
from internsp.pipeline import ComputeAction, ISPPipelineStage, SchedulerHook
from tools.bench.model import process_group

META = torch.empty(2, 2, device="meta")


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes stages of two."""
    with process_group("fake", 2):
        yield partial(
            ISPPipelineStage, nn.Linear(2, 2), num_stages=2, device=torch.device("cpu"), chunk=0,
            communicator=SimpleNamespace(mesh=SimpleNamespace(rank=0)), hooks=[], input_args=META,
            output_args=META,
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


def test_a_stage_says_what_it_takes_and_returns_when_it_is_made_or_when_ids_come(make: Any) -> None:
    nothing: dict[str, Any] = {"stage_index": 0, "input_args": None, "output_args": None}
    with pytest.raises(ConfigError, match="give ISPPipelineStage input_args and output_args"):
        make(**nothing)

    def form(ids: torch.Size) -> dict[str, Any]:
        return {"input_args": META[0].expand(ids), "output_args": META.expand(*ids, 2)}

    stage = make(**nothing, form=form)
    stage.stage_index_to_group_rank = {0: 0, 1: 0}
    for ids in (torch.Size((3, 2)), torch.Size((5, 2))):  # only the first ones count
        stage.take_shape(ids)
    stage._check_sent_form(torch.zeros(3, 2, 2), 0)
    with pytest.raises(LayoutError, match=r"the next stage receives \(3, 2, 2\) torch.float32"):
        stage._check_sent_form(torch.zeros(5, 2, 2), 1)
    assert stage.stage_index_to_group_rank == {0: 0, 1: 0}
