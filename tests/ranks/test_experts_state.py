"""State of experts: state dictionaries, checkpoints, initial values, and refusals."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from internsp.config import WeightParallelConfig
from internsp.errors import CollectiveError, MeshError, StructureError
from internsp.mesh import ParallelMesh
from internsp.optim import ZeroOptimizer, clip_grad_norm_
from internsp.parallel.parallelize import initialize, parallelize
from tests.support.compare import gap
from tests.support.experts import WIDTH, Case, Mixture, Pair
from tests.support.models import raises
from tests.support.ranks import ranks, run_ranks

OWNERS, CUT, SHARED = Case(2, 2, 2), Case(2, 4), Case(4)


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in one if not torch.equal(one[name], other[name])]


def resumed(rank: int, world: int, cases: list[Case], folder: str) -> list[str]:
    """Three steps at once compared with one, a checkpoint, and two more by new objects."""
    wrong = []
    for number, case in enumerate(cases):
        pairs = [Pair(case) for _ in range(2)]
        optimizers = [ZeroOptimizer(p.communicator, torch.optim.AdamW, lr=1e-2) for p in pairs]
        (pair, again), path = pairs, f"{folder}/{number}"
        for step in range(3):
            pair.backward(step, plain=False)
            optimizers[0].step()
            if step == 0:
                dcp.save({"model": pair.ours, "optimizer": optimizers[0]}, checkpoint_id=path)
        with torch.no_grad():  # other values, to detect what is not loaded
            for parameter in again.ours.parameters():
                parameter.mul_(0.5)
        dcp.load({"model": again.ours, "optimizer": optimizers[1]}, checkpoint_id=path)
        for step in (1, 2):
            again.backward(step, plain=False)
            optimizers[1].step()
        wrong += differ(pair.whole(), again.whole())
    return wrong


@pytest.mark.unmeasured
def test_a_resumed_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    assert run_ranks(resumed, 4, [OWNERS, CUT], str(tmp_path)) == [[]] * 4


def moved(rank: int, world: int, folder: str) -> list[str]:
    """State loads where experts are sharded, where they share the weight axis, and on one process.

    After a further step all of them still agree.
    """
    wrong = []
    one = Pair(OWNERS)
    with torch.no_grad():
        for parameter in one.ours.parameters():
            parameter.mul_(1.25)
    saved = one.whole()
    dcp.save(one.ours.state_dict(), checkpoint_id=folder)
    for case in (CUT, SHARED):
        other = Pair(case)
        dcp.load(state := other.ours.state_dict(), checkpoint_id=folder)
        other.ours.load_state_dict(state)
        wrong += differ(saved, other.whole())
    dcp.load(state := one.plain.state_dict(), checkpoint_id=folder)
    wrong += differ(saved, state)
    two = Pair(OWNERS)
    two.plain.load_state_dict(state)
    two.ours.load_state_dict(state, assign=True)  # unsharded tensors of one process are sharded
    wrong += differ(saved, two.whole())
    two.backward(0)
    assert two.furthest_gradient() < 1e-10
    return wrong


def test_weights_of_owners_load_on_every_mesh_and_on_one_process(tmp_path: Path) -> None:
    assert run_ranks(moved, 4, str(tmp_path)) == [[]] * 4


def slices_moved(rank: int, world: int, folder: str) -> list[str]:
    """Optimizer state after two steps, moved from mesh to mesh as slices: the same bytes."""
    wrong: list[str] = []
    wanted: dict[str, Tensor] = {}
    for number, case in enumerate((OWNERS, CUT, SHARED, Case(1, 1, 4, zero=2), OWNERS)):
        pair = Pair(case)
        optimizer = ZeroOptimizer(pair.communicator, torch.optim.AdamW, lr=1e-2)
        state: dict[str, Any]
        if number:
            state = {"model": pair.ours.state_dict(), "optimizer": optimizer.local_state_dict()}
            dcp.load(state, checkpoint_id=f"{folder}/{number - 1}")
            pair.ours.load_state_dict(state["model"])
            optimizer.load_local_state_dict(state["optimizer"])
        else:
            for step in range(2):
                pair.backward(step, plain=False)
                optimizer.step()
        found = pair.whole()
        for index, entry in optimizer.state_dict()["state"].items():
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"{index} {kind}"] = entry[kind].full_tensor()
            found[f"{index} step"] = entry["step"]
        wanted = wanted or found
        wrong += differ(wanted, found)
        state = {"model": pair.ours.state_dict(), "optimizer": optimizer.local_state_dict()}
        dcp.save(state, checkpoint_id=f"{folder}/{number}")
    assert wanted["0 exp_avg"].count_nonzero()
    return wrong


def test_slices_of_owners_load_on_every_mesh(tmp_path: Path) -> None:
    assert run_ranks(slices_moved, 4, str(tmp_path)) == [[]] * 4


def first_values(rank: int, world: int) -> list[str]:
    def fill(name: str, whole: Tensor, generator: torch.Generator) -> None:
        nn.init.normal_(whole, generator=generator)

    found = []
    for case in (OWNERS, SHARED):
        pair = Pair(case)
        initialize(pair.communicator, fill, seed=5)
        found.append(pair.whole())
    return differ(*found)


@pytest.mark.thorough(1)
def test_first_values_do_not_depend_on_who_owns_the_experts() -> None:
    assert run_ranks(first_values, 4) == [[]] * 4


def means(rank: int, world: int) -> tuple[str, float]:
    """What torch's own clip raises for gradients of two meshes; and gradients of a mean loss."""
    pair = Pair(CUT)
    pair.backward(0)
    with pytest.raises(RuntimeError) as caught:
        torch.nn.utils.clip_grad_norm_(pair.ours.parameters(), 1.0)
    mean = Pair(Case(2, 2, 2, config={"reduction": "mean"}))
    mean.backward(0)
    clip_grad_norm_(mean.plain.parameters(), 0.0)  # plain tensors too: all gradients are zero
    assert all(not p.grad.any() for p in mean.plain.parameters() if p.grad is not None)
    mean.plain.zero_grad()
    ids, labels = mean.batch(0)
    (mean.plain(ids, labels) / world).backward()
    return str(caught.value), mean.furthest_gradient()


