"""Layers that torch's ``parallelize_module`` has sharded are sharded again, and train right.

Two tensor ranks by two weight ranks, on meshes of either order of axes.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import internsp
from internsp.base.autograd import clone_aliases
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import StructureError
from internsp.mesh import ParallelMesh
from internsp.optim import ZeroOptimizer, clip_grad_norm_
from internsp.parallel.parallelize import parallelize
from tests.support.compare import check, close, gradients, parameters
from tests.support.meshes import mesh_of
from tests.support.models import VOCABULARY, Block, Tiny, raises
from tests.support.ranks import ranks

ROWS, LENGTH, STEPS = 2, 6, 3


class Gated(nn.Module):
    """A block with an uneven middle, a direct parameter, and a gain read from outside its layer.

    Nothing in it uses sizes of a weight, so that it runs both sharded and unsharded.
    """

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q = nn.Linear(width, 2 * width)
        self.wo = nn.Linear(2 * width, width)
        self.w1 = nn.Linear(width, 2 * width + 1)
        self.w2 = nn.Linear(2 * width + 1, width, bias=False)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.wo(torch.tanh(self.q(self.norm(x)))) * self.gain
        return x + self.w2(torch.relu(self.w1(x)))


def plan(layers: int, sequence: bool) -> dict[str, Any]:
    """Columns then rows, as every tensor-parallel plan has them; with ``sequence`` in between."""
    found: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    if sequence:
        found["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        found["norm"] = SequenceParallel()
        found["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    for i in range(layers):
        block = f"layers.{i}"
        found[f"{block}.q"], found[f"{block}.wo"] = ColwiseParallel(), RowwiseParallel()
        # 13 columns over two ranks: torch's layers need a DTensor in between to know the size.
        found[f"{block}.w1"] = ColwiseParallel(use_local_output=False)
        found[f"{block}.w2"] = RowwiseParallel()
        if sequence:
            found[f"{block}.norm"] = SequenceParallel()
            for column, row in (("q", "wo"), ("w1", "w2")):
                found[f"{block}.{column}"] = ColwiseParallel(
                    input_layouts=Shard(1), use_local_output=column == "q"
                )
                found[f"{block}.{row}"] = RowwiseParallel(output_layouts=Shard(1))
    return found


def meshes(order: str) -> tuple[ParallelMesh, DeviceMesh]:
    """Our mesh, and the user's tensor ranks: neighbors or not."""
    if order == "ours":
        mesh = mesh_of(2, tensor=2)
        return mesh, mesh.tensor_mesh
    names = ("dp", "tp") if order == "inner" else ("tp", "dp")
    made = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    mesh = ParallelMesh.from_device_mesh(made, weight="dp", tensor="tp", timeout_seconds=30)
    return mesh, made["tp"]


def batch(step: int, mesh: ParallelMesh) -> tuple[Any, Any]:
    """(all ranks', this rank's) ids and labels: tensor ranks have the same rows."""
    generator = torch.Generator().manual_seed(step)
    shape = (2, ROWS * mesh.data, LENGTH)
    both = torch.randint(0, VOCABULARY, shape, generator=generator)
    mine = both[:, mesh.data_rank * ROWS : (mesh.data_rank + 1) * ROWS]
    return (both[0], both[1]), (mine[0], mine[1])


FULL = ActivationCheckpointConfig(mode="full")
CASES: list[tuple[str, Any, bool, bool, dict[str, Any], Any]] = [
    ("ours", Block, False, False, {}, None),
    ("outer", Gated, False, True, {"gather_before": "rolling"}, None),
    ("inner", Block, True, False, {"coalesce_bytes": 400}, FULL),
    ("ours", Block, True, True, {"keep_unsharded": 1, "granularity": "module"}, None),
]


