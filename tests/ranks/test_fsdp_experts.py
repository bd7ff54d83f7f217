"""Experts on a mesh of their own, as torchtitan's expert parallelism has them, against FSDP2.

Dense weights are sharded over all ranks, an owner's experts over the ranks that have the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp as torchs
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import internsp.fsdp as ours
from internsp.errors import ConfigError, MeshError, StructureError
from tests.support.fsdp import Program, compare, parts, require_same, whole
from tests.support.ranks import ranks

if not hasattr(_fsdp_common, "ShardPlacementResult"):  # torch 2.11
    pytest.skip("fully_shard takes one mesh a call", allow_module_level=True)

WORDS, SIZE, NUMBER = 19, 8, 8


@dataclass
class Meshes:
    """``data``: of dense weights; ``own``: of an owner's experts; ``owners``: of different ones;
    ``parts``: of the parts of one expert."""

    data: DeviceMesh
    own: DeviceMesh
    owners: DeviceMesh
    tensor: DeviceMesh
    parts: DeviceMesh | None = None


def meshes_of(
    owners: int, replicas: int = 1, tensor: int = 1, near: str = "owners", parts: int = 1
) -> Meshes:
    """``near``: whose ranks are neighbors, those of ``owners`` or those that have their ``own``."""
    number = dist.get_world_size()
    world = init_device_mesh("cpu", (number,), mesh_dim_names=("world",))
    sizes = replicas, number // replicas // tensor, tensor
    dense = world._unflatten(0, sizes, ("replicas", "shard", "tensor"))
    degrees = {"own": number // replicas // owners // parts, "owners": owners, "parts": parts}
    names = ("own", "owners") if near == "owners" else ("owners", "own")
    names, sizes = ("replicas", *names, "parts"), (replicas, *map(degrees.get, names), parts)
    sparse = world._unflatten(0, sizes, names)
    data, own = ("shard", "own") if replicas == 1 else (("replicas", "shard"), ("replicas", "own"))
    found = Meshes(dense[data], sparse[own], sparse["owners"], dense["tensor"])
    if parts > 1:
        found.owners, found.parts = sparse["owners", "parts"], sparse["parts"]
    return found


class Experts(nn.Module):
    """Two weights, each with one slice for each expert."""

    leaves_out = False  # without tokens
    parts: DeviceMesh | None = None  # whose ranks have the same tokens

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUMBER, 2 * SIZE, SIZE) / SIZE)
        self.down = nn.Parameter(torch.randn(NUMBER, SIZE, 2 * SIZE) / SIZE)

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        if self.leaves_out and not len(x):
            return x
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        if self.parts is not None:
            x = DTensor.from_local(x, self.parts, [Replicate()]).to_local(
                grad_placements=[Partial()]
            )
        each = zip(x.split(counts), up, down, strict=True)
        found = torch.cat([torch.relu(part @ u.T) @ d.T for part, u, d in each])
        if self.parts is None:
            return found
        summed = DTensor.from_local(found, self.parts, [Partial()]).redistribute(
            placements=[Replicate()]
        )
        return summed.to_local()


class Mixture(nn.Module):
    """One expert a token, whose tokens travel to its owner and back."""

    group: dist.ProcessGroup
    chosen: int | None = None  # the expert of all tokens

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(SIZE, NUMBER, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, expert = self.router(flat).softmax(-1).max(-1)
        if self.chosen is not None:
            expert = torch.full_like(expert, self.chosen)
        order, owners = expert.argsort(stable=True), self.group.size()
        there = expert.bincount(minlength=NUMBER)
        here = torch.empty_like(there)
        dist.all_to_all_single(here, there, group=self.group)
        table = here.view(owners, -1)  # who sent how many to which of this rank's experts
        sizes = table.sum(1).tolist(), there.view(owners, -1).sum(1).tolist()
        rows = all_to_all_single_autograd(flat[order], sizes[0], sizes[1], self.group)
        of = torch.arange(table.shape[1]).repeat(owners).repeat_interleave(table.flatten())
        sort = of.argsort(stable=True)
        made = self.experts(rows[sort], table.sum(0).tolist())[sort.argsort()]
        back = all_to_all_single_autograd(made, sizes[1], sizes[0], self.group)
        return (back[order.argsort()] * weights[:, None]).view_as(x)


class Block(nn.Module):
    def __init__(self, mixture: bool) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)
        self.moe = Mixture() if mixture else nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mix(x.cumsum(1)))
        return x + self.moe(self.norm(x))


class Model(nn.Module):
    """The first of three blocks is dense, as DeepSeek's."""

    recompute = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, SIZE)
        self.blocks = nn.ModuleList(Block(mixture=number > 0) for number in range(3))
        self.norm, self.head = nn.LayerNorm(SIZE), nn.Linear(SIZE, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    @property
    def mixtures(self) -> list[Mixture]:
        return [m for m in self.modules() if isinstance(m, Mixture)]


def own_experts(model: Model, meshes: Meshes, plain: bool = False) -> None:
    """Let each owner hold its experts: a ``DTensor``, or ``plain`` tensors."""
    for mixture in model.mixtures:
        mixture.group, mixture.experts.parts = meshes.owners.get_group(0), meshes.parts
        for name, parameter in [*mixture.experts.named_parameters()]:
            places = [Shard(0), *([Shard(1 if name == "up" else 2)] if meshes.parts else ())]
            given = distribute_tensor(parameter.detach(), meshes.owners, places)
            made = nn.Parameter(given.to_local().clone() if plain else given)
            setattr(mixture.experts, name, made)


def shard(names: Any, model: Model, meshes: Meshes, form: str = "units", **options: Any) -> None:
    """The calls of ``fully_shard``: experts as units of their own, or by ``shard_placement_fn``."""
    for block in model.blocks:
        given = dict(options, mesh=meshes.data)
        if isinstance(block.moe, Mixture) and form == "placements":
            own, usual = _get_mesh_info(meshes.own), _get_mesh_info(meshes.data)
            experts = {*block.moe.experts.parameters()}
            given["shard_placement_fn"] = lambda p, experts=experts, own=own, usual=usual: (
                _fsdp_common.ShardPlacementResult(Shard(0), own if p in experts else usual)
            )
        elif isinstance(block.moe, Mixture):
            dim = {"shard_placement_fn": lambda _: Shard(1)} if form == "second dimension" else {}
            names.fully_shard(block.moe.experts, **(given | dim | {"mesh": meshes.own}))
        names.fully_shard(block, **given)
    names.fully_shard(model, mesh=meshes.data, **options)


def made(
    names: Any, owners: int = 2, replicas: int = 1, tensor: int = 1, form: str = "units",
    near: str = "owners", parts: int = 1, plain: bool = False, dtype: torch.dtype = torch.double,
    **options: Any,
) -> Any:  # fmt: skip
    model, meshes = Model().to(dtype), meshes_of(owners, replicas, tensor, near, parts)
    own_experts(model, meshes, plain)
    for block in model.blocks if tensor > 1 else ():
        parallelize_module(block.mix, meshes.tensor, ColwiseParallel(output_layouts=Replicate()))
    shard(names, model, meshes, form, **options)
    return model


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    ids = torch.randint(0, WORDS, (2, 5 + rank), generator=draw)
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).double(), ids[:, 1:].flatten())


