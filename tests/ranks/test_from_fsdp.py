"""docs/reference/names: every line of the tables runs; a program of FSDP2 and ours are the same."""

from __future__ import annotations

import ast
import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import internsp
from tests.support.compare import check
from tests.support.from_fsdp import TEXT, block, lines, rows, settings
from tests.support.ranks import ranks, run_ranks

SMALL = 256  # parameters of at least this size are sharded in the model
CONFIG = internsp.WeightParallelConfig(reduction="mean", min_shard_elements=SMALL)


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.wide, self.out_proj = nn.Linear(size, 48), nn.Linear(48, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out_proj(torch.relu(self.wide(self.norm(x))))


class Model(nn.Module):
    """The model of the tables."""

    def __init__(self, size: int = 24) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, size), nn.Linear(size, 50)
        self.blocks = nn.ModuleList(Block(size) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for each in self.blocks:
            x = each(x)
        return self.head(x)


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    ids = torch.randint(0, 50, (2, 9), generator=draw)
    return ids[:, :-1], ids[:, 1:]


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def made() -> Model:
    torch.manual_seed(0)
    return Model().double()


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def with_fsdp2() -> tuple[list[float], nn.Module, float]:
    """Losses, the model, and the last norm, of two micro-batches a step."""
    device_mesh, model = init_device_mesh("cpu", (2,)), made()
    for each in (*model.blocks, model):
        fully_shard(each, mesh=device_mesh)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), list[float]()
    for step in range(6):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)  # type: ignore[operator]
            loss = loss_of(model, *batch(step, micro, dist.get_rank())) / 2
            loss.backward()
            losses.append(loss.item())
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model, norm.full_tensor().item()


def with_internsp() -> tuple[list[float], internsp.WPCommunicator, nn.Module, float]:
    """The same, as come_from.md and the tutorial say it."""
    mesh, model = internsp.ParallelMesh.create(weight=2, device_type="cpu"), made()
    communicator = internsp.parallelize(model, mesh, CONFIG)
    optimizer = internsp.ZeroOptimizer(communicator, torch.optim.AdamW, lr=1e-2, max_grad_norm=0.5)
    losses = list[float]()
    for step in range(6):
        for micro in range(2):
            with communicator.no_sync() if micro == 0 else contextlib.nullcontext():
                loss = loss_of(model, *batch(step, micro, mesh.data_rank)) / 2
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, communicator, model, optimizer.grad_norm


@pytest.mark.thorough(4)
@ranks(2)
def test_both_programs_have_the_same_losses_and_parameters() -> None:
    wanted, theirs, their_norm = with_fsdp2()
    found, communicator, ours, norm = with_internsp()
    assert len(wanted) == 12
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-12, atol=0)
    check(whole(ours), whole(theirs), "after the last step")
    untrained = dict(made().named_parameters())
    for name, value in whole(ours).items():
        assert not torch.allclose(value, untrained[name], atol=1e-3), f"{name} was not trained"
    sharded = {w.name for w in communicator.replicated.sharded}
    assert len(sharded) == 8, "all matrices are cut"
    # AdamW, and a step with clipping, hide the scale of gradients; the norm shows it.
    assert norm > 0.5, "the last step clips"
    assert abs(norm - their_norm) < 1e-10 * norm


def of_the_page() -> dict[str, Any]:
    """What a line of the tables may use besides what is made for it."""
    found: dict[str, Any] = {"torch": torch, "internsp": internsp}
    exec(compile(block(TEXT), "fsdp.md", "exec"), found)
    return found


class Lazy(dict[str, Any]):
    """Names that the tables' lines use, each created on first use."""

    def __init__(self, made: dict[str, Callable[[Lazy], Any]]) -> None:
        super().__init__()
        self._made = made

    def __missing__(self, name: str) -> Any:
        self[name] = self._made[name](self)  # a KeyError: a global, or no name at all
        return self[name]


