"""Programs whose tensors are all ``DTensor`` on one mesh (``dp_mesh_dims``): FSDP2's numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp as torchs
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import internsp.fsdp as ours
from tests.support.fsdp import Program, compare, parts, require_same
from tests.support.ranks import ranks
from tests.support.versions import since

pytestmark = pytest.mark.skipif(not since("2.13"), reason="this torch has no dp_mesh_dims")
PLACED = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1)}
"""Of each part, on the dimension ``tp``; on ``tp2`` nothing is sharded."""
TENSOR = ("tp", "tp2")


class Made:
    """A model on ``mesh``: a norm, and two parts of two layers.

    The mesh is one object in both runs, as FSDP2 compares it with that of the parameters.
    """

    def __init__(self, mesh: DeviceMesh, dtype: torch.dtype = torch.double) -> None:
        _clear_sharding_prop_cache()  # it has meshes of tests before this one, which are equal
        self.mesh, self.dtype = mesh, dtype
        self.axes: tuple[str, ...] = mesh.mesh_dim_names or ()
        data = tuple(axis for axis in self.axes if axis not in TENSOR)
        self.among = mesh[data]._flatten() if len(data) > 1 else mesh[data[0]]

    def model(self, device: str = "cpu") -> Any:
        with torch.device(device):
            parts = [nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)) for _ in range(2)]
            model = nn.Sequential(nn.LayerNorm(6), *parts).to(self.dtype)
        for path, module in model.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                own = PLACED.get(f"{path}.{name}"[2:], Replicate())
                places = [own if axis == "tp" else Replicate() for axis in self.axes]
                put = distribute_tensor(parameter.data, self.mesh, places)
                setattr(module, name, nn.Parameter(put))
        return model

    def shard(self, names: Any, model: Any, **options: Any) -> None:
        for part in (model[1], model[2], model):
            names.fully_shard(part, mesh=self.mesh, **options)

    def loss(self, model: Any, number: int) -> Tensor:
        draw = torch.Generator().manual_seed(100 * number + self.among.get_local_rank())
        x = torch.randn(4, 6, generator=draw).to(self.dtype)
        places = [Replicate() if axis in TENSOR else Shard(0) for axis in self.axes]
        y = model(DTensor.from_local(x, self.mesh, places))
        found: Tensor = y.to(torch.double).square().sum().full_tensor()
        return found


def gradients(model: nn.Module, prefix: object) -> dict[str, Tensor]:
    return parts({name: p.grad for name, p in model.named_parameters()}, f"{prefix} ")


def steps(made: Made, model: Any, micro: int = 1) -> dict[str, Tensor]:
    """Losses, norms, gradients and parameters of two steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, Tensor] = {}
    for step in range(2):
        for part in range(micro):
            model.set_requires_gradient_sync(part == micro - 1)
            loss = made.loss(model, micro * step + part)
            loss.backward()
            found[f"loss {step} {part}"] = loss.detach()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found |= {f"norm {step}": norm.full_tensor(), **gradients(model, step)}
        optimizer.step()
        optimizer.zero_grad()
    return found | parts(dict(model.named_parameters()))


PLACES: dict[str, list[Any]] = {}
"""How the parameters of a run are placed, by its name."""


def on_mesh(made: Made, dims: Any, micro: int = 1, name: str = "", **options: Any) -> Program:
    def program(names: Any, rank: int) -> dict[str, Tensor]:
        model = made.model()
        made.shard(names, model, dp_mesh_dims=dims, **options)
        places = [(p.placements, p.device_mesh.shape, p.to_local().shape)
                  for p in model.parameters()]  # fmt: skip
        assert places == PLACES.setdefault(program.__name__, places)
        return steps(made, model, micro)

    program.__name__ = f"{made.axes} {name}"
    return program


def meshes(form: str) -> list[tuple[tuple[str, ...], tuple[int, ...], Any]]:
    """Axes, sizes and which are of data."""
    dims = torchs.DataParallelMeshDims
    if form == "others":
        return [
            (("dp", "tp"), (2, 2), dims("dp")),
            (("dp", "alone", "tp"), (4, 1, 1), dims("dp")),
            (("dp", "tp2", "tp"), (1, 2, 2), dims("dp")),
            (("replicas",), (4,), dims(replicate="replicas")),
            (("replicas", "ranks", "tp"), (2, 1, 2), dims("ranks", "replicas")),
            (("ranks", "cp", "tp"), (1, 2, 2), dims(("ranks", "cp"))),
            (("more", "replicas", "ranks"), (2, 1, 2), dims("ranks", ("more", "replicas"))),
        ]
    return [
        (("tp", "dp"), (2, 2), dims("dp")),
        (("replicas", "ranks"), (2, 2), dims("ranks", "replicas")),
        (("ranks", "cp"), (2, 2), dims(("ranks", "cp"))),
        (("replicas", "tp"), (2, 2), dims(replicate="replicas")),
    ]