@pytest.mark.thorough(1)
def test_torchs_own_clip_takes_one_mesh_only_and_a_mean_is_over_all_ranks() -> None:
    for complaint, apart in run_ranks(means, 4):
        assert "must have the same mesh" in complaint
        assert apart < 1e-10


def refused(rank: int, world: int) -> list[str]:
    """Errors that all ranks raise together."""
    texts = []
    for wrong in ({"expert": 3}, {"expert_weight": 1 + rank % 2}):
        with pytest.raises(MeshError) as caught:
            ParallelMesh.create(2, device_type="cpu", timeout_seconds=20, **wrong)
        texts.append(str(caught.value))
    mesh = ParallelMesh.create(2, device_type="cpu", timeout_seconds=20, expert=2)
    config = WeightParallelConfig(expert_parameters=("mixture.*",))
    texts.append(
        raises(StructureError, lambda: parallelize(Mixture(4, mesh.expert_group), mesh, config))
    )
    shared = Mixture(4)
    shared.layers[0].experts.tied = nn.Linear(WIDTH, WIDTH)  # type: ignore[union-attr, assignment]
    shared.layers[0].experts.tied.weight = shared.layers[0].wo.weight  # type: ignore[union-attr]
    texts.append(raises(StructureError, lambda: parallelize(shared, mesh)))
    scalar = Mixture(4)
    scalar.layers[0].experts.scale = nn.Parameter(torch.ones(()))  # type: ignore[union-attr]
    texts.append(raises(StructureError, lambda: parallelize(scalar, mesh)))
    return texts


