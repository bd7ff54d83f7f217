"""Frozen and unused parameters in a pipeline: all other gradients are right."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from internsp.errors import StructureError
from internsp.layers import ParallelLinearWithCommExt
from internsp.model_zoo.common import Block
from internsp.optim import ZeroOptimizer, step_together
from internsp.pipeline import split_model
from internsp.sp import SequenceLayout
from tests.support.compare import TOLERANCE, check, gradients
from tests.support.pipeline import Case, batches, gradient_gaps, make, plain_loss
from tests.support.ranks import ranks, run_ranks

Alter = Callable[[nn.Module], None]


def gaps(case: Case, alter: Alter, thaw: Alter = lambda model: None) -> dict[str, float]:
    """For each parameter of this rank the gap of its gradient.

    Args:
        alter: changes the full model before it is split.
        thaw: changes chunks and the full model after a first step.
    """
    pipeline, plain = make(case, alter=alter)
    pipeline.step(batches(case, pipeline.mesh))
    for module in (*pipeline.chunks, plain):
        thaw(module)
    for parameter in (p for chunk in pipeline.chunks for p in chunk.parameters()):
        parameter.grad = None
    pipeline.step(batches(case, pipeline.mesh))
    plain_loss(case, plain, pipeline.mesh.data).backward()
    return gradient_gaps(pipeline, plain)


def bad(found: dict[str, float]) -> list[str]:
    return [f"{name}: {apart}" for name, apart in found.items() if not apart < TOLERANCE]


def _freeze_stages(case: Case, frozen: int) -> Alter:
    def alter(model: nn.Module) -> None:
        model.embed.requires_grad_(False)
        for blocks in split_model(model, case.pipeline * case.chunks)[:frozen]:
            for block in blocks:
                model.layers[block].requires_grad_(False)

    return alter


def _thaw(module: nn.Module) -> None:
    module.requires_grad_(True)


def first_stages_frozen(
    rank: int, world_size: int, case: Case, frozen: int, thawed: bool
) -> tuple[list[str], int]:
    found = gaps(case, _freeze_stages(case, frozen), _thaw if thawed else lambda model: None)
    return bad(found), len(found)


@pytest.mark.thorough(2)
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(
    ("schedule", "frozen"), [("InterleavedZeroBubble", 1), ("ZBVZeroBubble", 2)]
)
def test_stages_behind_frozen_ones_get_their_gradients(
    schedule: str, frozen: int, static: bool
) -> None:
    case = Case(schedule, chunks=2, static=static)
    for wrong, count in run_ranks(first_stages_frozen, 2, case, frozen, False):
        assert not wrong
        assert count > 0


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_stage_thawed_after_the_first_step_gets_its_gradients(schedule: str) -> None:
    case = Case(schedule, chunks=1 if schedule == "1F1B" else 2, static=False)
    for wrong, count in run_ranks(first_stages_frozen, 2, case, 1, True):
        assert not wrong
        assert count > 0


def stepped(rank: int, world_size: int, case: Case) -> tuple[float, float]:
    """The norm's largest gap in two clipped steps, and that of the parameters after them."""
    pipeline, plain = make(case, alter=_freeze_stages(case, 1))
    optimizers = [
        ZeroOptimizer(communicator, torch.optim.SGD, lr=0.1, max_grad_norm=0.05)
        for communicator in pipeline.communicators
    ]
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    gap = 0.0
    for _ in range(2):
        pipeline.step(batches(case, pipeline.mesh))
        step_together(optimizers)
        plain_loss(case, plain, pipeline.mesh.data).backward()
        wanted = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.05))
        alone.step()
        alone.zero_grad()
        gap = max(gap, abs(optimizers[0].grad_norm - wanted))
    values = dict(plain.named_parameters())
    return gap, max(
        float((p.full_tensor() - values[name]).detach().abs().max())  # type: ignore[attr-defined]
        for chunk in pipeline.chunks
        for name, p in chunk.named_parameters()
    )


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("schedule", "chunks"), [("1F1B", 1), ("ZBVZeroBubble", 2)])
def test_a_chunk_that_is_frozen_as_a_whole_has_an_optimizer_too(schedule: str, chunks: int) -> None:
    for norm, values in run_ranks(stepped, 2, Case(schedule, chunks=chunks)):
        assert norm < TOLERANCE
        assert values < TOLERANCE


