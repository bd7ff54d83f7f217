"""Meshes from a user's ``DeviceMesh``: names of axes, gradient parity, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from internsp.errors import MeshError
from internsp.mesh import ParallelMesh
from internsp.optim import ZeroOptimizer
from tests.support import pipeline as pipelines
from tests.support.compare import close
from tests.support.models import Tiny, Twin
from tests.support.parity import Case, run_case
from tests.support.ranks import run_ranks

BOUND = 1e-10
Axes = dict[str, Any]


def mesh_of_axes(sizes: dict[str, int], axes: Axes, **more: Any) -> ParallelMesh:
    made = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return ParallelMesh.from_device_mesh(made, timeout_seconds=60, **axes, **more)


# sizes of the axes, meanings of their names, and (weight, sequence, pipeline, replicas, data)
Row = tuple[dict[str, int], Axes, tuple[int, ...]]
RIGHT: dict[int, list[Row]] = {
    2: [
        ({"shard": 2}, {"weight": "shard"}, (2, 1, 1, 1, 2)),
        ({"shard": 2}, {"weight": "shard", "sequence": "shard"}, (2, 2, 1, 1, 1)),
        ({"dp": 2}, {"weight": (), "replicas": ["dp"]}, (1, 1, 1, 2, 2)),
        ({"dp": 1, "sp": 2}, {"weight": "dp", "sequence": "sp"}, (1, 2, 1, 2, 1)),
    ],
    4: [
        (
            {"replicate": 2, "shard": 2},
            {"weight": "shard", "replicas": "replicate"},
            (2, 1, 1, 2, 4),
        ),
        (
            {"replicate": 2, "shard": 2},
            {"weight": "shard", "replicas": "replicate", "sequence": ("shard", "replicate")},
            (2, 4, 1, 2, 1),
        ),
        ({"dp": 2, "sp": 2}, {"weight": ("sp", "dp"), "sequence": "sp"}, (4, 2, 1, 1, 2)),
        ({"dp": 2, "sp": 2}, {"weight": "sp", "replicas": "dp", "sequence": "sp"}, (2, 2, 1, 2, 2)),
        # In any order: groups of ranks that are not neighbors.
        ({"shard": 2, "replicate": 2}, {"weight": "shard", "replicas": "replicate"},
         (2, 1, 1, 2, 4)),
        ({"sp": 2, "dp": 2}, {"weight": "sp", "replicas": "dp", "sequence": "sp"}, (2, 2, 1, 2, 2)),
        # Sequences are sharded by heads and by positions, with either axis near.
        *(
            ({"replicate": 2, "shard": 2},
             {"weight": "shard", "replicas": "replicate", "sequence": ("shard", "replicate"),
              "ring": 2, "near": near}, (2, 4, 1, 2, 1))
            for near in ("heads", "ring")
        ),
        # An axis of one rank may be anywhere.
        ({"shard": 4, "replicate": 1}, {"weight": "shard", "replicas": "replicate"},
         (4, 1, 1, 1, 4)),
    ],
}  # fmt: skip


def trained(rank: int, world_size: int, rows: list[Row]) -> list[tuple[float, float]]:
    found = []
    for sizes, axes, (weight, sequence, pipeline, replicas, data) in rows:
        mesh = mesh_of_axes(sizes, axes)
        shape = mesh.shape
        assert (shape.weight, shape.sequence, shape.pipeline) == (weight, sequence, pipeline)
        assert (mesh.replicas, mesh.data, mesh.world_size) == (replicas, data, world_size)
        assert mesh.timeout_seconds == 60
        found.append(run_case(Case(weight, sequence, length=13), mesh=mesh))
    return found


@pytest.mark.parametrize(
    ("world", "rows"),
    [
        (2, RIGHT[2]), (4, RIGHT[4][1::3]),
        pytest.param(4, RIGHT[4][::3] + RIGHT[4][2::3], marks=pytest.mark.thorough(5)),
    ],
    ids=["two", "four", "four, others"],
)  # fmt: skip
def test_loss_and_gradients_on_a_users_mesh_are_one_processs(world: int, rows: list[Row]) -> None:
    for gaps in run_ranks(trained, world, rows):
        assert len(gaps) == len(rows)
        assert max(map(max, gaps)) < BOUND


def stepped(rank: int, world_size: int) -> list[list[int]]:
    """Some steps of ours compared with torch's; this rank's groups, and the device mesh's."""
    sizes = {"replicate": 2, "shard": 2}
    made = init_device_mesh("cpu", (2, 2), mesh_dim_names=tuple(sizes))
    mesh = ParallelMesh.from_device_mesh(made, weight="shard", replicas="replicate", zero=1)
    assert mesh.zero == 1
    twin = Twin(Tiny, mesh)
    ours = ZeroOptimizer(twin.communicator, torch.optim.AdamW, lr=0.1, max_grad_norm=0.5)
    theirs = torch.optim.AdamW(twin.plain.parameters(), lr=0.1)
    for _ in range(3):
        twin.backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.5)
        ours.step()
        theirs.step()
        theirs.zero_grad()
        close(torch.tensor(ours.grad_norm, dtype=torch.float64), norm, "norm")
    twin.communicator.wait_until_ready()
    twin.check_parameters("after three steps")
    total = torch.ones(1)
    dist.all_reduce(total, group=made.get_group("shard"))  # the user's own mesh still works
    assert total.item() == 2
    groups = (mesh.weight_group, mesh.replica_group)
    names = ("shard", "replicate")
    for group, name in zip(groups, names, strict=True):
        assert group is not made.get_group(name)
        assert group.rank() == made.get_local_rank(name)
        theirs_ranks = dist.get_process_group_ranks(made.get_group(name))
        assert dist.get_process_group_ranks(group) == theirs_ranks
    return [dist.get_process_group_ranks(group) for group in groups]


