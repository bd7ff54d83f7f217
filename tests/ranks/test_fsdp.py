"""``internsp.fsdp``: a program written for FSDP2 computes what it computes with FSDP2.

Each program runs twice in one process group, with torch's ``fully_shard`` and with the library's;
losses, norms, gradients and parameters are compared in fp64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torchs
from torch.distributed.tensor import DTensor

import internsp.fsdp as ours
from internsp.config import WeightParallelConfig
from internsp.dtensor.parameter import ShardParameter
from internsp.fsdp.attach import attached_to
from internsp.mesh import ParallelMesh
from internsp.parallel.parallelize import parallelize
from tests.support.covering import covering
from tests.support.fsdp import Model, batch, loss_of, mesh_of, require_same, shard, steps
from tests.support.ranks import ranks
from tests.support.versions import since

AXES: dict[str, Any] = {
    "sizes": ((2,), (2, 1)),
    "units": ("root", "blocks", "nested", "lists"),
    "reshard": (None, False),
    "micro": (1, 2),
    "clip": (0.0, 0.1),
    "tied": (False, True),
    "frozen": ("", "blocks.1"),
    "ignored": (False, True),
}


def _possible(row: dict[str, Any]) -> bool:
    # torch refuses a weight that two of its groups share.
    return not (row["tied"] and row["units"] == "lists")


ROWS = covering(AXES, _possible, lambda row: 1.0)
ROWS.append(ROWS[0] | {"sizes": (1, 2), "reshard": True, "frozen": "embed"})


def make(fully_shard: Any, row: dict[str, Any]) -> Any:
    """The row's model, in fp64."""
    torch.manual_seed(3)
    model = Model(tied=row["tied"]).double()
    for name, parameter in model.named_parameters():
        if row["frozen"] and name.startswith(row["frozen"]):
            parameter.requires_grad_(False)
    ignored = {model.spare.weight, model.spare.bias} if row["ignored"] else None
    shard(
        fully_shard, model, row["units"], mesh_of(row["sizes"]),
        reshard_after_forward=row["reshard"], ignored_params=ignored,
    )  # fmt: skip
    return model


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, id="-".join(map(str, row.values())),
            marks=() if number % 2 == 0 else pytest.mark.thorough,
        )
        for number, row in enumerate(ROWS)
    ],
)  # fmt: skip
@ranks(2)
def test_three_steps_are_those_of_fsdp2(row: dict[str, Any], rank: int) -> None:
    theirs, mine = make(torchs.fully_shard, row), make(ours.fully_shard, row)
    for (name, wanted), (same, found) in zip(
        theirs.named_parameters(), mine.named_parameters(), strict=True
    ):
        assert name == same
        assert isinstance(found, DTensor) == isinstance(wanted, DTensor)
        if isinstance(wanted, DTensor) and isinstance(found, DTensor):
            assert found.placements == wanted.placements
            assert found.device_mesh == wanted.device_mesh
            assert torch.equal(found.to_local(), wanted.to_local())
    before = dict(mine.named_parameters())
    options = {"micro": row["micro"], "clip": row["clip"]}
    wanted, found = steps(theirs, rank, **options), steps(mine, rank, **options)
    require_same(found, wanted)
    for name, parameter in mine.named_parameters():
        assert parameter is before[name], f"{name} is another object after the first forward"
        if isinstance(parameter, DTensor):
            assert isinstance(parameter, ShardParameter), "the library trains it"
            assert parameter.placements == theirs.get_parameter(name).placements
    assert type(mine).__name__ == type(theirs).__name__
    assert isinstance(mine, torchs.FSDPModule)
    assert isinstance(mine, ours.FSDPModule)


