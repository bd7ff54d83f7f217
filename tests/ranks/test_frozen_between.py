"""Weights that are frozen within a step have the gradients that they have in torch: none of a
backward before which they were frozen, and all of those before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from internsp.fsdp import fully_shard
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


class Routed(Tiny):
    """With an expert for rows that begin with 0."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.expert = nn.Linear(6, 6)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x, routed = self.embed(ids), ids[:, :1, None] == 0
        if routed.any():
            x = x + routed * self.expert(x)
        logits = self.head(self.norm(self.blocks(x)))
        assert labels is not None
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("stepped", [False, True], ids=["plain loop", "ZeroOptimizer"])
@ranks(2)
def test_what_is_frozen_after_a_backward_without_sync_keeps_its_gradient(stepped: bool) -> None:
    """Also where other ranks alone have used it."""
    twin = Twin(Routed, mesh_of(2))
    optimizer = stepped and ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.1)
    everybody, mine = twin.batch()
    everybody[0][:, 0] = torch.tensor([0, 0, 1, 1])  # the second rank does not use the expert
    with twin.communicator.no_sync():
        for model, batch in zip((twin.plain, twin.ours), (everybody, mine), strict=True):
            model(*batch).backward()
            for part in (model.expert, model.layers[0], model.norm):
                part.requires_grad_(False)
    twin.backward()
    if optimizer:
        optimizer.step()
        torch.optim.SGD(twin.plain.parameters(), lr=0.1).step()
        twin.check_parameters("frozen within the step")
    else:
        twin.check_gradients("frozen within the step")


@ranks(2)
def test_what_is_frozen_for_one_forward_has_the_gradient_of_the_graph_before() -> None:
    """As a discriminator's is, where both losses of a step have one backward."""
    twin = Twin(Tiny, mesh_of(2))
    for model, batch in zip((twin.plain, twin.ours), twin.batch(), strict=True):
        loss = model(*batch)
        for part in (model.layers[1], model.head):
            part.requires_grad_(False)
        loss = loss + 2 * model(*batch)
        model.requires_grad_(True)
        loss.backward()
    twin.check_gradients("frozen for one forward")


@ranks(2)
def test_a_unit_that_sums_while_others_reduce_keeps_what_it_had_before_it_was_frozen(
    rank: int,
) -> None:
    plain: Any = Routed().double()
    ours = copy.deepcopy(plain)
    for unit in (*ours.layers, ours):
        fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
    ids = torch.tensor([[0, 3, 5], [1, 2, 4]])  # the second rank does not use the expert
    ours.set_requires_gradient_sync(False, recurse=False)  # but its blocks reduce
    for _ in range(2):
        (plain(ids, ids) / 2).backward()  # the mean of two ranks
        ours(ids[rank, None], ids[rank, None]).backward()
        plain.expert.requires_grad_(False)
        ours.expert.requires_grad_(False)
        ours.set_requires_gradient_sync(True)
    check(gradients(ours), gradients(plain), "frozen between")
