"""Split backward of models less regular than the zoo's: every weight gets its gradient."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from internsp.base.trace import Trace
from internsp.layers import ParallelLinearWithCommExt
from tests.support.compare import TOLERANCE
from tests.support.pipeline import Case, batches, gradient_gaps, make, plain_loss
from tests.support.ranks import run_ranks

WIDTH = 12


class _WithBranch(nn.Module):
    """A block and a linear layer that only some rows of a batch use."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.branch = ParallelLinearWithCommExt(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.rows: tuple[bool, ...] = ()

    def forward(self, h: Tensor, *args: Any) -> Tensor:
        h = self.block(h, *args)
        if not any(self.rows):
            return h
        return h + self.branch(h) * torch.tensor(self.rows)[:, None, None]


class _Normed(nn.Module):
    """Its weight's gradient needs the weight."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))

    def forward(self, h: Tensor, *args: Any) -> Tensor:
        h = self.block(h, *args)
        return h + F.linear(h, self.weight / self.weight.norm())


@dataclass(frozen=True)
class Other(Case):
    """A zoo model with some of its weights frozen, or some of its blocks wrapped."""

    frozen: str = "nothing"
    wrapped: type[nn.Module] | None = None
    which: tuple[int, ...] = ()

    def build(self) -> nn.Module:
        model: Any = super().build()
        torch.manual_seed(5)
        for index in self.which:
            assert self.wrapped is not None
            model.layers[index] = self.wrapped(model.layers[index])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(re.search(self.frozen, name) is None)
        assert isinstance(model, nn.Module)
        return model


ZBV: dict[str, Any] = {"schedule": "ZBVZeroBubble", "chunks": 2, "weight": 2}
CASES = {
    "frozen": Other(**ZBV, frozen="embed|wo|w2|norm"),
    "idle": Other(**ZBV, wrapped=_WithBranch, which=(1, 2, 3)),
    # Three blocks of its chunk share two slots: a block is overwritten before its weight backward.
    "needs its weight": Other(**ZBV, layers=12, wrapped=_Normed, which=(4,)),
}


def run(rank: int, world_size: int) -> dict[str, tuple[float, list[str], list[str], list[bool]]]:
    return {name: one(case) for name, case in CASES.items()}


def one(case: Other) -> tuple[float, list[str], list[str], list[bool]]:
    """The worst gradient, the gathers and reductions, the planned ones; which chunks split."""
    trace = Trace(enabled=True)
    pipeline, plain = make(case, trace=trace)
    mesh = pipeline.mesh
    for module in (m for chunk in pipeline.chunks for m in chunk.modules()):
        if isinstance(module, _WithBranch):
            module.rows = (mesh.data_rank == 0,)
    for module in plain.modules():
        if isinstance(module, _WithBranch):
            module.rows = (True, False) * case.micro_batches
    pipeline.step(batches(case, mesh))
    passes = [(e.kind, e.phase) for e in trace.events if e.kind in ("FORWARD", "BACKWARD")]
    assert passes == [("BACKWARD" if at.part else "FORWARD", at.part) for at in pipeline.actions]
    plain_loss(case, plain, mesh.data).backward()
    done, planned = (t.lines(("AG", "RS")) for t in (trace, pipeline.planned()))
    worst = max(gradient_gaps(pipeline, plain).values())
    return worst, done, planned, [stage.splits_backward for stage in pipeline.stages]


@pytest.mark.thorough(4)
def test_frozen_and_idle_weights_and_those_that_their_own_gradient_needs() -> None:
    ranks = run_ranks(run, 4)
    whole = [stage for found in ranks for stage in found["needs its weight"][3]]
    assert whole.count(False) == 2, "both weight ranks of one stage bear both gradients at once"
    for found in ranks:
        for name, (worst, done, planned, _) in found.items():
            assert worst < TOLERANCE, name
            assert done == planned, name
        assert found["frozen"][3] == found["idle"][3] == [True, True]