def test_what_cannot_be_is_one_clear_error_on_every_rank() -> None:
    for found in run_ranks(refused, 4):
        degrees, different, missing, shared, scalar = found
        assert "expert_weight=2 (that of weight) x expert=3 = 6 does not divide the 4" in degrees
        asked = "near_experts) = (2, 1, 1, None, 1, 1, 1, 1, 'heads', 'expert_weight'), but rank 1"
        assert asked in different
        assert "candidates: embed, head, layers.*.experts.bias" in missing
        assert "mixture.*" in missing
        assert "layers.0.experts.tied.weight" in shared
        assert "weight_parallel.expert_parameters" in shared
        assert "layers.0.experts.scale" in scalar


def alone(rank: int, world: int) -> list[str]:
    """Rank 0 fails between two all-gathers; the others wait for it only in an experts' group."""
    pair = Pair(Case(1, 4, config={"granularity": "module"}, timeout=5))
    start, found = time.monotonic(), []
    if rank == 0:
        pair.ours.layers[1].wo.forward = broken  # type: ignore[union-attr]
    for step in range(2):
        try:
            pair.backward(step, plain=False)
        except (CollectiveError, ZeroDivisionError) as error:
            found.append(f"{type(error).__name__}: {error}")
    assert time.monotonic() - start < 3 * pair.case.timeout
    with pytest.raises(ValueError, match="not registered"):  # it was aborted
        dist.get_rank(pair.mesh.experts.weight_group)
    return found


def broken(*_: Any) -> Tensor:
    raise ZeroDivisionError("broken")


def test_a_rank_that_fails_alone_ends_the_groups_of_experts_too() -> None:
    failed, *waiting = run_ranks(alone, 4)
    assert failed[0] == "ZeroDivisionError: broken"
    assert "rank 0 failed alone" in failed[1]
    for found in waiting:
        assert all(text.startswith("CollectiveError") for text in found), found
        assert "experts" in found[0], found


def small_ones(rank: int, world: int) -> list[bool]:
    """The biases, which are too small to be sharded: (sharded, weights too, replicated)."""
    found = []
    for case in (CUT, OWNERS):
        pair = Pair(Case(**{**case.__dict__, "config": {"min_shard_elements": 60}}))
        names = {w.name: w.axis is pair.mesh.experts for w in pair.communicator.replicated.sharded}
        bias, up = (f"layers.0.experts.{name}.weight" for name in ("bias", "up"))
        whole = pair.ours.get_parameter(bias).full_tensor()  # type: ignore[operator]
        found += [bias in names, names[up], gap(whole, pair.plain.get_parameter(bias)) == 0]
    return found


@pytest.mark.thorough(1)
def test_even_small_parameters_of_owned_experts_are_cut_and_never_summed_over_owners() -> None:
    assert run_ranks(small_ones, 4) == [[False, True, True, True, True, True]] * 4


@ranks(2)
def test_owners_that_a_model_does_not_declare_are_refused_on_all_ranks(rank: int) -> None:
    mesh = ParallelMesh.create(1, device_type="cpu", timeout_seconds=20, expert=2)
    whole = Mixture(4)  # each rank would train its four experts as a model of eight
    raises(StructureError, partial(parallelize, whole, mesh), "does not declare that it sends")
    for layer in whole.layers:
        layer.experts.expert_ranks = 1 + rank  # type: ignore[union-attr, assignment]
    words = ("does not declare",) if rank == 0 else ("rank 0 refused its model (this is rank 1)",)
    raises(StructureError, partial(parallelize, whole, mesh), *words)
    pytest.importorskip("transformers")
    from tests.support.hf import tiny

    # The remedies: declared, called by an interface that is known, or one set of experts for all.
    parallelize(tiny("mixtral"), mesh)
    parallelize(Mixture(4, mesh.expert_group), mesh)
    shared = ParallelMesh.create(1, device_type="cpu", timeout_seconds=20, expert_weight=2)
    parallelize(tiny("mixtral"), shared)
