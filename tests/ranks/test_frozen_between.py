"""A weight that is frozen between a forward and its backward has no ``.grad``, as in torch."""

from __future__ import annotations

from tests.support.compare import close
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
