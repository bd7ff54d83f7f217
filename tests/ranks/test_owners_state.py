"""Owners of experts: checkpoints with other degrees, folders of transformers, refusals."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from internsp.app.config import Config
from internsp.app.plan.step import make_plan
from internsp.app.process.stop import StopRequest
from internsp.app.session.session import Session
from internsp.app.train.step import StepRunner
from internsp.config import PlanRule, WeightParallelConfig
from internsp.errors import CollectiveError, LayoutError, StructureError
from internsp.layers import MixtureOfExperts
from internsp.mesh import ParallelMesh
from internsp.optim import ZeroOptimizer
from internsp.parallel.parallelize import parallelize
from internsp.parallel.sequences import supports
from tests.ranks.test_mixture_layer import SWITCH, Pair, tokens
from tests.support import hf
from tests.support.compare import check, close, parameters
from tests.support.models import raises
from tests.support.owners import OwnersTwin as Twin
from tests.support.owners import mesh_of, mixture
from tests.support.ranks import ranks, run_ranks


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    options = StateDictOptions(full_state_dict=True)
    return dict(get_model_state_dict(model, options=options))


@pytest.mark.thorough(8)
@ranks(4)
def test_checkpoints_of_four_owners_load_with_any_number_and_come_back(tmp_path: Path) -> None:
    four = Twin("mixtral", mesh_of(expert=4))
    four.backward()
    optimizer = ZeroOptimizer(four.communicator, torch.optim.AdamW, lr=1e-2)
    optimizer.step()
    saved = whole(four.ours)
    folder = str(tmp_path / "four")
    dcp.save({"model": four.ours, "optimizer": optimizer}, checkpoint_id=folder)
    both: dict[str, Any] = {"expert": 2, "expert_weight": 2}
    placed = both | {"near_experts": "expert"}
    for degrees in ({"expert": 2}, {"weight": 4}, placed, both):
        other = Twin("mixtral", mesh_of(**degrees))
        later = ZeroOptimizer(other.communicator, torch.optim.AdamW, lr=1e-2)
        with torch.no_grad():
            for parameter in other.ours.parameters():
                parameter.mul_(0.5)
        dcp.load({"model": other.ours, "optimizer": later}, checkpoint_id=folder)
        check(whole(other.ours), saved, f"with {degrees}", 0.0)
        again = str(tmp_path / "again")
        dcp.save({"model": other.ours, "optimizer": later}, checkpoint_id=again)
    dcp.load({"model": four.ours, "optimizer": optimizer}, checkpoint_id=again)
    check(whole(four.ours), saved, "and back", 0.0)
    one = {name: torch.zeros_like(value) for name, value in four.plain.state_dict().items()}
    dcp.load({"model": one}, checkpoint_id=folder)
    check(one, saved, "on one process", 0.0)


@pytest.mark.thorough(1)
@ranks(2)
def test_folders_of_transformers_are_written_and_read(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    mesh = mesh_of(expert=2)
    twin = Twin("mixtral", mesh)
    twin.backward()
    twin.check("before")
    twin.plain.load_state_dict(whole(twin.ours))
    folder = tmp_path / "folder"
    twin.plain.save_pretrained(folder)  # rank 0 writes
    dist.barrier()
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert read.config.num_local_experts == twin.ours.config.num_local_experts == 8
    parallelize(read, mesh)
    check(parameters(read), dict(twin.plain.named_parameters()), "read again", 0.0)


def many(number: int) -> Any:
    return mixture("mixtral", num_local_experts=number)


class Listed(nn.Module):
    """A model whose experts are separate modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"wo": nn.Linear(4, 4)}) for _ in range(2))
        for layer in self.layers:
            layer["experts"] = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))  # type: ignore[index]


