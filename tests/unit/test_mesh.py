"""The arithmetic of meshes: three groupings of the same ranks, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from internsp.errors import MeshError
from internsp.mesh import MeshShape
from internsp.mesh.parallel_mesh import _require_sends
from internsp.structure.near import ranks_near
from tools.bench_setup import DEGREES, of

EXPERT_KINDS = (
    "expert", "expert_weight", "expert_gradient", "expert_replica", "expert_zero",
    "expert_zero_replica",
)  # fmt: skip


def test_weight_and_sequence_groups_are_contiguous_and_independent() -> None:
    shape = MeshShape(12, weight=4, sequence=6)
    assert shape.ranks("weight") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert shape.ranks("sequence") == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert shape.ranks("data") == [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]
    assert shape.ranks("replica") == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert (shape.data, shape.replicas, shape.zero_size) == (2, 3, 3)


def test_zero_groups_are_subgroups_of_the_replicas() -> None:
    shape = MeshShape(8, weight=2, sequence=1, zero=2)
    assert shape.ranks("replica") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert shape.ranks("zero") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert shape.ranks("zero_replica") == [[0, 4], [2, 6], [1, 5], [3, 7]]


def test_pipeline_stages_hold_whole_meshes() -> None:
    shape = MeshShape(8, weight=2, sequence=4, pipeline=2)
    assert shape.ranks("stage") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert shape.ranks("pipeline") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert shape.ranks("weight") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert shape.ranks("replica") == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize("world", [1, 2, 4, 6, 12])
def test_every_kind_of_group_holds_every_rank_once(world: int) -> None:
    for weight in (d for d in range(1, world + 1) if world % d == 0):
        for sequence in (d for d in range(1, world + 1) if world % d == 0):
            shape = MeshShape(world, weight, sequence)
            for kind in ("weight", "replica", "zero", "zero_replica", "sequence", "data", "stage"):
                ranks = [r for group in shape.ranks(kind) for r in group]
                assert sorted(ranks) == list(range(world)), kind


def test_experts_are_cut_inside_and_owned_outside_of_an_expert_weight_group() -> None:
    shape = MeshShape(24, weight=2, pipeline=2, expert_weight=2, expert=3)
    assert shape.ranks("expert_weight")[:3] == [[0, 1], [2, 3], [4, 5]]
    assert shape.ranks("expert_gradient") == shape.ranks("expert_weight")
    assert shape.ranks("expert")[:4] == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert shape.ranks("expert_replica")[:3] == [[0, 6], [1, 7], [2, 8]]
    assert shape.ranks("expert_replica")[6] == [12, 18]  # a separate pipeline stage
    assert (shape.experts.replicas, shape.experts.expert, shape.experts.size) == (2, 3, 2)
    assert shape.ranks("replica")[0] == [0, 2, 4, 6, 8, 10]  # dense weights: as without experts
    assert [shape.experts.coordinates(inside) for inside in (0, 1, 2, 7, 11)] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 1), (1, 2, 1),
    ]  # fmt: skip


DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
NEAR: list[tuple[dict[str, Any], int, int, int]] = [
    ({"weight": 16}, 8, 2, 8), ({"weight": 16}, 4, 2, 4),
    ({"weight": 8}, 8, 2, 0),  # every group is on one machine
    ({"weight": 16, "tensor": 2}, 8, 2, 4), ({"weight": 2, "tensor": 8}, 8, 2, 0),
    ({"weight": 16}, 2, 4, 2), ({"weight": 16}, 2, 2, 0),  # two bytes thrice, or four once
    ({"weight": 16}, 6, 4, 2),  # the fifth and sixth of a group are on one machine, too
    ({"weight": 16}, 5, 4, 0), ({"weight": 16}, 1, 4, 0), ({"weight": 16}, 1, 8, 0),
    ({"weight": 16, "expert": 4, "expert_weight": 8}, 4, 2, 4),
    ({"weight": 16, "expert": 2, "expert_weight": 16, "near_experts": "expert"}, 8, 2, 4),
    ({"weight": 16, "pipeline": 2}, 16, 2, 0),
]  # fmt: skip


@pytest.mark.parametrize(("degrees", "machine", "itemsize", "near"), NEAR)
def test_a_machines_ranks_are_near_where_a_weight_group_is_on_several(
    degrees: dict[str, Any], machine: int, itemsize: int, near: int
) -> None:
    machines, dtype = {rank: rank // machine for rank in range(32)}, DTYPES[itemsize]
    assert ranks_near(MeshShape(32, machines=machines, **degrees), dtype) == near
    assert ranks_near(MeshShape(32, **degrees), dtype) == 0  # machines are not known


def test_owners_of_experts_are_neighbors_where_that_is_asked_for() -> None:
    shape = MeshShape(12, weight=2, expert_weight=2, expert=3, near_experts="expert")
    assert shape.ranks("expert") == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert shape.ranks("expert_weight")[:3] == [[0, 3], [1, 4], [2, 5]]
    assert shape.ranks("expert_replica")[:2] == [[0, 6], [3, 9]]
    assert shape.ranks("replica")[0] == [0, 2, 4, 6, 8, 10]  # dense weights: as ever
    assert [shape.experts.coordinates(inside) for inside in (0, 1, 3, 10)] == [
        (0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1),
    ]  # fmt: skip
    # With one degree there is nothing to place.
    assert not MeshShape(4, weight=4, near_experts="expert").separate
    with pytest.raises(MeshError, match="near_experts='tokens' is no axis; choose one of"):
        MeshShape(4, near_experts="tokens")


@pytest.mark.parametrize(
    "shape",
    [MeshShape(8, 2), MeshShape(8, 2, zero=2), MeshShape(8, 2, expert_weight=2)],
    ids=["no degrees of experts", "with zero", "the same weight degree"],
)
def test_experts_without_degrees_of_their_own_share_the_dense_axis(shape: MeshShape) -> None:
    assert shape.experts == shape.dense
    assert not shape.separate
    for kind in ("weight", "gradient", "replica", "zero", "zero_replica"):
        assert shape.ranks(f"expert_{kind}") == shape.ranks(kind)
    assert shape.ranks("expert") == [[rank] for rank in range(8)]


@pytest.mark.parametrize("degrees", [{"expert_weight": 4}, {"expert": 2}], ids=str)
def test_experts_with_degrees_of_their_own_have_an_axis_of_their_own(
    degrees: dict[str, int],
) -> None:
    assert MeshShape(8, 2, **degrees).separate


def test_the_state_of_experts_is_cut_over_what_their_replicas_and_zero_have_in_common() -> None:
    wide = MeshShape(24, weight=1, zero=8, expert_weight=2, expert=2)
    assert (wide.experts.replicas, wide.experts.zero) == (6, 2)
    assert wide.ranks("expert_zero")[:2] == [[0, 4], [1, 5]]
    assert wide.ranks("expert_zero_replica")[0] == [0, 8, 16]
    assert MeshShape(24, weight=1, expert_weight=2, expert=2).experts.zero == 6
    assert MeshShape(24, weight=1, zero=5 + 1, expert=8).experts.zero == 3


@pytest.mark.parametrize("world", [1, 4, 6, 12])
def test_every_kind_of_expert_group_holds_every_rank_once_and_no_stage_is_left(world: int) -> None:
    for pipeline in (1, 2) if world % 2 == 0 else (1,):
        stage = world // pipeline
        for size in (d for d in range(1, stage + 1) if stage % d == 0):
            for expert in (d for d in range(1, stage // size + 1) if stage // size % d == 0):
                shape = MeshShape(world, 1, 1, pipeline, None, size, expert)
                sizes = {"expert": expert, "expert_weight": size, "expert_gradient": size}
                for kind in EXPERT_KINDS:
                    groups = shape.ranks(kind)
                    assert sorted(r for group in groups for r in group) == list(range(world)), kind
                    assert all(len({r // stage for r in group}) == 1 for group in groups), kind
                    width = sizes.get(kind, 1 if kind.endswith("zero_replica") else None)
                    assert {len(group) for group in groups} == {
                        stage // (size * expert) if width is None else width
                    }


def test_tensor_ranks_beside_an_axis_of_experts_own_are_refused() -> None:
    for own in ({"expert_weight": 2}, {"expert": 2}):
        with pytest.raises(MeshError, match=r"tensor=2 together with an axis .* not supported"):
            MeshShape(8, weight=4, tensor=2, **own)
    assert MeshShape(8, weight=4, tensor=2).tensor == 2


def test_impossible_expert_degrees_are_refused_with_the_possible_ones() -> None:
    with pytest.raises(MeshError) as refused:
        MeshShape(8, weight=2, expert_weight=4, expert=4)
    assert str(refused.value) == (
        "expert_weight=4 x expert=4 = 16 does not divide the 8 ranks; choose a product among "
        "[1, 2, 4, 8]"
    )
    with pytest.raises(MeshError, match=r"expert_weight=2 \(that of weight\) x expert=3 = 6 does"):
        MeshShape(8, weight=2, expert=3)
    with pytest.raises(MeshError, match="expert=0 must be at least 1"):
        MeshShape(8, expert=0)
    with pytest.raises(MeshError, match="expert_weight=-1 must be at least 1"):
        MeshShape(8, expert_weight=-1)


def test_impossible_degrees_are_refused_with_the_possible_ones() -> None:
    with pytest.raises(MeshError, match=r"weight=3 does not divide the 8 ranks.*\[1, 2, 4, 8\]"):
        MeshShape(8, weight=3)
    with pytest.raises(MeshError) as both:
        MeshShape(8, weight=3, sequence=5)
    assert "weight=3" in str(both.value)
    assert "sequence=5" in str(both.value)
    with pytest.raises(MeshError, match="pipeline=3 does not divide the world of 8"):
        MeshShape(8, pipeline=3)
    with pytest.raises(MeshError, match="zero=3 does not divide the 4 replicas"):
        MeshShape(8, weight=2, zero=3)
    with pytest.raises(MeshError, match="sequence=0 must be at least 1"):
        MeshShape(8, sequence=0)


@pytest.mark.thorough(10)
@pytest.mark.parametrize("degrees", DEGREES)
def test_ten_times_the_ranks_have_the_same_groups_and_keys_and_no_more_than_ten_times_the_cost(
    degrees: str,
) -> None:
    few, many = of(1024, degrees), of(10240, degrees)
    assert (few["groups"], few["keys"]) == (many["groups"], many["keys"])
    assert few["groups"] <= 10
    assert many["seconds"] < 10 * few["seconds"] + 1
    assert many["bytes"] < 10 * few["bytes"]


@pytest.mark.parametrize("sent", [{"pipeline": 2}, {"sequence": 2, "ring": 2}], ids=str)
def test_a_devices_tensors_are_not_sent_over_gloo(
    sent: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on a GPU: gloo reads the device's address as one of the host, "Bad address"."""
    shape, cuda, words = MeshShape(2, **sent), torch.device("cuda", 0), "=2 sends tensors of cuda:0"
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:gloo")
    with pytest.raises(MeshError, match=words):
        _require_sends(shape, cuda)
    _require_sends(shape, torch.device("cpu"))
    _require_sends(MeshShape(2, weight=2), cuda)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl")
    _require_sends(shape, cuda)