WIDE = ("qkv.weight", "out.weight", "up.weight", "down.weight")
Policy = torchs.MixedPrecisionPolicy
POLICIES = {
    "narrow": (Policy(torch.float32), Policy(torch.float32)),
    "wide reductions": (Policy(torch.float32, torch.float64), Policy(torch.float32, torch.float64)),
    "outputs": (Policy(torch.float32), Policy(torch.float32, output_dtype=torch.float64)),
    "blocks alone": (
        Policy(torch.float32, output_dtype=torch.float64), Policy(cast_forward_inputs=False)
    ),
}  # fmt: skip
"""What the blocks are given, and the root."""


@pytest.mark.parametrize("name", POLICIES)
@ranks(2)
def test_mixed_precision_casts_what_fsdp2_casts(name: str, rank: int) -> None:
    of_blocks, of_root = POLICIES[name]
    seen: list[list[torch.dtype]] = []
    results = []
    for fully_shard in (torchs.fully_shard, ours.fully_shard):
        torch.manual_seed(3)
        model: Any = Model().double()
        kinds: list[torch.dtype] = []
        for part in (model.blocks[1], model.blocks[1].up):
            part.register_forward_hook(
                lambda module, args, out, kinds=kinds: kinds.extend((args[0].dtype, out.dtype))
            )
        mesh = mesh_of((2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=of_blocks)
        fully_shard(model, mesh=mesh, mp_policy=of_root)
        logits = model(batch(0, 0, rank))
        logits.sum().backward()
        kinds += [logits.dtype, *(p.grad.dtype for p in model.parameters() if p.grad is not None)]
        seen.append([*kinds])
        model.zero_grad()
        results.append(steps(model, rank, number=2))
    assert seen[0] == seen[1]
    assert torch.float32 in seen[0]
    require_same(results[1], results[0], tolerance=3e-6)


@pytest.mark.thorough(1)
@ranks(2)
def test_a_model_on_meta_is_filled_after_fully_shard(rank: int) -> None:
    results = []
    for fully_shard in (torchs.fully_shard, ours.fully_shard):
        with torch.device("meta"):
            model = Model().double()
        shard(fully_shard, model, "blocks", mesh_of((2,)))
        model.to_empty(device="cpu")
        for number, parameter in enumerate(model.parameters()):
            with torch.no_grad():
                parameter.fill_(0.01 * number + 0.1)
                parameter.to_local()[..., :1] -= 0.3
        results.append(steps(model, rank))
    require_same(results[1], results[0])


@pytest.mark.thorough(1)
@ranks(2)
def test_values_are_each_ranks_own_as_in_fsdp2(rank: int) -> None:
    """FSDP2 never broadcasts: ranks that were seeded otherwise keep the shards that they cut."""
    results = []
    for fully_shard in (torchs.fully_shard, ours.fully_shard):
        torch.manual_seed(rank)
        model = Model().double()
        shard(fully_shard, model, "blocks", mesh_of((2,)))
        results.append(steps(model, rank))
    require_same(results[1], results[0])


@pytest.mark.thorough(1)
@ranks(2)
def test_writes_between_fully_shard_and_the_first_forward_are_kept(rank: int) -> None:
    results = []
    for fully_shard in (torchs.fully_shard, ours.fully_shard):
        torch.manual_seed(3)
        model = Model().double()
        shard(fully_shard, model, "blocks", mesh_of((2,)))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.125 + 0.01 * parameter.ndim)
        model.head.weight.data.mul_(0.5)
        results.append(steps(model, rank))
    require_same(results[1], results[0])


