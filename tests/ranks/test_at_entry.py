"""WP-11, WP-14: a block unshards all its weights at entry if no timeline is recorded."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input

from internsp.config import ActivationCheckpointConfig
from internsp.errors import StaleWeightError
from internsp.mesh import ParallelMesh
from internsp.pipeline.stage import _ParameterStandIn, weight_backward
from internsp.wp import collectives
from tests.support.compare import close
from tests.support.models import ALL, SOME, Block, Tiny, Twin, raises
from tests.support.ranks import ranks

HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)


@ranks(2)
def test_gradients_are_right_and_a_stale_weight_is_found_without_a_trace() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    cases: tuple[tuple[dict[str, Any], Any], ...] = (
        ({}, None), ({}, HALF), ({"overlap": False}, None), ({"gather_before": "rolling"}, HALF),
    )  # fmt: skip
    for config, checkpoint in cases:
        twin = Twin(Tiny, mesh, checkpoint, **(ALL | config))
        twin.trace.enabled = False
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (twin.plain, twin.ours)]
        for step in range(3):
            for _ in range(2):
                twin.backward()
            twin.check_step(optimizers, f"{config} {checkpoint}, step {step}")
        loss = twin.ours(*twin.batch()[1])
        with torch.no_grad():
            twin.ours.layers[1].w1.weight.add_(1.0)  # type: ignore[index, union-attr, operator]
        raises(StaleWeightError, loss.backward, "layers.1.w1")


class Scaled(Block):
    """Has a weight that autocast leaves in full precision, and others that it casts."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.randn(width, width) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + self.scale.square().sum(0)))


def by_turns(twin: Twin) -> None:
    twin.trace.enabled = False
    unit = twin.communicator.blocks[1]
    for step, half in enumerate((False, True, True, False)):
        for model in (twin.plain, twin.ours):
            block = model.layers[1]  # type: ignore[index, union-attr]
            for parameter in (block.wo.weight, block.norm.bias, block.w2.bias):  # type: ignore[union-attr]
                parameter.requires_grad_(step == 3)
        everybody, mine = twin.batch()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            losses = [twin.plain(*everybody), twin.ours(*mine)]
        held = [w for u in twin.communicator.blocks if u.slot == unit.slot for w in u.weights]
        gathered = {weight.used_version[1] for weight in held if weight.used_version}
        assert (torch.bfloat16 in gathered) == half, f"step {step}: {gathered}"
        for loss in losses:
            loss.backward()
        twin.check_gradients(f"step {step}, autocast {half}", 3e-2 if half else 1e-5)
        twin.zero_grad()


@pytest.mark.thorough(1)
@ranks(2)
def test_a_block_follows_autocast_and_frozen_weights_without_a_trace() -> None:
    """Full precision and autocast in turn, some weights frozen, unfrozen in the last step."""
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for reduce_dtype in (None, "float32"):  # the latter: gradients of two dtypes in one message
        options = ALL | {"reduce_dtype": reduce_dtype}
        by_turns(Twin(partial(Tiny, Scaled), mesh, dtype=torch.float32, **options))


class Again(Block):
    """Given a gradient, it runs itself again and backward, as blocks of a reversible model do."""

    def forward(self, x: Tensor, gradient: Tensor | None = None) -> Tensor:
        if gradient is None:
            return super().forward(x)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            super().forward(x).backward(gradient)
        assert x.grad is not None
        return x.grad


class Reversible(torch.autograd.Function):
    """Keeps a block's input alone."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Any:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, ctx.block(*ctx.saved_tensors, gradient)


class OfReversible(Tiny):
    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Reversible.apply(layer, x)
        return x


@ranks(2)
def test_a_block_that_records_a_part_under_no_grad_has_its_gradients() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    twin = Twin(partial(OfReversible, Again), mesh, **ALL)
    twin.trace.enabled = False
    for step in range(2):
        twin.backward()
        twin.check_gradients(f"step {step}")
        twin.zero_grad()


class WithLoss(torch.autograd.Function):
    """Returns its input, and gives a loss of the block its gradient, as routers of experts do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=gradient.dtype)


class Routed(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return WithLoss.apply(y, self.w1(x).square().sum())  # type: ignore[no-any-return]


@ranks(2)
def test_backward_may_come_to_a_loss_of_a_block_before_its_output() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    twin = Twin(partial(Tiny, Routed), mesh, **ALL)
    twin.trace.enabled = False
    twin.backward()
    twin.check_gradients()


class Stage(nn.Module):
    """The modules between two splits of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@ranks(2)
def test_a_backward_in_two_parts_is_right_without_a_trace(rank: int) -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    twin = Twin(Stage, mesh, **ALL)
    twin.trace.enabled = False
    state, generator = twin.communicator.state, torch.Generator().manual_seed(5)
    for step in range(2):
        both = torch.randn(2, 4, 6, dtype=torch.float64, generator=generator)
        given = both[rank].clone().requires_grad_()
        twin.plain(both).square().sum().backward()
        outputs = [twin.ours(given)]
        twin.communicator.events.begin_backward_part(weights=False)
        (arrived,), groups = stage_backward_input(
            outputs,
            [2 * outputs[0].detach()],
            [given],
            map(_ParameterStandIn, twin.ours.parameters()),
        )
        twin.communicator.events.end_backward_part()
        assert all(p.grad is None for p in twin.ours.parameters())
        alone = both[rank].clone().requires_grad_()
        twin.plain(alone).square().sum().backward(inputs=[alone])
        assert arrived is not None
        assert alone.grad is not None
        close(arrived, alone.grad, f"step {step}: gradient of the input")
        gathers = state.collectives.counters.gathers
        twin.communicator.events.begin_backward_part(weights=True)
        weight_backward(map(_ParameterStandIn, twin.ours.parameters()), groups)
        twin.communicator.events.end_backward_part()
        twin.check_gradients(f"step {step}, in two parts")
        assert state.collectives.counters.gathers == gathers, "a weight part needs no weight"
        twin.zero_grad()


LONG_NAMES = (  # on gloo; each name has more than the 15 characters that lie in the string itself
    "allgather_into_tensor_coalesced", "allgather_coalesced", "allreduce_coalesced",
)  # fmt: skip


@pytest.mark.thorough(3)
@pytest.mark.parametrize("direct", [True, False], ids=["pairs", "a ring"])
@ranks(2)
def test_small_weights_are_gathered_in_one_launch_without_gloos_coalesced_form(
    direct: bool
) -> None:
    """torch 2.13 frees the name of gloo's last collective twice if two threads end one at once."""
    launched: list[str] = []
    for name in LONG_NAMES:  # the process ends with the test
        setattr(dist.ProcessGroup, name, lambda *_: launched.append("coalesced"))
    if not direct:
        collectives.MOST_DIRECT = 1
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for config in (ALL, SOME, {**ALL, "overlap": False}, {**ALL, "memory_pool": False}):
        for traced in (True, False):
            twin = Twin(Tiny, mesh, **config)
            twin.trace.enabled = traced
            for step in range(2):
                twin.backward()
                twin.check_gradients(f"{config}, traced {traced}, step {step}")
                twin.zero_grad()
            gathers = [e for e in twin.trace.events if e.kind == "AG"]
            assert all(event.end is not None for event in gathers), "each end is recorded"
            assert bool(gathers) == traced
            twin.communicator.prefetch_all()  # and thrown away while they are in flight
            del twin
            gc.collect()
    assert not launched