@pytest.mark.parametrize(
    ("order", "block", "sequence", "zero", "config", "checkpoint"),
    [*CASES[1:3], *(pytest.param(*case, marks=pytest.mark.thorough(5)) for case in CASES[::3])],
)
@ranks(4)
def test_gradients_norm_and_steps_of_layers_cut_twice_are_one_processs(
    order: str, block: Any, sequence: bool, zero: bool, config: dict[str, Any], checkpoint: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    plain = Tiny(block, layers=3).double()
    ours = copy.deepcopy(plain)
    mesh, tensor_mesh = meshes(order)
    parallelize_module(ours, tensor_mesh, plan(3, sequence))
    config = {"min_shard_elements": 8, "coalesce_bytes": 0} | config
    communicator = parallelize(
        ours, mesh, WeightParallelConfig(**config), activation_checkpoint=checkpoint
    )
    communicator.state.pool.poison = True
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.02)
    made: Any
    if zero:
        made = ZeroOptimizer(communicator, torch.optim.AdamW, lr=0.02, max_grad_norm=0.3)
    else:
        made = torch.optim.AdamW(ours.parameters(), lr=0.02)
    for step in range(STEPS):
        everybody, mine = batch(step, mesh)
        plain(*everybody).backward()
        ours(*mine).backward()
        if not zero:
            check(gradients(ours), gradients(plain), f"gradients of step {step}")
        elif step == 0:
            found = made.gather_gradients()
            for name, parameter in plain.named_parameters():
                close(found[name], parameter.grad, name)
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        if not zero:  # torch's own and ours agree: everything lies on one mesh, counted once
            before = torch.nn.utils.get_total_norm([p.grad for p in ours.parameters()])  # type: ignore[misc]
            close(before.full_tensor(), wanted, "torch's norm")  # type: ignore[attr-defined]
            close(clip_grad_norm_(ours.parameters(), 0.3), wanted, "norm")
        for optimizer in (theirs, made):
            optimizer.step()
            optimizer.zero_grad()
        if zero:
            close(torch.tensor(made.grad_norm, dtype=torch.float64), wanted, "norm")
    communicator.wait_until_ready()
    check(parameters(ours), parameters(plain), "after the steps")
    check_saved_and_loaded(ours, plain, Tiny(block, layers=3).double(), tmp_path)
    everybody, mine = batch(9, mesh)
    plain.zero_grad()
    plain(*everybody).backward()
    ours(*mine).backward()
    if not zero:
        check(gradients(ours), gradients(plain), "gradients of what was loaded")
    ours.zero_grad()
    with internsp.full_params(ours, write="rank0" if zero else "shards"):
        for name, parameter in ours.named_parameters():
            close(parameter.detach(), parameters(plain)[name], f"{name}, whole")
            with torch.no_grad():
                parameter.add_(2)
    check(parameters(ours), {n: p + 2 for n, p in parameters(plain).items()}, "edited whole")
    for name, parameter in ours.named_parameters():
        close(parameter.full_tensor().detach(), parameters(plain)[name] + 2, name)  # type: ignore[operator]
    for name, parameter in plain.named_parameters():  # unsharded values, as on one process
        dict(ours.named_parameters())[name].data = parameter.data + 1
    check(parameters(ours), {n: p + 1 for n, p in parameters(plain).items()}, "whole values")


def check_saved_and_loaded(
    ours: nn.Module, plain: nn.Module, other: nn.Module, folder: Path
) -> None:
    """The state dictionary consists of 2-D DTensors, which DCP saves and loads again."""
    state = ours.state_dict()
    for name, value in state.items():
        assert isinstance(value, DTensor), name
        assert value.device_mesh.mesh_dim_names == ("replica", "tensor", "weight"), name
        cut = sum(isinstance(p, Shard) for p in value.placements)
        assert cut == 2 or "norm" in name or "bias" in name or "gain" in name, (name, cut)
    shared = [str(folder)]
    dist.broadcast_object_list(shared)
    dcp.save(state, checkpoint_id=shared[0])
    dcp.load(other.state_dict(), checkpoint_id=shared[0])  # on one process, unsharded
    check(parameters(other), parameters(plain), "loaded whole")
    for parameter in ours.parameters():
        parameter.data.zero_()
    dcp.load(state, checkpoint_id=shared[0])
    check(parameters(ours), parameters(plain), "loaded again")


@ranks(2)
def test_of_the_outputs_of_a_layer_only_what_lies_in_a_weight_is_copied(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight, other = (distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)]) for _ in range(2))
    unsummed = DTensor.from_local(torch.randn(4, 3), mesh, [Partial()])  # a copy would be a message
    copied, *same = clone_aliases([weight.t(), other, unsummed], [weight])
    assert same[0] is other
    assert same[1] is unsummed
    assert copied.to_local().data_ptr() != weight.to_local().data_ptr()
    assert torch.equal(copied.to_local(), weight.to_local().t())