@ranks(2)
def test_blocks_have_the_schedule_of_the_library() -> None:
    """Of all weights that parallelize() shards, too: it keeps small vectors whole."""
    seen = []
    for one_import in (True, False):
        torch.manual_seed(3)
        model = Model(blocks=4).double()
        if one_import:
            shard(ours.fully_shard, model, "blocks", mesh_of((2,)))
            loss_of(model, batch(0, 0, 0)).backward()
            communicator = attached_to(model).communicator
        else:
            config = WeightParallelConfig(
                blocks=("blocks.*",), gather_before="qkv", min_shard_elements=1, reduction="mean"
            )
            mesh = ParallelMesh.create(weight=2, device_type="cpu")
            communicator = parallelize(model, mesh, config)
            loss_of(model, batch(0, 0, 0)).backward()
        trace = communicator.state.trace
        trace.enabled = True
        loss_of(model, batch(1, 0, 0)).backward()
        blocks = [e for e in trace.events if e.unit.startswith("blocks.")]
        lines = [e.line() for e in blocks if e.kind != "WAIT"]  # of a message's first weight
        seen.append([line for line in lines if line.rpartition(" ")[2].endswith(WIDE)])
    gathers = sum(line.startswith("AG") for line in seen[0])
    assert gathers == (4 + 2) * len(WIDE), "backward finds two blocks in their slots"
    assert seen[0] == seen[1]