def clipped(model: nn.Module, most: float) -> Tensor:
    """The norm over both meshes, by which gradients are clipped; torchtitan's way."""
    by_mesh: dict[Any, list[Any]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    norms: list[Any] = [nn.utils.get_total_norm([p.grad for p in own]) for own in by_mesh.values()]
    total = torch.stack([norm.full_tensor() for norm in norms]).norm()
    for own in by_mesh.values():
        nn.utils.clip_grads_with_norm_(own, most, total)
    return total


def steps(model: Any, rank: int, micro: int = 1, number: int = 3) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found: dict[str, Tensor] = {}
    for step in range(number):
        for part in range(micro):
            model.set_requires_gradient_sync(part == micro - 1)
            loss = loss_of(model, step, part, rank)
            loss.backward()
            found[f"loss {step}.{part}"] = loss.detach()
        found[f"norm {step}"] = clipped(model, 0.5)
        found |= gradients(model, f"{step} ")
        optimizer.step()
        optimizer.zero_grad()
    return found | parts(dict(model.named_parameters()))


def gradients(model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    return parts({name: p.grad for name, p in model.named_parameters()}, prefix)


def program(
    _steps: int = 2, _micro: int = 1, _then: Callable[[Any], Any] = type, **options: Any
) -> Program:
    """Some steps of a model that ``options`` make, and ``_then`` changes."""

    def run(names: Any, rank: int) -> dict[str, Tensor]:
        model = made(names, **options)
        _then(model)
        return steps(model, rank // options.get("tensor", 1), _micro, _steps)

    run.__name__ = f"{_steps} steps of {_micro} with {options} {_then.__name__}"
    return run


@ranks(4)
def test_experts_on_a_mesh_of_their_own_have_the_numbers_of_fsdp2(rank: int) -> None:
    compare(
        program(3), program(owners=4, plain=True, form="placements"), program(replicas=2),
        program(tensor=2, owners=4), rank=rank,
    )  # fmt: skip


@pytest.mark.thorough(20)
@ranks(4)
def test_experts_of_other_forms_and_meshes_have_the_numbers_of_fsdp2(rank: int) -> None:
    compare(
        program(form="placements"), program(plain=True), program(form="second dimension"),
        program(replicas=2, owners=1), program(near="own", plain=True), rank=rank,
    )  # fmt: skip


@pytest.mark.thorough(20)
@ranks(4)
def test_tensor_ranks_may_own_experts(rank: int) -> None:
    """Owners among two and among four tensor ranks, as torchtitan has them."""
    compare(
        program(tensor=2, owners=4, form="placements"), program(tensor=4, owners=2),
        program(tensor=4, owners=2, plain=True), program(tensor=2, owners=2), rank=rank,
    )  # fmt: skip


@ranks(4)
def test_tensor_ranks_may_own_parts_of_experts(rank: int) -> None:
    """Experts on two axes: their owners, and tensor ranks that divide each expert."""
    compare(program(3, tensor=2, parts=2), rank=rank)


def to_one(model: Any) -> None:
    """All tokens of all ranks go to one expert, so that one owner has none."""
    for mixture in model.mixtures:
        mixture.chosen = 1


def left_out(model: Any) -> None:
    """As :func:`to_one`, and an owner without tokens does not read its weights."""
    to_one(model)
    for mixture in model.mixtures:
        mixture.experts.leaves_out = True


def frozen(model: Any) -> None:
    model.mixtures[0].experts.requires_grad_(False)
    model.blocks[2].mix.requires_grad_(False)


def recomputed(model: Any) -> None:
    model.recompute = True


def summed(model: Any) -> None:
    """torchtitan's factors: gradients are sums."""
    divided(model, 1.0)


def beside(names: Any, rank: int) -> dict[str, Tensor]:
    """A dense model on the same mesh first."""
    meshes, dense, model = meshes_of(2), nn.Linear(SIZE, SIZE).double(), Model().double()
    names.fully_shard(dense, mesh=meshes.data)
    dense(torch.full((3, SIZE), rank + 1.0).double()).square().sum().backward()
    own_experts(model, meshes)
    shard(names, model, meshes)
    return gradients(dense, "dense ") | steps(model, rank, number=1)


@ranks(4)
def test_any_tokens_have_the_numbers_of_fsdp2(rank: int) -> None:
    compare(
        program(_then=to_one), program(_then=left_out, owners=4, plain=True), program(_then=frozen),
        beside, rank=rank,
    )  # fmt: skip


@pytest.mark.thorough(20)
@ranks(4)
def test_setters_and_policies_have_the_numbers_of_fsdp2(rank: int) -> None:
    compare(
        program(_then=recomputed, _micro=2), program(_micro=2, reshard_after_forward=False),
        program(_then=summed, form="placements", replicas=2, _micro=2),
        program(form="placements", plain=True, reshard_after_forward=2), rank=rank,
    )  # fmt: skip
    half = torchs.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    compare(program(dtype=torch.float32, mp_policy=half), rank=rank, tolerance=0.05)


def divided(model: Any, factor: float) -> None:
    for module in model.modules():
        if isinstance(module, torchs.FSDPModule):
            module.set_gradient_divide_factor(factor)


def over_replicas(factor: float, **options: Any) -> Program:
    """Clipped steps whose optimizer state is over the replicas, too, with ``factor`` everywhere.

    FSDP2's factors are of no use here: with one rank to shard over it divides by them twice in fp64
    (torch 2.13, ``foreach_reduce``).
    """

    def run(names: Any, rank: int) -> dict[str, Tensor]:
        model = made(names, replicas=2, **options)
        divided(model, factor if names is ours else 1.0)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if names is ours:
            optimizer = ours.zero_optimizer(model, optimizer, max_grad_norm=0.5)
        found: dict[str, Tensor] = {}
        for step in range(2):
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                loss_of(model, step, micro, rank // options.get("tensor", 1)).backward()
            if names is torchs:
                for parameter in model.parameters():
                    parameter.grad.div_(factor)
                found[f"norm {step}"] = clipped(model, 0.5)
            optimizer.step()
            if names is ours:
                found[f"norm {step}"] = torch.tensor(optimizer.grad_norm, dtype=torch.double)
            optimizer.zero_grad()
        return found | parts(dict(model.named_parameters()))

    run.__name__ = f"a factor of {factor} with {options}"
    return run


@pytest.mark.thorough(20)
@ranks(8)
def test_an_optimizer_over_the_replicas_counts_each_part_of_an_expert_once(rank: int) -> None:
    compare(over_replicas(1.0, tensor=2, parts=2), rank=rank)


@ranks(4)
def test_an_optimizer_over_the_replicas_steps_experts_too(rank: int) -> None:
    """torchtitan divides nothing (1); 4 is the mean of dense weights."""
    compare(over_replicas(1.0), over_replicas(4.0), rank=rank)
    model = made(ours, replicas=2)  # means over each mesh
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(StructureError, match=r"experts.* by 2.*set_gradient_divide_factor"):
        ours.zero_optimizer(model, optimizer)
    divided(model, 4.0)
    ours.zero_optimizer(model, optimizer)
    with pytest.raises(StructureError, match="by 3"):
        model.set_gradient_divide_factor(3.0)


@pytest.mark.thorough(15)
@ranks(4)
def test_checkpoints_go_both_ways(rank: int, tmp_path: Path) -> None:
    """Model and optimizer, through DCP, which asks for whole experts by the program's mesh."""
    results = []
    for writer, reader in ((torchs, ours), (ours, torchs), (ours, ours), (torchs, torchs)):
        folder = tmp_path / f"{writer.__name__} {reader.__name__}"
        torch.manual_seed(5)
        before = made(writer)
        optimizer = torch.optim.AdamW(before.parameters(), lr=1e-2)
        loss_of(before, 0, 0, rank).backward()
        optimizer.step()
        dcp.save(dict(zip(("model", "optim"), get_state_dict(before, optimizer), strict=True)),
                 checkpoint_id=folder)  # fmt: skip
        torch.manual_seed(6)
        after = made(reader)
        optimizer = torch.optim.AdamW(after.parameters(), lr=1e-2)
        state = dict(zip(("model", "optim"), get_state_dict(after, optimizer), strict=True))
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(after, optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optim"])  # fmt: skip
        found = whole(dict(after.named_parameters()))
        loss_of(after, 1, 0, rank).backward()
        found |= gradients(after)
        optimizer.step()
        results.append(found | whole(dict(after.named_parameters())))
    for found in results[:-1]:
        require_same(found, results[-1])


@ranks(4)
def test_a_stage_of_a_pipeline_has_its_own_experts(rank: int) -> None:
    def on_part(names: Any, rank: int) -> dict[str, Tensor]:
        world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
        dense = world._unflatten(0, (2, 2), ("pp", "shard"))
        sparse = world._unflatten(0, (2, 1, 2), ("pp", "own", "owners"))
        parts, model = (dense["shard"], sparse["own"], sparse["owners"]), Model().double()
        meshes = Meshes(*parts, dense["shard"])
        own_experts(model, meshes)
        shard(names, model, meshes)
        return steps(model, rank, number=2)

    compare(on_part, rank=rank)


@ranks(4)
def test_other_meshes_are_refused_by_name(rank: int) -> None:
    model, meshes = Model(), meshes_of(2)
    ours.fully_shard(model.blocks[0].mix, mesh=meshes.own)
    ours.fully_shard(model.blocks[1].mix, mesh=meshes.owners)
    ours.fully_shard(model, mesh=meshes.data)
    with pytest.raises(MeshError, match=r"3 meshes \(embed.weight over .* for all experts"):
        loss_of(model, 0, 0, rank)
    model, some = Model(), [[0, 3], [1, 2]][rank in (1, 2)]
    across = DeviceMesh.from_group(dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])[0], "cpu")
    assert across.mesh.tolist() == some
    ours.fully_shard(model.head, mesh=across)
    ours.fully_shard(model, mesh=meshes.data)
    with pytest.raises(MeshError, match="every n-th of the latter"):
        loss_of(model, 0, 0, rank)
    model = made(ours)
    with pytest.raises(ConfigError, match="no replicas"):
        ours.zero_optimizer(model, torch.optim.AdamW(model.parameters()))
