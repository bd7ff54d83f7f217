"""The arithmetic of a sharded weight: padding at the global tail only, unsharded contiguous."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from internsp.errors import LayoutError
from internsp.schedule.layout import ShardLayout
from internsp.wp.reduce import input_without_copy

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@pytest.mark.thorough(1)
@given(shape=shapes, size=st.integers(1, 7), data=st.data())
def test_gathered_shards_are_the_whole_weight_for_any_shape_cut_and_size(
    shape: tuple[int, ...], size: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    whole = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    layout = ShardLayout.create(shape, dim, size)
    slot = torch.zeros(layout.padded_numel)
    for rank, place in enumerate(slot.view(size, -1)):
        rows = layout.cut(whole, rank)
        assert len(rows) == layout.valid_rows(rank)
        # Torch's own rule for Shard(dim).
        pieces = whole.chunk(size, dim)
        if rank < len(pieces):
            assert torch.equal(rows.movedim(0, layout.dim), pieces[rank])
        else:
            assert rows.numel() == 0
        place[: rows.numel()] = rows.flatten()
    view = layout.unsharded_view(slot)
    assert torch.equal(view, whole)
    assert view.untyped_storage().data_ptr() == slot.untyped_storage().data_ptr(), "no copy"


@given(shape=shapes, size=st.integers(1, 7), data=st.data())
def test_a_packed_gradient_has_every_ranks_rows_and_a_zero_tail(
    shape: tuple[int, ...], size: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    gradient = torch.randn(shape)
    layout = ShardLayout.create(shape, dim, size)
    packed = torch.full((layout.padded_numel,), math.nan)
    layout.pack(gradient, packed)
    for rank, piece in enumerate(packed.view(size, *layout.shard_shape)):
        rows = layout.cut(gradient, rank)
        assert torch.equal(piece[: len(rows)], rows)
        assert not piece[len(rows) :].any(), "padding travels as zeros"
    as_is = input_without_copy(layout, gradient)
    if as_is is not None:
        assert torch.equal(as_is, packed)
        assert as_is.data_ptr() == gradient.data_ptr()
    even = shape[dim] % size == 0
    assert (as_is is not None) or not (even and layout.dim == 0), "no copy where none is needed"


def test_a_cut_out_of_range_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"dimension 2 .* \[3, 4\]"):
        ShardLayout.create((3, 4), 2, 2)
