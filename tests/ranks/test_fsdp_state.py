"""State dicts of ``internsp.fsdp`` and of FSDP2 are the same bytes, and each loads the other's."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp as torchs
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

import internsp.fsdp as ours
from internsp.fsdp.torchs import param_groups
from tests.support.fsdp import Model, batch, loss_of, mesh_of, require_same, shard
from tests.support.ranks import ranks


def build(fully_shard: Any, sizes: tuple[int, ...], seed: int = 1) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Model(blocks=2).double()
    model.spare.requires_grad_(False)  # an optimizer has no state of it
    shard(fully_shard, model, "nested", mesh_of(sizes))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: Any, optimizer: Any, rank: int, steps: range) -> dict[str, Tensor]:
    found = {}
    for step in steps:
        loss = loss_of(model, batch(step, 0, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
    return found


def require_bits(found: Any, wanted: Any, where: str = "") -> None:
    """Same keys, placements, meshes and bits, at any depth."""
    assert isinstance(found, DTensor) == isinstance(wanted, DTensor), where
    if isinstance(wanted, DTensor) and isinstance(found, DTensor):
        assert found.placements == wanted.placements, where
        assert found.device_mesh == wanted.device_mesh, where
        found, wanted = found.to_local(), wanted.to_local()
    if isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype, where
        assert torch.equal(found, wanted), f"{where} has other bits"
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key, value in wanted.items():
            require_bits(found[key], value, f"{where}.{key}")
    else:
        assert found == wanted, where


@pytest.mark.thorough(3)
@pytest.mark.parametrize("sizes", [(2,), (2, 1)], ids=["sharded", "replicas"])
@ranks(2)
def test_state_dicts_are_the_bits_of_fsdp2(sizes: tuple[int, ...], rank: int) -> None:
    both = []
    for fully_shard in (torchs.fully_shard, ours.fully_shard):
        model, optimizer = build(fully_shard, sizes)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        train(model, optimizer, rank, range(2))
        states: list[Any] = [before, dict(model.state_dict())]
        for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
            states += get_state_dict(model, optimizer, options=options)
        both.append(states)
    theirs, mine = both
    require_bits(dict(enumerate(mine)), dict(enumerate(theirs)))


@pytest.mark.parametrize("ours_writes", [False, True], ids=["from FSDP2", "to FSDP2"])
@ranks(2)
def test_a_checkpoint_of_one_continues_under_the_other(
    ours_writes: bool, tmp_path: Path, rank: int
) -> None:
    writer, reader = torchs.fully_shard, ours.fully_shard
    if ours_writes:
        writer, reader = reader, writer
    model, optimizer = build(writer, (2,))
    train(model, optimizer, rank, range(2))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "one")
    wanted = train(model, optimizer, rank, range(2, 4))
    for seed, begun in ((7, range(0)), (8, range(1))):  # before and after the first forward
        model, optimizer = build(reader, (2,), seed)
        train(model, optimizer, rank, begun)
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "one")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "again")
        require_same(train(model, optimizer, rank, range(2, 4)), wanted)
        if rank == 0:
            for one in (tmp_path / "one").glob("*.distcp"):
                assert one.read_bytes() == (tmp_path / "again" / one.name).read_bytes()
            first, again = (
                pickle.loads((tmp_path / name / ".metadata").read_bytes())
                for name in ("one", "again")
            )
            assert first.state_dict_metadata == again.state_dict_metadata


@ranks(2)
def test_a_full_state_dict_of_the_first_rank_reaches_all(rank: int) -> None:
    torch.manual_seed(4)
    full = Model(blocks=2).double().state_dict()
    for begun in (range(0), range(1)):
        model, optimizer = build(ours.fully_shard, (2,))
        train(model, optimizer, rank, begun)
        # accelerate's is in the Trainer's arguments; a parameter's may be an earlier, equal one
        mesh = param_groups(model._get_fsdp_state())[0].mesh_info.mesh
        assert pickle.loads(pickle.dumps(mesh)) == mesh
        set_model_state_dict(
            model, dict(full) if rank == 0 else {},  # which torch changes

            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )  # fmt: skip
        found = get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if rank == 0:
            require_bits(dict(found), dict(full))
        model.load_state_dict(model.state_dict(), assign=True)
        assert model.head.weight is next(
            p for n, p in model.named_parameters() if n == "head.weight"
        )


@pytest.mark.parametrize("dim", [0, 1])
@ranks(2)
def test_a_state_dict_of_before_the_first_forward_stays_the_models(
    dim: int, rank: int, world_size: int
) -> None:
    """A program may make what it saves once, as it starts; an optimizer may move weights later."""

    def place(parameter: Any) -> Any:
        return Shard(dim if parameter.ndim > dim else 0)

    for sizes, zero in (((2,), False), ((2, 1), True)):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).double()
        for part in (*model, model):
            ours.fully_shard(part, mesh=mesh_of(sizes), shard_placement_fn=place)
        kept, data = dict(model.state_dict()), {n: p.data for n, p in model.named_parameters()}
        own = {n: p.to_local() for n, p in model.named_parameters()}
        first = {n: p.full_tensor().clone() for n, p in kept.items()}
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if zero:
            optimizer = ours.zero_optimizer(model, optimizer)
        for _ in range(2):
            model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            saved = {n: p.to_local().clone() for n, p in kept.items()}
            for name, p in model.named_parameters():
                for held in (saved[name], data[name].to_local(), own[name].detach()):
                    assert torch.equal(held, p.to_local()), f"{name}, {sizes}, dimension {dim}"
        assert not any(torch.equal(kept[n].full_tensor(), first[n]) for n in first)