def launches(coalesce_bytes: int) -> dict[str, list[list[str]]]:
    """The weights of each launch, by unit."""
    blocks = [
        nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8))
        for _ in range(2)
    ]
    model = nn.Sequential(*blocks)
    for part in (*blocks, model):
        ours.fully_shard(part, mesh=mesh_of((2,)))
    ours.options(model, coalesce_bytes=coalesce_bytes)
    model(torch.randn(3, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    plan = attached_to(model).communicator.plan  # type: ignore[union-attr]
    return {u.name: [[w.name for w in group.weights] for group in u.groups] for u in plan.units}


@ranks(2)
def test_norms_and_biases_of_all_blocks_travel_with_the_root() -> None:
    assert launches(64) == {
        "the root": [  # autocast takes the biases alone
            ["0.0.weight", "0.2.weight", "1.0.weight", "1.2.weight"],
            ["0.1.bias", "0.3.bias", "1.1.bias", "1.3.bias"],
        ],
        "0": [["0.1.weight"], ["0.3.weight"]],
        "1": [["1.1.weight"], ["1.3.weight"]],
    }
    own = [f"{number}.{kind}" for number in range(4) for kind in ("weight", "bias")]
    for block, found in launches(0).items():  # what is not small stays with its block
        wanted = [f"{block}.{name}" for name in own if name not in ("0.bias", "2.bias")]
        assert sorted(name for names in found for name in names) == sorted(wanted)


@pytest.mark.parametrize("units", ["blocks", "nested"])
@ranks(2)
def test_blocks_may_run_twice_in_any_order_or_not_at_all(units: str, rank: int) -> None:
    class Wandering(Model):
        turn = 0

        def forward(self, ids: Any) -> Any:
            self.turn += 1
            order = [[2, 0, 0], [1], [0, 1, 2, 0, 1]][self.turn % 3]
            x = self.embed(ids)
            for number in order:
                x = self.blocks[number](x)
            return self.head(self.norm(x))

    results = []
    for fully_shard in (torchs.fully_shard, ours.fully_shard):
        torch.manual_seed(3)
        model = Wandering().double()
        shard(fully_shard, model, units, mesh_of((2,)))
        results.append(steps(model, rank))
    require_same(results[1], results[0], 1e-11)


@pytest.mark.thorough(1)
@ranks(2)
def test_two_models_and_one_module_alone_share_a_mesh(rank: int) -> None:
    results = []
    for fully_shard in (torchs.fully_shard, ours.fully_shard):
        torch.manual_seed(3)
        mesh = mesh_of((2,))
        one, other, alone = Model().double(), Model().double(), nn.Linear(13, 5).double()
        shard(fully_shard, one, "blocks", mesh)
        shard(fully_shard, other, "root", mesh)
        fully_shard(alone, mesh=mesh)
        x = torch.randn(3, 13, generator=torch.Generator().manual_seed(rank), dtype=torch.double)
        alone(x).square().sum().backward()
        loss = loss_of(one, batch(0, 0, rank)) * loss_of(other, batch(1, 0, rank))
        loss.backward()
        found = {"loss": loss.detach()}
        for name, model in (("one", one), ("other", other), ("alone", alone)):
            for key, p in model.named_parameters():
                if p.grad is not None:
                    found[f"{name} {key}"] = p.grad.full_tensor()
        results.append(found)
    require_same(results[1], results[0])


@ranks(2)
def test_an_optimizer_may_be_made_after_an_evaluation(rank: int) -> None:
    """FSDP2's root is whole then, and the optimizer would step weights that are thrown away."""
    results = []
    for fully_shard, evaluates in ((torchs.fully_shard, False), (ours.fully_shard, True)):
        torch.manual_seed(3)
        model = Model().double()
        shard(fully_shard, model, "blocks", mesh_of((2,)))
        if evaluates:
            with torch.no_grad():
                loss_of(model, batch(9, 0, rank))
        results.append(steps(model, rank))  # makes the optimizer
    require_same(results[1], results[0])


@pytest.mark.parametrize("hooked", ["head.weight", "blocks.1.up.weight"])
@ranks(2)
def test_a_hook_on_a_parameter_may_run_the_model(hooked: str, rank: int) -> None:
    """FSDP2 loses gradients there, in silence."""
    results = []
    for fully_shard, runs in ((torchs.fully_shard, False), (ours.fully_shard, True)):
        torch.manual_seed(3)
        model = Model().double()
        shard(fully_shard, model, "blocks", mesh_of((2,)))
        evaluated: list[float] = []

        def hook(parameter: Any, model: Any = model, evaluated: list[float] = evaluated) -> None:
            evaluated.append(loss_of(model, batch(9, 0, rank)).item())

        if runs:
            model.get_parameter(hooked).register_post_accumulate_grad_hook(hook)
        results.append(steps(model, rank, micro=2))
    require_same(results[1], results[0])
    assert len(evaluated) == 3, "once a step, whose first backward only sums"
    assert evaluated[0] != evaluated[1]


@ranks(2)
def test_a_hook_that_raises_leaves_nothing_behind(rank: int) -> None:
    """It has run the model before."""
    results = []
    for raises in (False, True):
        torch.manual_seed(3)
        model = Model().double()
        shard(ours.fully_shard, model, "blocks", mesh_of((2,)))

        def hook(parameter: Any, model: Any = model) -> None:
            loss_of(model, batch(9, 0, rank))
            raise ValueError("of the program")

        if raises:
            handle = model.head.weight.register_post_accumulate_grad_hook(hook)
            loss = loss_of(model, batch(8, 0, rank))
            with pytest.raises(ValueError, match="of the program"):
                loss.backward()
            handle.remove()
            model.zero_grad()
        results.append(steps(model, rank))
    require_same(results[1], results[0])


@ranks(2)
def test_ranks_that_use_other_parameters_train_instead_of_hanging(rank: int) -> None:
    """FSDP2 hangs there, unless set_reduce_scatter_unused_params(True), and then has zeros."""
    gradients = []
    for zeros in (False, True) if since("2.13") else (False,):
        torch.manual_seed(3)
        layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)).double()

        class Chosen(nn.Module):
            def __init__(self, layers: nn.ModuleList) -> None:
                super().__init__()
                self.layers = layers

            def forward(self, x: Any, which: int) -> Any:
                return self.layers[which](x)

        model: Any = Chosen(layers)
        ours.fully_shard(model, mesh=mesh_of((2,)))
        if zeros:
            model.set_reduce_scatter_unused_params(True)
        x = torch.full((2, 6), 1.0 + rank, dtype=torch.double)
        model(x, rank).sum().backward()
        mine = {n: None if p.grad is None else p.grad.full_tensor()
                for n, p in model.named_parameters()}  # fmt: skip
        for which in (0, 1):
            wanted = torch.full((6, 6), 2 * (1.0 + which) / 2, dtype=torch.double)
            assert torch.equal(mine[f"layers.{which}.weight"], wanted)
        gradients.append(mine["layers.2.weight"])
    assert gradients[0] is None
    for value in gradients[1:]:
        assert torch.equal(value, torch.zeros(6, 6, dtype=torch.double))
