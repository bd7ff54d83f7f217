"""The arithmetic of meshes: two factorings of the same ranks, and what is refused."""

from __future__ import annotations

import pytest

from internsp.errors import MeshError
from internsp.mesh import MeshShape


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
