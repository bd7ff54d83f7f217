"""Weights on two axes of tensor ranks, as those of experts that tensor ranks divide: FSDP2's
numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

import internsp.fsdp as ours
from internsp.errors import StructureError
from internsp.fsdp.attach import plan_of
from internsp.optim import ZeroOptimizer
from tests.support.fsdp import Program, compare, parts
from tests.support.ranks import ranks

SIZE, WIDE = 5, 7  # no multiples of any number of ranks
PLACED = {
    "0.weight": (Shard(0), Shard(1)), "0.bias": (Shard(0), Replicate()),
    "1.weight": (Replicate(), Shard(0)), "1.bias": (Replicate(), Replicate()),
    "2.weight": (Shard(0), Shard(0)), "2.bias": (Shard(0), Shard(0)),
}  # fmt: skip
"""Of each weight, on both axes of tensor ranks."""


class Layer(nn.Linear):
    """Its input and output are whole on all tensor ranks."""

    mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        there = DTensor.from_local(x, self.mesh, [Replicate()] * 2, run_check=False)
        made: Any = F.linear(there, self.weight, self.bias)
        return torch.tanh(made.redistribute(placements=[Replicate()] * 2).to_local())


def model_of(mesh: DeviceMesh, placed: dict[str, Any]) -> Any:
    model = nn.Sequential(Layer(SIZE, WIDE), Layer(WIDE, WIDE), Layer(WIDE, SIZE)).double()
    for number, layer in enumerate(model):
        layer.mesh = mesh
        for name, value in [*layer.named_parameters()]:
            put = distribute_tensor(value.detach(), mesh, placed[f"{number}.{name}"])
            setattr(layer, name, nn.Parameter(put))
    return model


def program(data: tuple[int, ...], zero: bool = False, **options: Any) -> Program:
    """Two clipped steps; ``data``: how many ranks each dimension of the data's mesh has."""

    def run(names: Any, rank: int) -> dict[str, Tensor]:
        axes = ("replicas", "shard")[-len(data) :]
        mesh = init_device_mesh("cpu", (*data, 2, 2), mesh_dim_names=(*axes, "rows", "columns"))
        model = model_of(mesh["rows", "columns"], PLACED)
        for part in (*model, model):
            names.fully_shard(part, mesh=mesh[axes], **options)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if zero and names is ours:
            optimizer = ours.zero_optimizer(model, optimizer, max_grad_norm=0.1)
        found: dict[str, Tensor] = {}
        for step in range(2):
            draw = torch.Generator().manual_seed(10 * step + rank // 4)
            x = torch.randn(3, SIZE, generator=draw, dtype=torch.double)
            model(x).square().sum().backward()
            if not zero:
                found |= parts({f"{step} {n}": p.grad for n, p in model.named_parameters()})
            if not zero or names is not ours:
                norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                found[f"{step} norm"] = norm.full_tensor()
            optimizer.step()
            if zero and names is ours:
                found[f"{step} norm"] = torch.tensor(optimizer.grad_norm, dtype=torch.double)
            optimizer.zero_grad()
        if names is ours:  # a program may give whole values
            for parameter in model[0].parameters():
                parameter.data = parameter.full_tensor().detach()
        return found | parts(dict(model.named_parameters()))

    run.__name__ = f"{data} {zero=} {options}"
    return run


@ranks(4)
def test_two_axes_of_tensor_ranks_have_the_numbers_of_fsdp2(rank: int) -> None:
    compare(program((1,)), rank=rank)


def apart(names: Any) -> Any:
    """Layers on two meshes of tensor ranks, neither of which has all of them."""
    mesh = init_device_mesh("cpu", (1, 1, 2, 2), mesh_dim_names=("replicas", "shard", "a", "b"))
    model: Any = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)).double()
    for layer, axis in zip(model, ("a", "b"), strict=True):
        parallelize_module(layer, mesh[axis], ColwiseParallel(output_layouts=Replicate()))
    for part in (*model, model):
        names.fully_shard(part, mesh=mesh["replicas", "shard"])
    model(torch.ones(2, SIZE, dtype=torch.double)).sum().backward()
    return model


def step(names: Any, rank: int) -> dict[str, Tensor]:
    model = apart(names)
    torch.optim.AdamW(model.parameters()).step()
    return parts(dict(model.named_parameters()))


@ranks(4)
def test_an_optimizer_refuses_tensor_ranks_apart_which_a_plain_loop_trains(rank: int) -> None:
    """Their parts of the norm would be left out."""
    compare(step, rank=rank)
    communicator = plan_of(apart(ours), "").communicator
    with pytest.raises(StructureError, match=r"1\.bias lies on tensor ranks .* plain loop"):
        ZeroOptimizer(communicator, torch.optim.AdamW)


@pytest.mark.thorough(20)
@ranks(8)
def test_two_axes_of_tensor_ranks_beside_data_ranks_have_the_numbers_of_fsdp2(rank: int) -> None:
    compare(program((2,)), program((2, 1), zero=True), rank=rank)
