"""docs/howto/come_from.md: both programs, and every line of the tables of names, are run."""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import internsp
from tests.support.compare import check
from tests.support.from_fsdp import TEXT, blocks, lines, rows, settings
from tests.support.ranks import ranks, run_ranks

MODEL, THEIRS, OURS, NAMES = blocks(TEXT)
SMALL = 256  # parameters of at least this size are sharded in the example's model


def run(*sources: str) -> dict[str, Any]:
    """The variables of a program."""
    variables: dict[str, Any] = {}
    for source in sources:
        exec(compile(source, "come_from.md", "exec"), variables)
    return variables


def whole(program: dict[str, Any]) -> dict[str, Tensor]:
    return {name: p.full_tensor().detach() for name, p in program["model"].named_parameters()}


@pytest.mark.thorough(4)
@ranks(2)
def test_both_programs_have_the_same_losses_and_parameters() -> None:
    theirs, ours = run(MODEL, THEIRS), run(MODEL, OURS)
    wanted, found = torch.tensor(theirs["losses"]), torch.tensor(ours["losses"])
    assert len(wanted) == 12
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    check(whole(ours), whole(theirs), "after the last step")
    untrained = dict(run(MODEL, "torch.manual_seed(0); model = Model().double()")["model"]
                     .named_parameters())  # fmt: skip
    for name, value in whole(ours).items():
        assert not torch.allclose(value, untrained[name], atol=1e-3), f"{name} was not trained"
    sharded = {w.name for w in ours["communicator"].replicated.sharded}
    assert len(sharded) == 8, "all matrices are cut"
    # AdamW, and a step with clipping, hide the scale of gradients; the norm shows it.
    norm = ours["optimizer"].grad_norm
    assert norm > 0.5, "the last step clips"
    assert abs(norm - theirs["norm"].full_tensor().item()) < 1e-10 * norm


class Lazy(dict[str, Any]):
    """Names that the tables' lines use, each created on first use."""

    def __init__(self, made: dict[str, Callable[[Lazy], Any]]) -> None:
        super().__init__()
        self._made = made

    def __missing__(self, name: str) -> Any:
        self[name] = self._made[name](self)  # a KeyError: a global, or no name at all
        return self[name]


def names(mesh: Any, folder: Path, page: dict[str, Any], code: str) -> Lazy:
    """A parallel model for one line: a new one, which ``code`` itself may parallelize."""
    config = internsp.WeightParallelConfig(min_shard_elements=SMALL)

    def model(_: Lazy) -> Any:
        torch.manual_seed(0)
        return page["Model"]()

    def communicator(found: Lazy) -> Any:
        return internsp.parallelize(found["model"], mesh, config)

    def loss(found: Lazy) -> Any:
        return page["loss_of"](found["model"], *page["batch"](0, 0, mesh.data_rank))

    found = Lazy({
        "model": model,
        "mesh": lambda _: mesh,
        "communicator": communicator,
        "optimizer": lambda f: internsp.ZeroOptimizer(f["communicator"], torch.optim.AdamW),
        "loss": loss,
        "ids": lambda _: page["batch"](0, 0, mesh.data_rank)[0],
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
    page, found = run(MODEL, "import internsp", NAMES), []
    mesh = internsp.ParallelMesh.create(weight=2, device_type="cpu")
    for number, code in enumerate(codes):
        try:
            variables = names(mesh, Path(folder) / str(number), page, code)
            exec(compile(code, "come_from.md", "exec"), page, variables)
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
    page, found = run(MODEL), []
    mesh = internsp.ParallelMesh.create(weight=2, device_type="cpu")
    for setting in chosen:
        torch.manual_seed(0)
        model = page["Model"]()
        try:
            more = {"min_shard_elements": SMALL}
            for key in setting:
                more |= COMPANIONS.get(key, {})
            config = internsp.WeightParallelConfig(**{**more, **setting})
            communicator = internsp.parallelize(model, mesh, config)
            optimizer = internsp.ZeroOptimizer(communicator, torch.optim.SGD, lr=0.1)
            page["loss_of"](model, *page["batch"](0, 0, mesh.data_rank)).backward()
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
