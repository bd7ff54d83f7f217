"""The trainer's sums over a pipeline's micro-batches; the pipeline itself is a mock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from internsp.app.train.passes import PipelinedStep
from internsp.pipeline import MicroBatch


class _Pipeline:
    """Its last chunk returns 1, 2, ... for the micro-batches; records the scaled losses."""

    criterion: Callable[[Tensor, MicroBatch], Tensor]

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.options: list[Any] = []

    def step(self, batches: Sequence[MicroBatch]) -> None:
        self.options = [batch.options["loss_chunk"] for batch in batches]
        for number, batch in enumerate(batches):
            self.losses.append(float(self.criterion(torch.tensor(1.0 + number), batch)))

    evaluate = step


def test_sums_are_of_each_pass_and_losses_divided_by_all_tokens_and_scaled() -> None:
    pipeline = _Pipeline()
    session: Any = SimpleNamespace(
        pipeline=pipeline,
        modules=[],
        mesh=SimpleNamespace(device=torch.device("cpu")),
        optimizer=SimpleNamespace(scale=lambda loss: loss * 8),  # of fp16
        config=SimpleNamespace(train=SimpleNamespace(loss_chunk=77)),
    )
    passes = PipelinedStep(session)
    layouts: Any = [SimpleNamespace(input_ids=None, labels=None) for _ in range(3)]
    assert passes.train(layouts, torch.tensor(4.0, dtype=torch.float64)) == 6
    assert pipeline.losses == [2, 4, 6]
    assert pipeline.options == [77] * 3
    assert passes.evaluate(layouts[:2]) == 3
    assert pipeline.losses[3:] == [8, 16], "hooks see an evaluation's sums"
    assert passes.train(layouts[:1], torch.tensor(2.0, dtype=torch.float64)) == 1
    assert pipeline.losses[-1] == 4
