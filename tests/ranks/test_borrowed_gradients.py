"""With a weight group of one rank, ``.grad`` is autograd's own tensor: no copy, no aliasing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from internsp.mesh import ParallelMesh
from internsp.optim import ZeroOptimizer
from internsp.wp.parameter import ShardedParameter
from tests.support.models import Tiny, Twin
from tests.support.ranks import ranks


class Added(nn.Module):
    """Adds two large weights, so that autograd gives both the same gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(6, 6) / 3) for _ in range(2))
        self.wo = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wo(torch.tanh(x @ (self.a + self.b)))


@pytest.mark.parametrize("world_size", [1, 2])
@ranks()
def test_gradients_of_a_weight_group_of_one_equal_one_process(world_size: int) -> None:
    mesh = ParallelMesh.create(weight=1, device_type="cpu", timeout_seconds=20)
    for make in (Tiny, partial(Tiny, block=Added)):
        for checked in ("each", "sum"):
            twin = Twin(make, mesh)
            for step in range(3):
                twin.backward()
                if checked == "each" or step == 2:
                    twin.check_gradients(f"{make}, {checked} {step}")
                if checked == "each":
                    twin.zero_grad()
            storages = [w.storage.data_ptr() for w in twin.communicator.replicated.sharded]
            assert len(set(storages)) == len(storages)


@ranks(1)
def test_two_weights_with_one_gradient_tensor_get_one_each() -> None:
    """A user scales one ``.grad``; no other parameter's gradient may change."""
    mesh = ParallelMesh.create(weight=1, device_type="cpu", timeout_seconds=20)
    twin = Twin(partial(Tiny, block=Added), mesh)
    twin.backward()
    for model in (twin.plain, twin.ours):
        for name, parameter in model.named_parameters():
            if name.endswith(".a") and parameter.grad is not None:
                parameter.grad.mul_(3.0)
    twin.check_gradients("scaled")


@ranks(1)
def test_a_lent_gradient_that_grows_is_summed_in_fp32() -> None:
    """A sum in ``reduced_grad`` over micro-batches equals that in fp32, also for bf16 weights."""
    mesh = ParallelMesh.create(weight=1, device_type="cpu", timeout_seconds=20)
    for dtype in (torch.float64, torch.bfloat16):
        twin = Twin(partial(Tiny, block=Added), mesh, dtype=dtype)
        sums: dict[str, Tensor] = {}
        optimizer = ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.1)
        for _ in range(3):
            twin.backward()
            for name, parameter in twin.plain.named_parameters():
                wide = torch.promote_types(dtype, torch.float32)
                assert parameter.grad is not None
                part = parameter.grad.to(wide)
                sums[name] = sums[name] + part if name in sums else part
            twin.plain.zero_grad()
        found = optimizer.gather_gradients()
        for name, wanted in sums.items():
            torch.testing.assert_close(found[name], wanted, rtol=1e-6, atol=1e-9, msg=name)


@ranks(1)
def test_a_lent_gradient_is_not_copied() -> None:
    """``.grad`` is the tensor that autograd made."""
    mesh = ParallelMesh.create(weight=1, device_type="cpu", timeout_seconds=20)
    twin = Twin(Tiny, mesh)
    ready: dict[str, int] = {}
    communicator = twin.communicator

    class Spy(dict[ShardedParameter, Tensor]):
        def __setitem__(self, weight: ShardedParameter, gradient: Tensor) -> None:
            ready[weight.name] = gradient.data_ptr()
            super().__setitem__(weight, gradient)

    communicator.state.reducer.ready = Spy()
    twin.backward()
    twin.check_gradients("spied")
    kept = {
        name: p.grad.to_local().data_ptr()  # type: ignore[union-attr]
        for name, p in twin.ours.named_parameters()
        if name in ready
    }
    assert ready
    assert kept == ready