def names(mesh: Any, folder: Path, code: str) -> Lazy:
    """A parallel model for one line: a new one, which ``code`` itself may parallelize."""
    config = internsp.WeightParallelConfig(min_shard_elements=SMALL)

    def model(_: Lazy) -> Any:
        torch.manual_seed(0)
        return Model()

    def communicator(found: Lazy) -> Any:
        return internsp.parallelize(found["model"], mesh, config)

    def loss(found: Lazy) -> Any:
        return loss_of(found["model"], *batch(0, 0, mesh.data_rank))

    found = Lazy({
        "model": model,
        "mesh": lambda _: mesh,
        "communicator": communicator,
        "optimizer": lambda f: internsp.ZeroOptimizer(f["communicator"], torch.optim.AdamW),
        "loss": loss,
        "ids": lambda _: batch(0, 0, mesh.data_rank)[0],
        "device_mesh": lambda _: init_device_mesh(
            "cpu", (1, 2), mesh_dim_names=("replicate", "shard")
        ),
        "folder": lambda _: folder,
    })  # fmt: skip
    if "parallelize(" not in code:
        assert found["communicator"] is not None
    read = {n.id for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Name)}
    if "optimizer" in read:  # before the loss, as in a program
        assert found["optimizer"] is not None
    return found


def failures(rank: int, world_size: int, codes: list[str], folder: str) -> list[str]:
    """The error of each line."""
    page, found = of_the_page(), []
    mesh = internsp.ParallelMesh.create(weight=2, device_type="cpu")
    for number, code in enumerate(codes):
        try:
            variables = names(mesh, Path(folder) / str(number), code)
            exec(compile(code, "a table", "exec"), page, variables)
        except Exception as error:
            found.append(f"{code}: {type(error).__name__}: {error}")
        dist.barrier()
    return found


def test_every_line_of_the_tables_runs() -> None:
    codes = lines(rows(TEXT))
    assert len(codes) > 40
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(failures, 2, codes, folder) == [[], []]


def test_a_line_that_does_not_run_is_found() -> None:
    codes = ["communicator.no_such()", "optimizer.no_such", "unknown", "mesh.weight"]
    for found in run_ranks(failures, 2, codes, "unused"):
        assert [line.split(":")[0] for line in found] == codes[:3]


COMPANIONS: dict[str, dict[str, Any]] = {  # without which an option would have no effect
    "cast_inputs": {"compute_dtype": "bfloat16"},
    "quantize": {"coalesce_bytes": 0},
}


def trained(rank: int, world_size: int, chosen: list[dict[str, Any]]) -> list[str]:
    """What a step under each setting raises, or does not do."""
    found = list[str]()
    mesh = internsp.ParallelMesh.create(weight=2, device_type="cpu")
    for setting in chosen:
        torch.manual_seed(0)
        model = Model()
        try:
            more = {"min_shard_elements": SMALL}
            for key in setting:
                more |= COMPANIONS.get(key, {})
            config = internsp.WeightParallelConfig(**{**more, **setting})
            communicator = internsp.parallelize(model, mesh, config)
            optimizer = internsp.ZeroOptimizer(communicator, torch.optim.SGD, lr=0.1)
            loss_of(model, *batch(0, 0, mesh.data_rank)).backward()
            optimizer.step()
            if not optimizer.grad_norm > 0:
                found.append(f"{setting}: no gradient")
        except Exception as error:
            found.append(f"{setting}: {type(error).__name__}: {error}")
        dist.barrier()
    return found


@pytest.mark.thorough(4)
def test_a_step_runs_under_every_setting_of_weight_parallel() -> None:
    # What the example's model lacks: attention, feed-forward layers; what a weight group of two
    # cannot have (test_near_slices), and what needs narrower parameters (test_dtypes).
    other = (
        {"gather_before": "attention"}, {"gather_before": "mlp"},
        {"near_ranks": 2}, {"grad_dtype": "float32"},
    )  # fmt: skip
    chosen = [setting for setting in settings(rows(TEXT)) if setting not in other]
    assert len(chosen) > 15
    assert run_ranks(trained, 2, chosen) == [[], []]