@pytest.mark.unmeasured
@pytest.mark.parametrize("order", ["ours", pytest.param("outer", marks=pytest.mark.thorough(4))])
@ranks(4, fresh=True)
def test_other_tensor_ranks_are_told_of_a_rank_that_fails(order: str, rank: int) -> None:
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("internsp.failure").addHandler(handler)
    mesh, tensor_mesh = meshes(order)
    ours = Tiny(Gated)
    parallelize_module(ours, tensor_mesh, plan(4, False))
    parallelize(ours, mesh, WeightParallelConfig(min_shard_elements=8))
    _, mine = batch(0, mesh)
    ours(*mine).backward()

    def fail(gradient: Tensor) -> None:
        raise ValueError("in a backward")

    if rank == 0:
        ours.layers[1].register_forward_hook(lambda *given: given[-1].register_hook(fail) and None)
    loss = ours(*mine)
    with pytest.raises(ValueError if rank == 0 else RuntimeError) as caught:
        loss.backward()
    assert "Timed out waiting" not in str(caught.value), "as gloo says after the timeout"
    if 0 in tensor_mesh.mesh.tolist():  # the others wait for these
        assert rank == 0 or "rank 0 failed first: its backward raised" in " ".join(log)


@pytest.mark.thorough(1)
@ranks(4)
def test_tied_weights_frozen_blocks_and_logits_that_are_a_dtensor(rank: int) -> None:
    """Tied weights, whose placement is the same; a frozen block; logits that are a DTensor."""
    torch.manual_seed(0)
    plain = Tiny(layers=2, tied=True).double()
    plain.layers[0].requires_grad_(False)
    ours = copy.deepcopy(plain)
    mesh = mesh_of(2, tensor=2)
    parallelize_module(ours, mesh.tensor_mesh, {
        "layers.*.q": ColwiseParallel(use_local_output=False), "layers.*.wo": RowwiseParallel(),
        "embed": ColwiseParallel(output_layouts=Replicate()),
        "head": RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
    })  # fmt: skip
    ours.head.weight = ours.embed.weight  # parallelize_module gives each module its own
    parallelize(ours, mesh, WeightParallelConfig(min_shard_elements=8, coalesce_bytes=0))
    for step in range(2):
        everybody, mine = batch(step, mesh)
        for model, (ids, labels) in ((plain, everybody), (ours, mine)):
            logits = model(ids)
            if isinstance(logits, DTensor):
                logits = logits.full_tensor()
            F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
        check(gradients(ours), gradients(plain), f"step {step}")


def placed(mesh: ParallelMesh, tensor_mesh: DeviceMesh, *placements: Any) -> nn.Module:
    """A model whose first ``q`` has this placement."""
    model = Tiny(layers=2)
    weight = model.layers[0].q.weight  # type: ignore[union-attr]
    made = DTensor.from_local(weight.detach(), tensor_mesh, placements, run_check=False)
    model.layers[0].q.weight = nn.Parameter(made)  # type: ignore[union-attr]
    return model


@ranks(4)
def test_what_cannot_be_cut_further_is_refused_by_name_on_every_rank(rank: int) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours, flat, tensor = mesh_of(2, tensor=2), mesh_of(2), mesh_of(2, tensor=2).tensor_mesh

    def refused(mesh: ParallelMesh, model: nn.Module, *words: str) -> None:
        raises(StructureError, lambda: parallelize(model, mesh), *words)

    name = "layers.0.q.weight is a DTensor already"
    refused(flat, placed(flat, grid["tp"], Shard(0)), name, "ParallelMesh.create(tensor=...)")
    refused(ours, placed(ours, grid["dp"], Shard(0)), name, "a tensor rank and a weight or replica")
    refused(ours, placed(ours, grid, Shard(0), Shard(1)), name, "a tensor rank and a weight")
    refused(ours, placed(ours, tensor, Partial()), "q.weight is placed P", "redistribute it")
    refused(ours, Tiny(layers=2), "2 tensor ranks, but no parameter is a DTensor", "tensor_mesh")
    # Only on one rank: its tensor peers, in another stage, raise too.
    model = placed(ours, tensor, Shard(0) if rank else Partial())
    words = "is placed" if not rank else "were given different parameters"
    raises(StructureError, lambda: parallelize(model, ours), words)
    # Initial values that differ: of what tensor ranks replicate, not of their shards.
    torch.manual_seed(rank % 2)
    model = parallelize_module(Tiny(layers=2), tensor, {"layers.*.q": ColwiseParallel()})
    raises(StructureError, lambda: parallelize(model, ours), "starts with other values on ranks")
