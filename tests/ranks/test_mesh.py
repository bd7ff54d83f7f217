"""Meshes on real process groups: coordinates, groups and errors that all ranks raise together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from internsp.errors import MeshError
from internsp.mesh import ParallelMesh
from tests.support.ranks import run_ranks

GROUPS = ("weight", "sequence", "data", "replica", "zero", "zero_replica", "stage", "pipeline")


def groups_of_this_rank(rank: int, world_size: int) -> dict[str, list[int]]:
    mesh = ParallelMesh.create(2, 4, zero=1, device_type="cpu", timeout_seconds=30)
    assert mesh.param_mesh.mesh_dim_names == ("replica", "weight")
    assert mesh.param_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    found = {}
    for kind in GROUPS:
        group = getattr(mesh, f"{kind}_group")
        found[kind] = dist.get_process_group_ranks(group)
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(found[kind])
        if kind not in ("stage", "pipeline", "zero_replica"):
            assert found[kind].index(rank) == getattr(mesh, f"{kind}_rank")
    return found


@pytest.mark.thorough(1)
def test_each_rank_finds_itself_in_the_declared_groups() -> None:
    found = run_ranks(groups_of_this_rank, 4)
    assert found[3]["weight"] == [2, 3]
    assert found[3]["sequence"] == [0, 1, 2, 3]
    assert found[3]["replica"] == [1, 3]
    assert found[3]["zero"] == [3]
    assert found[3]["zero_replica"] == [1, 3]


def expert_groups_of_this_rank(rank: int, world_size: int) -> dict[str, list[int]]:
    mesh = ParallelMesh.create(
        4, expert_weight=1, expert=2, device_type="cpu", timeout_seconds=30
    )
    axis = mesh.experts
    assert axis.param_mesh.mesh_dim_names == ("replica", "expert", "weight")
    assert axis.param_mesh.mesh.tolist() == [[[0], [1]], [[2], [3]]]
    assert (axis.rank, axis.expert_rank, axis.replica_rank) == (0, rank % 2, rank // 2)
    assert (mesh.expert, mesh.expert_rank) == (2, rank % 2)
    assert mesh.axes == [mesh.dense, axis]
    assert mesh.describe().endswith(
        "expert replicas 2 x expert 2 x expert weight 1 (ZeRO over 2)"
    )
    found = {}
    for kind in ("weight", "gradient", "replica", "zero", "zero_replica"):
        group = getattr(axis, f"{kind}_group")
        assert group not in (mesh.dense.weight_group, mesh.dense.gradient_group)
        found[kind] = dist.get_process_group_ranks(group)
    found["expert"] = dist.get_process_group_ranks(mesh.expert_group)
    for group in mesh.pass_groups:
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(dist.get_process_group_ranks(group))
    same = ParallelMesh.create(2, expert_weight=2, device_type="cpu", timeout_seconds=30)
    assert same.experts is same.dense
    assert dist.get_process_group_ranks(same.expert_group) == [rank]
    return found


def test_experts_have_groups_of_their_own_only_where_their_degrees_differ() -> None:
    found = run_ranks(expert_groups_of_this_rank, 4)
    assert found[3] == {
        "weight": [3], "gradient": [3], "replica": [1, 3], "zero": [1, 3], "zero_replica": [3],
        "expert": [2, 3],
    }  # fmt: skip


def refused(rank: int, world_size: int) -> list[str]:
    texts = []
    for weight, sequence in ((3, 1), (1 + rank, 1)):
        with pytest.raises(MeshError) as error:
            ParallelMesh.create(weight, sequence, device_type="cpu", timeout_seconds=30)
        texts.append(str(error.value))
    mesh = ParallelMesh.create(2, device_type="cpu", timeout_seconds=30)  # the groups still work
    assert mesh.weight_rank == rank
    return texts


def test_a_bad_degree_is_one_clear_error_on_every_rank_and_nothing_hangs() -> None:
    for rank, (impossible, different) in enumerate(run_ranks(refused, 2)):
        assert "weight=3 does not divide the 2 ranks" in impossible
        assert "ranks ask for different meshes" in different
        assert f"this is rank {rank}" in different


def first_calls(rank: int, world_size: int) -> list[list[int]]:
    """The ranks of each group on which making a mesh has called a collective."""
    called: list[list[int]] = []
    reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        called.append(dist.get_process_group_ranks(group))
        reduce(tensor, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        for backend in ("gloo", "nccl"):
            patch.setattr(dist, "get_backend_config", lambda *_, named=backend: f"cpu:{named}")
            for degrees in ({"sequence": 2, "ring": 2}, {"sequence": 2}, {"pipeline": 2}):
                ParallelMesh.create(**degrees, device_type="cpu", timeout_seconds=30)
                called.append([])
    return called


def test_all_ranks_of_a_group_call_nccl_before_some_send_to_each_other() -> None:
    for found in run_ranks(first_calls, 2):
        assert found == [[], [], [], [0, 1], [], [], [0, 1], []], "with NCCL: a ring, a pipeline"
