"""torch's own pipeline schedules with stages of ``internsp.fsdp``: the gradients of one process.

FSDP2 of torch 2.13 has them under the first three; under the two whose form is a V it is silently
wrong, since they split backward.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import internsp.fsdp as ours
from internsp.errors import GradientError
from tests.support.few import few
from tests.support.fsdp import Block, mesh_of, require_same, whole
from tests.support.ranks import ranks
from tests.support.versions import since

SIZE, ROWS, MICRO = 6, 4, 4
SCHEDULES = {
    "ScheduleZBVZeroBubble": lambda pp: [pp, 3 - pp],
    "Schedule1F1B": lambda pp: [pp],
    "ScheduleDualPipeV": lambda pp: [pp, 3 - pp],
    "ScheduleInterleaved1F1B": lambda pp: [pp, pp + 2],
    "ScheduleGPipe": lambda pp: [pp],
}
"""Stages of a pipeline rank, of two."""
if not since("2.12"):  # in a V a rank sends to itself, which gloo refuses before
    for name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        del SCHEDULES[name]
    SCHEDULES["ScheduleInterleavedZeroBubble"] = lambda pp: [pp, pp + 2]  # it splits backward, too


def loss_of(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().sum()


def batch(step: int, data: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + data)
    return torch.randn(2, ROWS, 3, SIZE, generator=draw, dtype=torch.double)


def expected(blocks: list[Any], step: int) -> dict[str, Tensor]:
    """Gradients of all blocks, by number and name: the mean over both data ranks."""
    model = nn.Sequential(*copy.deepcopy(blocks))
    for data in range(2):
        x, wanted = batch(step, data)
        (loss_of(model(x), wanted) / 2).backward()
    return whole({name: p.grad for name, p in model.named_parameters()})


def pipelined(kind: str, blocks: list[Any], steps: int) -> list[dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, data = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    numbers = SCHEDULES[kind](pp)
    count = 2 * len(numbers)
    per, stages, found = len(blocks) // count, [], []
    for number in numbers:
        stage: Any = nn.Sequential(*copy.deepcopy(blocks[per * number : per * (number + 1)]))
        for part in (*stage, stage):
            torchs.fully_shard(part, mesh=mesh["dp"])
        group = mesh.get_group("pp")
        stages.append(PipelineStage(stage, number, count, torch.device("cpu"), group=group))
    schedule = getattr(schedules, kind)(
        stages if len(stages) > 1 else stages[0], MICRO, loss_fn=loss_of, scale_grads=False
    )
    for step in range(steps):
        x, wanted = batch(step, data)
        inputs = (x,) if 0 in numbers else ()
        schedule.step(*inputs, **({"target": wanted} if count - 1 in numbers else {}))
        gradients = {}
        for number, held in zip(numbers, stages, strict=True):
            for name, parameter in held.submod.named_parameters():
                block, _, rest = name.partition(".")
                gradients[f"{per * number + int(block)}.{rest}"] = parameter.grad
                parameter.grad = None
        found.append(whole(gradients))
    return found


@few("kinds", list(SCHEDULES), 2)
@ranks(4)
def test_torchs_schedules_have_the_gradients_of_one_process(kinds: list[str]) -> None:
    torch.manual_seed(1)
    blocks = [Block(SIZE).double() for _ in range(4)]
    ours.install()
    try:
        for kind in kinds:
            for step, found in enumerate(pipelined(kind, blocks, 2)):
                wanted = expected(blocks, step)
                assert len(found) == len(wanted) // 2, "each rank has half of the blocks"
                require_same(found, {name: wanted[name] for name in found}, 1e-10)
    finally:
        ours.uninstall()


@ranks(2)
def test_a_split_backward_without_install_names_it() -> None:
    model: Any = ours.fully_shard(Block(SIZE), mesh=mesh_of((2,)))
    x = torch.randn(2, 3, SIZE, requires_grad=True)
    out = model(x)
    _, groups = stage_backward_input([out], [torch.ones_like(out)], [x], model.parameters())
    with pytest.raises(GradientError, match=r"internsp\.fsdp\.install"):
        stage_backward_weight(model.parameters(), groups)