class _Idle(Block):
    """A block with a weight that no forward uses."""

    def forward(self, h: Tensor, rotary: object, layout: SequenceLayout | None) -> Tensor:
        output: Tensor = super().forward(h, rotary, layout)
        return output


def _add_idle(model: nn.Module) -> None:
    for block in model.layers:
        block.__class__ = _Idle
        block.idle = ParallelLinearWithCommExt(12, 12, False, None, torch.float64)


def idle(rank: int, world_size: int, case: Case) -> list[str]:
    return bad(gaps(case, _add_idle))


@pytest.mark.thorough(4)
@pytest.mark.parametrize("together", [0, 65536], ids=["weight by weight", "at the block's entry"])
def test_a_weight_that_no_micro_batch_uses_has_no_gradient_under_a_split_backward(
    together: int,
) -> None:
    case = Case("ZBVZeroBubble", chunks=2, weight=2, weights={"coalesce_bytes": together})
    assert run_ranks(idle, 4, case) == [[]] * 4


class _Beside(Block):
    """A block with a branch from which no gradient goes back to its input."""

    two = False
    alone = False

    def forward(self, h: Tensor, rotary: object, layout: SequenceLayout | None) -> Tensor:
        h = super().forward(h, rotary, layout)
        branch = self.one(h.detach())
        if self.two:
            branch = self.other(torch.tanh(branch))
        return branch if self.alone else h + branch


def _add_branch(two: bool, alone: bool) -> Alter:
    def alter(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(5)
        for number, block in enumerate(model.layers):
            block.__class__ = _Beside
            block.two, block.alone = two, alone and number == len(model.layers) - 2
            for name in ("one", "other") if two else ("one",):
                layer = ParallelLinearWithCommExt(12, 12, False, None, torch.float64)
                nn.init.normal_(layer.weight, 0, 0.3, generator)
                setattr(block, name, layer)

    return alter


def beside(rank: int, world_size: int, case: Case) -> list[str]:
    return bad(gaps(case, _add_branch(two=False, alone=False)))


def test_a_branch_without_input_gradient_is_right_under_a_split_backward() -> None:
    case = Case("ZBVZeroBubble", chunks=2, weight=2, layers=13)
    assert run_ranks(beside, 4, case) == [[]] * 4


def hopeless(rank: int, world_size: int, case: Case, two: bool) -> str:
    with pytest.raises((StructureError, RuntimeError)) as error:
        gaps(case, _add_branch(two, alone=not two))
    return str(error.value)


@pytest.mark.parametrize(
    ("two", "why"),
    [
        (True, r"layers\.\d+\.one\.weight.* gets its gradient through .* an unsharded weight"),
        (False, r"\(and 12 more\) is used by an output through which no gradient reaches the"),
    ],
    ids=["a weight behind another", "no way to the input"],
)
def test_weights_that_a_weight_part_would_get_wrong_are_refused(two: bool, why: str) -> None:
    case = Case("ZBVZeroBubble", chunks=2, weight=2, layers=14, timeout=6)
    errors = run_ranks(hopeless, 4, case, two)
    for error in errors:
        assert re.search(why, error), error
        assert "1F1B" in error


@pytest.mark.thorough(1)
@ranks(2)
def test_such_weights_are_right_where_one_backward_computes_both_gradients() -> None:
    """What the refusal proposes: another schedule, or blocks that recompute."""
    for two in (True, False):
        for case in (
            Case("1F1B", layers=5),
            Case("ZBVZeroBubble", chunks=2, layers=5, checkpoint={"mode": "full"}),
        ):
            pipeline, plain = make(case, alter=_add_branch(two, alone=not two))
            pipeline.step(batches(case, pipeline.mesh))
            plain_loss(case, plain, pipeline.mesh.data).backward()
            wanted = gradients(plain)
            found = {
                name: gradient for name, gradient in gradients(*pipeline.chunks).items()
                # Stages send zeros where no gradient comes through.
                if wanted[name] is not None
                or (gradient is not None and gradient.to_local().any())  # type: ignore[attr-defined]
            }  # fmt: skip
            check(found, {name: wanted[name] for name in found}, f"{two} {case.schedule}")