@ranks(2)
def test_what_owners_cannot_have_is_named_on_every_rank_and_the_model_is_as_before(
    rank: int,
) -> None:
    mesh = mesh_of(expert=2)
    odd = many(5)
    before = dict(odd.named_parameters())
    name = "model.layers.0.mlp.experts (MixtralExperts) has 5 experts"
    assert name in str(supports(odd, mesh)[0])
    raises(StructureError, lambda: parallelize(odd, mesh), name, "expert = a divisor")
    differing = many(6) if rank else many(5)
    raises(StructureError, lambda: parallelize(differing, mesh), ("5", "[5, 24]")[rank])
    for model in (odd, differing):
        assert dict(model.named_parameters()).keys() == before.keys()
        experts = model.model.layers[0].mlp.experts
        assert len(experts.gate_up_proj) == experts.num_experts in (5, 6)
        assert not hasattr(experts, "expert_ranks")
    parallelize(many(6), mesh)  # the remedy
    ours = MixtureOfExperts(8, 5, 3, 2)
    holder = nn.ModuleList(nn.ModuleDict({"moe": ours, "wo": nn.Linear(8, 8)}) for _ in range(2))
    raises(
        StructureError, lambda: parallelize(nn.ModuleDict({"layers": holder}), mesh),
        "layers.0.moe.experts (Experts) has 3 experts", "expert = a divisor",
    )  # fmt: skip
    listed = Listed()
    assert str(supports(listed, mesh)[0]).startswith("layers.0.experts.0")
    raises(StructureError, lambda: parallelize(listed, mesh), "layers.0.experts.0.weight")
    llama = partial(parallelize, hf.tiny("llama"), mesh)
    raises(StructureError, llama, "an axis for experts")
    extra = many(4)
    extra.model.layers[1].mlp.experts.scale = nn.Parameter(torch.ones(3, 2))
    raises(StructureError, lambda: parallelize(extra, mesh), "experts.scale [3, 2]", "dense")
    rule = PlanRule(match=("**.experts.scale",), axis="dense")
    parallelize(extra, mesh, WeightParallelConfig(rules=(rule,)))  # the remedy
    stale = many(4)
    optimizer = torch.optim.SGD(stale.parameters(), lr=0.1)
    communicator = parallelize(stale, mesh)
    raises(StructureError, optimizer.step, "make the optimizer after it")
    assert communicator.mesh is mesh


@ranks(2)
def test_bad_routes_are_one_error_on_every_rank(rank: int) -> None:
    mesh = mesh_of(expert=2)
    batch = {"input_ids": hf.ids(rank), "use_cache": False}

    def routed(change: Any, *words: str) -> None:
        twin = Twin("mixtral", mesh)
        gate = twin.ours.model.layers[1].mlp.gate
        gate.register_forward_hook(lambda m, a, out: change(*out) if rank else out)
        text = raises(LayoutError, lambda: twin.ours(**batch), "model.layers.1.mlp.experts")
        assert words[rank] in text, text

    routed(lambda s, w, i: (s, w, i + 6), "rank 1 was given numbers", "there are 8: its router")
    routed(lambda s, w, i: (s, w[:, :1], i), "rank 1 was given shapes", "index [22, 2]")
    routed(lambda s, w, i: (s, w[:, :1], i[:, :1]), "weights [T, 1]", "weights [T, 1]")
    routed(lambda s, w, i: (s, w.double(), i), "float64", "float64")
    twin = Twin("mixtral", mesh)
    with torch.set_grad_enabled(rank == 0):
        raises(LayoutError, lambda: twin.ours(**batch), "no backward follows")
    routed(lambda s, w, i: (s, w, i - 9), "rank 1 was given numbers", "from -8 to -2")
    own = Pair(SWITCH, None, expert=2)  # in a layer of ours -1 is no expert
    own.ours.layers[1].moe.router.register_forward_hook(
        lambda m, a, out: replace(out, index=out.index - 1 - rank)
    )
    words = "rank 1 was given numbers", "from -2 to 5, but there are 8"
    raises(LayoutError, lambda: own.ours(tokens(rank, 0)), "layers.1.moe.experts", words[rank])
    twin = Twin("mixtral", mesh)
    twin.ours.set_experts_implementation("grouped_mm")
    raises(StructureError, lambda: twin.ours(**batch), "choose experts_implementation before")
    mesh = ParallelMesh.create(device_type="cpu", timeout_seconds=20, expert=2)
    twin = Twin("mixtral", mesh)
    if rank == 1:
        twin.ours.set_experts_implementation("grouped_mm")
    kind = StructureError if rank else CollectiveError
    start = time.monotonic()
    raises(kind, lambda: twin.ours(**batch), "choose experts_implementation", "rank 1")
    assert time.monotonic() - start < 10


@ranks(2)
def test_a_copy_of_the_config_serves_other_models_as_before() -> None:
    twin = Twin("mixtral", mesh_of(expert=2))
    assert twin.plain.config._experts_implementation == "eager"
    third = type(twin.ours)(twin.ours.config).double()  # from the parallel model's config
    third.load_state_dict(twin.plain.state_dict())
    batch = {"input_ids": hf.ids(0), "use_cache": False}
    with torch.no_grad():
        assert torch.equal(third(**batch).logits, twin.plain(**batch).logits)