@pytest.mark.parametrize("form", ["few", pytest.param("others", marks=pytest.mark.thorough(40))])
@ranks(4)
def test_a_mesh_of_all_dimensions_has_the_numbers_of_fsdp2(form: str, rank: int) -> None:
    for axes, sizes, dims in meshes(form):
        compare(on_mesh(Made(init_device_mesh("cpu", sizes, mesh_dim_names=axes)), dims), rank=rank)


@ranks(4)
def test_options_of_fully_shard_do_the_same_on_such_a_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made, dims = Made(mesh), torchs.DataParallelMeshDims(shard="dp")
    half = torchs.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    offload = torchs.CPUOffloadPolicy(pin_memory=False)
    columns = {
        "shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 and p.shape[1] == 6 else None
    }
    compare(
        on_mesh(made, dims, 3, "micro-batches"),
        on_mesh(Made(mesh, torch.float32), dims, name="bf16", mp_policy=half),
        on_mesh(made, dims, name="offload", offload_policy=offload),
        on_mesh(made, dims, name="columns", **columns),
        partial(_filled, made, dims),
        partial(_unsharded, made, dims),
        rank=rank,
    )  # fmt: skip


def _filled(made: Made, dims: Any, names: Any, rank: int) -> dict[str, Tensor]:
    """Made without memory, and filled after it is sharded."""
    model = made.model("meta")
    made.shard(names, model, dp_mesh_dims=dims)
    model.to_empty(device="cpu")
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.1 * number - 0.3)
    return steps(made, model)


def _unsharded(made: Made, dims: Any, names: Any, rank: int) -> dict[str, Tensor]:
    """Between two passes a unit holds ``DTensor`` that are sharded over tensor ranks alone."""
    model = made.model()
    made.shard(names, model, dp_mesh_dims=dims)
    made.loss(model, 0).backward()
    model[1].unshard()
    weight = model[1][0].weight
    assert weight.device_mesh == made.mesh
    assert weight.placements == (Replicate(), Shard(0))
    found = {"local": weight.to_local().clone(), "whole": weight.full_tensor()}
    model[1].reshard()
    return found | gradients(model, 0)


@ranks(4)
def test_a_checkpoint_of_such_a_mesh_goes_on_under_the_other(tmp_path: Path, rank: int) -> None:
    made = Made(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))

    def built(names: Any, seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = made.model()
        made.shard(names, model, dp_mesh_dims=torchs.DataParallelMeshDims(shard="dp"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        made.loss(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    for saves, loads in ((torchs, ours), (ours, torchs)):
        where = tmp_path / saves.__name__
        model, optimizer = built(saves, 1)
        state = get_state_dict(model, optimizer)
        dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=where)
        wanted = steps(made, model)
        model, optimizer = built(loads, 2)
        state = get_state_dict(model, optimizer)
        dcp.load({"model": state[0], "optimizer": state[1]}, checkpoint_id=where)
        set_state_dict(
            model, optimizer, model_state_dict=state[0], optim_state_dict=state[1]
        )  # fmt: skip
        require_same(steps(made, model), wanted)


class Two(nn.Module):
    """Experts of which a forward reads one."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        made = [distribute_tensor(torch.randn(8, 4).double(), mesh, [Shard(0)]) for _ in range(2)]
        self.used, self.unused = nn.Parameter(made[0]), nn.Parameter(made[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.used.to_local().square().sum() * x.sum()  # type: ignore[attr-defined]


def unused(names: Any, rank: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model: Any = Two(mesh["ep"])
    names.fully_shard(model, mesh=mesh["dp"])
    model.set_reduce_scatter_unused_params(True)
    model(torch.ones(2, dtype=torch.double)).backward()
    return gradients(model, "")


@ranks(4)
def test_an_unused_dtensor_may_have_a_gradient_of_zeros(rank: int) -> None:
    compare(unused, rank=rank)


@ranks(4)
def test_what_cannot_be_taken_of_such_a_mesh_is_refused_by_name(rank: int) -> None:
    dims = torchs.DataParallelMeshDims
    made = Made(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    equal = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def cut() -> nn.Module:
        found = nn.Linear(4, 4, bias=False)
        weight = distribute_tensor(found.weight.data, made.mesh, [Shard(0)] * 2)
        found.weight = nn.Parameter(weight)
        return found

    def wrong(part: Any, mesh: Any = made.mesh, **options: Any) -> Callable[[Any], Any]:
        call = {"mesh": mesh, "dp_mesh_dims": dims(shard="dp")} | options
        return lambda names: names.fully_shard(part(), **call)

    for names in (torchs, ours):
        for call, kind, words in (
            (wrong(cut), ValueError, "Expected Replicate"),
            (wrong(lambda: nn.Linear(3, 3)), ValueError, "all parameters must be DTensors"),
            (wrong(made.model, dp_mesh_dims=dims(shard="other")), ValueError, "not found in mesh"),
            (wrong(made.model, equal), ValueError, "same mesh"),
            (wrong(made.model, reshard_after_forward=2), NotImplementedError, "as int"),
        ):  # fmt: skip
            with pytest.raises(kind, match=words):
                call(names)