def test_a_model_trained_on_a_users_mesh_is_one_processs_after_steps() -> None:
    found = run_ranks(stepped, 4)
    assert found[3] == [[2, 3], [1, 3]]


def piped(rank: int, world_size: int, inner: bool) -> tuple[pipelines.Found, int]:
    sizes = {"pp": 2, "sp": world_size // 2}
    if inner:
        sizes = dict(reversed(sizes.items()))
    axes = {"pipeline": "pp", "weight": "sp", "sequence": "sp"}
    case = pipelines.Case(weight=world_size // 2, sequence=world_size // 2)
    mesh = mesh_of_axes(sizes, axes)
    pipeline, plain = pipelines.make(case, mesh=mesh)
    losses = pipeline.step(pipelines.batches(case, mesh))
    return pipelines.compare(case, pipeline, plain, losses), mesh.pipeline_rank


@pytest.mark.thorough(2)
@pytest.mark.parametrize(("world", "inner"), [(2, False), (4, False), (4, True)])
def test_a_pipelines_axis_is_the_outermost_or_not(world: int, inner: bool) -> None:
    for rank, (found, stage) in enumerate(run_ranks(piped, world, inner)):
        assert stage == (rank % 2 if inner else rank // (world // 2))
        assert max(found.loss, found.gradient) < BOUND


# arguments, and words of the error
WRONG: list[tuple[tuple[str, ...], Axes, tuple[str, ...]]] = [
    (("a", "b"), {"weight": "a", "replicas": "a", "sequence": "b"},
     ("axis 'a' is named twice, by weight and by replicas",)),
    (("a", "b"), {"weight": ("b", "b"), "replicas": "a"},
     ("axis 'b' is named twice, by weight and by weight",)),
    (("a", "b"), {"weight": "b", "sequence": "a", "pipeline": "a"},
     ("axis 'a' is named twice, by sequence and by pipeline",)),
    (("a", "b"), {"weight": "b"},
     ("axis 'a' of this DeviceMesh is left without a meaning",
      "name it in weight, replicas, sequence, pipeline, tensor")),
    (("replicate", "shard"), {"weight": "shard", "replicas": "replicat"},
     ("replicas names 'replicat', but this DeviceMesh has 'replicate', 'shard'",
      "did you mean 'replicate'?")),
    (("a", "b"), {"weight": 2},
     ("weight = 2 is no name of an axis", "ParallelMesh.create makes a mesh from degrees")),
    (("a", "b"), {"weight": None, "replicas": ("a", "b")}, ("weight = None is no name",)),
    (("a", "b"), {"weight": "a", "sequence": "b"},
     ("weights are sharded over ['a'] and sequences split over ['b']", "weight = ('a', 'b')")),
    (("sp", "dp"), {"weight": ("sp", "dp"), "sequence": "sp"},
     ("the ranks [0, 2, 1, 3] of a weight group do not ascend", "after those over which only one")),
    (("a", "b"), {"weight": "b", "replicas": "a", "zero": 3},
     ("zero=3 does not divide the 2 replicas",)),
    (("a", "b"), {"weight": "b", "replicas": "a", "timeout_seconds": 0},
     ("timeout_seconds = 0 must be above 0",)),
]  # fmt: skip


def refused(rank: int, world_size: int) -> None:
    def told(made: Any, **axes: Any) -> str:
        with pytest.raises(MeshError) as error:
            ParallelMesh.from_device_mesh(made, **({"timeout_seconds": 30} | axes))
        return str(error.value)

    made = {names: init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            for names in {names for names, _, _ in WRONG}}  # fmt: skip
    for names, axes, words in WRONG:
        text = told(made[names], **axes)
        for word in words:
            assert word in text, text
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert "('b') has 2 of 4 ranks" in told(two["b"], weight="b")
    assert "no names" in told(DeviceMesh("cpu", torch.arange(4)), weight="a")
    assert "is a tuple" in told((2, 2), weight="a")
    turned = DeviceMesh("cpu", torch.tensor([[1, 0], [3, 2]]), mesh_dim_names=("a", "b"))
    assert "the ranks [1, 0] of a weight group do not ascend" in told(
        turned, weight="b", replicas="a"
    )
    # Only one rank is wrong: all ranks raise, none waits.
    text = told(two, weight="b" if rank else "c", replicas="a")
    assert "ranks ask for different meshes" in text
    assert "weight names 'c'" in text
    mine = {"replicas": "a"} if rank else {"sequence": ("a", "b")}
    assert "different meshes" in told(two, weight="b" if rank else ("a", "b"), **mine)
    both = {"weight": ("a", "b"), "sequence": ("a", "b"), "ring": 2}
    text = told(two, **both, near="ring" if rank else "heads")
    asked = "near, near_experts, order) = (4, 4, 1, None, None, 1, 1, 2, 'heads', 'expert_weight', "
    assert asked in text
    assert "near='far' names no axis of a sequence" in told(two, **both, near="far")


def test_what_cannot_be_is_refused_by_name_on_every_rank() -> None:
    run_ranks(refused, 4)