def settings(folder: Path, **parallel: Any) -> Config:
    """A run of a folder of transformers without weights."""
    return Config.model_validate({
        "model": {"family": "hf", "path": str(folder)},
        "data": {"source": "text", "paths": [str(folder / "text.txt")], "sequence_length": 32},
        "parallel": parallel,
        "weight_parallel": {"min_shard_elements": 128},
        "optimizer": {"lr": 1e-2, "eps": 1e-3, "warmup_steps": 0},
        "train": {
            "steps": 2, "global_batch": 4, "micro_batches": 2, "dtype": "float32",
            "eval_batches": 1,
        },
    })  # fmt: skip


def losses(settings: Config, owners: int) -> tuple[list[tuple[float, float]], dict[str, float]]:
    session = Session.create(settings)
    assert session.mesh.expert == owners
    runner = StepRunner(session)
    rows = [runner.step(step, StopRequest())[0] for step in range(2)]
    return [(row.loss, row.grad_norm) for row in rows], runner.evaluate()


def runs(rank: int, world: int, folder: Path) -> tuple[list[tuple[float, float]], dict[str, float]]:
    if world == 1:
        return losses(settings(folder), 1)
    return losses(settings(folder, expert="auto", expert_weight=2), 2)  # so few tokens travel


def test_a_run_of_two_processes_that_own_experts_learns_what_one_does(tmp_path: Path) -> None:
    mixture("qwen3_moe", vocab_size=260).config.save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 40)
    one, two = run_ranks(runs, 1, tmp_path)[0], run_ranks(runs, 2, tmp_path)
    assert two[0] == two[1]
    for (loss, norm), (wanted, wanted_norm) in zip(two[0][0], one[0], strict=True):
        assert loss == pytest.approx(wanted, rel=1e-4)
        assert norm == pytest.approx(wanted_norm, rel=1e-4)
    assert two[0][1] == pytest.approx(one[1], rel=1e-4)
    owned, all_of_them = (make_plan(settings(tmp_path, expert=n, weight=1), n) for n in (2, 1))
    sizes = [
        [w.slot_bytes for block in plan.chunk.blocks for w in block.weights if "experts" in w.name]
        for plan in (owned, all_of_them)
    ]
    assert len(sizes[0]) == 4
    assert [2 * size for size in sizes[0]] == sizes[1]


@ranks(2)
def test_an_owner_that_fails_is_one_error_on_all_ranks_with_block_and_phase(rank: int) -> None:
    for phase in ("forward", "backward"):
        mesh = ParallelMesh.create(device_type="cpu", timeout_seconds=5, expert=2)
        twin = Twin("mixtral", mesh)
        experts = twin.ours.model.layers[0].mlp.experts

        def broken(module: nn.Module, args: Any, out: Tensor, phase: str = phase) -> None:
            if phase == "forward":
                raise ZeroDivisionError("broken")
            out.register_hook(lambda grad: 1 // 0)

        if rank == 1:
            experts.act_fn.register_forward_hook(broken)
        start = time.monotonic()
        kind = ZeroDivisionError if rank else CollectiveError
        with pytest.raises(kind) as caught:
            hf.sums(twin.ours, {"input_ids": hf.ids(rank), "use_cache": False}).backward()
        assert time.monotonic() - start < 15
        if rank == 0:
            text = str(caught.value)
            assert "model.layers.0.mlp.experts" in text, text
            assert f"({phase})" in text, text
            assert "rank 1 failed first: ZeroDivisionError" in text or phase == "backward", text


@pytest.mark.thorough(2)
@ranks(2)
def test_frozen_shared_and_copied_experts_train_as_on_one_process() -> None:
    def freeze(model: Any) -> None:
        model.model.embed_tokens.weight.requires_grad_(False)
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.requires_grad_(False)
            layer.mlp.gate.weight.requires_grad_(False)

    def share(model: Any) -> None:
        model.model.layers[1].mlp.gate.weight = model.model.layers[0].mlp.gate.weight

    mesh = mesh_of(expert=2)
    for prepare in (freeze, share):
        twin = Twin("mixtral", mesh, prepare=prepare)
        for _ in range(2):
            twin.backward()
            twin.check(prepare.__name__)
    twin.ours.eval(), twin.plain.eval()
    batch = {"input_ids": hf.ids(0), "use_cache": False}
    with torch.no_grad():
        close(twin.ours(**batch).logits, twin.plain(**batch).logits, "evaluated", hf.SINGLE)
    texts = [
        m.generate(input_ids=hf.ids(0)[:, :4], max_new_tokens=3, do_sample=False)
        for m in (twin.plain, twin.ours)
    ]
    assert torch.equal(*texts)
