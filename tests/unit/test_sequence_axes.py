"""Which ranks of a sequence share heads, and which form a ring: pure, in either order."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch

from internsp.errors import ConfigError, LayoutError, MeshError
from internsp.mesh import MeshShape, SequenceAxes
from internsp.mesh.sequence import NEAR
from internsp.sp import SequenceLayout
from tests.support.sections import mesh_sections

SIZES = [(2, 2), (4, 2), (2, 4), (3, 2), (3, 3), (1, 4), (4, 1)]  # heads, ring


@pytest.mark.parametrize("near", NEAR)
@pytest.mark.parametrize(("heads", "ring"), SIZES)
def test_every_rank_has_one_place_and_the_near_ones_are_neighbors(
    heads: int, ring: int, near: str
) -> None:
    axes = SequenceAxes.create(heads * ring, ring, near)
    assert [axes.rank(*axes.place(rank)) for rank in range(axes.size)] == list(range(axes.size))
    assert sorted(map(axes.place, range(axes.size))) == list(product(range(ring), range(heads)))
    for part, share in product(range(ring), range(heads)):
        rank = axes.rank(part, share)
        assert axes.sharing(part)[share] == axes.around(share)[part] == rank
    neighbors = axes.groups(near)
    assert [rank for group in neighbors for rank in group] == list(range(axes.size))
    (far,) = (name for name in NEAR if name != near)
    steps = {b - a for group in axes.groups(far) for a, b in pairwise(group)}
    assert steps <= {len(neighbors[0])}
    shape = MeshShape(3 * axes.size, sequence=axes.size, ring=ring, near=near)
    for name in NEAR:
        wanted = [[3 * axes.size - axes.size + r for r in group] for group in axes.groups(name)]
        assert shape.ranks(name)[-len(wanted) :] == wanted


def test_it_makes_no_difference_where_an_axis_is_one_rank() -> None:
    for ring in (1, 4):
        assert SequenceAxes.create(4, ring, "ring") == SequenceAxes.create(4, ring, "heads")


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="A ring of 3 does not divide the 4 ranks"):
        SequenceAxes.create(4, 3)
    with pytest.raises(LayoutError, match=r"near = 'tails'.*'heads', 'ring'"):
        SequenceLayout.create(torch.zeros(1, 8, dtype=torch.long), size=4, ring=2, near="tails")
    with pytest.raises(MeshError, match=r"near='tails' names no axis of a sequence.*'heads'"):
        MeshShape(4, sequence=4, ring=2, near="tails")


@pytest.mark.parametrize("near", NEAR)
@pytest.mark.parametrize(("heads", "ring"), SIZES[:5])
def test_groups_of_the_other_order_show_on_every_rank_in_its_groups_or_in_its_number(
    heads: int, ring: int, near: str
) -> None:
    (other,) = (name for name in NEAR if name != near)
    axes = SequenceAxes.create(heads * ring, ring, near)
    swapped = SequenceAxes.create(heads * ring, ring, other)
    for rank in range(axes.size):
        part, share = axes.place(rank)
        axes.require_groups(axes.sharing(part), axes.around(share))
        part, share = swapped.place(rank)
        groups = [10 + r for r in swapped.sharing(part)], [10 + r for r in swapped.around(share)]
        if axes.rank(part, share) == rank:  # otherwise its layout is refused, see _lengths
            with pytest.raises(LayoutError, match=r"axes = mesh\.sequence_axes"):
                axes.require_groups(*groups)
    with pytest.raises(LayoutError, match="not those of a sequence of"):
        axes.require_groups(list(range(heads + 1)), list(range(ring)))


def test_a_layout_of_the_other_order_is_refused_by_every_rank() -> None:
    ids = torch.zeros(1, 16, dtype=torch.long)
    axes = SequenceAxes.create(4, 2, "ring")
    for rank in range(4):
        axes.require_layout(SequenceLayout.create(ids, rank=rank, size=4, ring=2, near="ring").axes)
        axes.require_layout(SequenceLayout.create(ids, rank=rank, size=4).axes)  # for no ring
        for ring in (2, 4):
            dealt = SequenceLayout.create(ids, rank=rank, size=4, ring=ring).axes
            with pytest.raises(LayoutError, match=r"ring = mesh\.ring and near = mesh\.near"):
                axes.require_layout(dealt)


def test_a_configuration_says_who_is_near() -> None:
    from internsp.app.config import Config

    settings = Config.model_validate(mesh_sections(sequence=4, ring=2, fast_links="ring"))
    assert MeshShape(4, **settings.degrees()).sequence_axes.groups("ring") == [[0, 1], [2, 3]]
    with pytest.raises((ConfigError, ValueError), match="fast_links"):
        Config.model_validate({"sequence": {"fast_links": "tails"}})
