"""A weight that is frozen between a forward and its backward has no ``.grad``, as in torch."""

from __future__ import annotations

import torch

from internsp.optim import ZeroOptimizer
from tests.support.compare import check, close, gradients
from tests.support.meshes import mesh_of
from tests.support.models import Tiny, Twin
from tests.support.ranks import ranks


@ranks(2)
def test_a_weight_frozen_between_forward_and_backward_gets_no_gradient() -> None:
    twin = Twin(Tiny, mesh_of(2))
    frozen = "layers.1.w1.weight"
    for model, batch in zip((twin.plain, twin.ours), twin.batch(), strict=True):
        loss = model(*batch)
        dict(model.named_parameters())[frozen].requires_grad_(False)
        loss.backward()
    theirs = dict(twin.plain.named_parameters())
    for name, parameter in twin.ours.named_parameters():
        if name == frozen:
            assert parameter.grad is None
            assert theirs[name].grad is None
        elif parameter.grad is not None:
            close(parameter.grad.full_tensor(), theirs[name].grad, name)  # type: ignore[attr-defined]


@ranks(2)
def test_a_zero_optimizer_has_none_of_it_either() -> None:
    """Large and small ones; all ranks launch the same reductions."""
    twin = Twin(Tiny, mesh_of(2))
    optimizer = ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.1)
    for model, batch in zip((twin.plain, twin.ours), twin.batch(), strict=True):
        model(*batch).backward()
        loss = model(*batch)
        model.layers[1].requires_grad_(False)
        loss.backward()
    check(optimizer.gather_gradients(), gradients(twin.plain), "frozen in the second backward")
    optimizer.step()
    torch.optim.SGD(twin.plain.parameters(), lr=0.1).step()
    twin.plain.zero_grad()
    for model, batch in zip((twin.plain, twin.ours), twin.batch(), strict=True):
        model.requires_grad_(True)
        loss = model(*batch)
        model.layers[1].requires_grad_(False)
        loss.backward()
    wanted = {name: g for name, g in gradients(twin.plain).items() if g is not None}
    assert 0 < len(wanted) < len(gradients(twin.plain))
    check(optimizer.gather_gradients(), wanted, "frozen in the only backward")
