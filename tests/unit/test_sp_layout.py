"""Sequence layout and head split: pure functions, checked against the full sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from internsp.errors import LayoutError
from internsp.sp import HeadPlan, SequenceLayout

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [1, 2, 3, 4, 5, 6, 7]])


def test_labels_are_shifted_before_the_cut_and_within_documents() -> None:
    layouts = [
        SequenceLayout.create(IDS, rank=rank, size=3, boundaries=[[0, 4], [0]]) for rank in range(3)
    ]
    assert layouts[0].sizes == (3, 2, 2)
    labels = torch.cat([layout.labels for layout in layouts], dim=1)
    assert labels.tolist() == [
        [6, 7, 8, -100, 10, 11, -100],
        [2, 3, 4, 5, 6, 7, -100],
    ]
    positions = torch.cat([layout.positions for layout in layouts], dim=1)
    assert positions.tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6]]
    assert torch.equal(torch.cat([layout.input_ids for layout in layouts], dim=1), IDS)
    assert [layout.valid_tokens for layout in layouts] == [6, 3, 2]
    assert {layout.total_valid_tokens for layout in layouts} == {11}
    assert layouts[1].documents.cu_seqlens.tolist() == [0, 4, 7, 14]
    assert layouts[1].documents.longest == 7


@pytest.mark.parametrize(
    ("starts", "rows"),
    [
        ([[0, 4], [0, 4]], ((4, 3),)),
        ([[0, 4], [0, 2]], ((4, 3), (2, 5))),
        ([[0, 1, 4], [0, 1, 5]], ((1, 3, 3), (1, 4, 2))),
        ([[0], [0, 2]], ((7,), (2, 5))),
    ],
)
def test_rows_are_one_only_if_their_documents_are_cut_at_the_same_tokens(
    starts: list[list[int]], rows: tuple[tuple[int, ...], ...]
) -> None:
    assert SequenceLayout.create(IDS, boundaries=starts).documents.rows == rows


def test_given_labels_are_cut_as_they_are() -> None:
    labels = IDS.masked_fill(IDS > 6, -7)
    layout = SequenceLayout.create(IDS, rank=1, size=2, labels=labels, ignore_index=-7)
    assert torch.equal(layout.labels, labels[:, 4:])
    assert layout.valid_tokens == 2


@given(st.data())
def test_labels_positions_and_counts_of_every_share_are_those_of_the_whole(
    data: st.DataObject,
) -> None:
    """Compared with a loop over tokens: documents, ignored ranges, an index as id, any order."""
    length, rows = data.draw(st.integers(2, 40)), data.draw(st.integers(1, 3))
    size, ring = data.draw(st.sampled_from([(1, 1), (3, 1), (2, 2), (4, 2)]))
    balance = data.draw(st.sampled_from(["contiguous", "zigzag", "level", "auto"]))
    index = data.draw(st.sampled_from([-100, 3]))
    places = st.lists(st.integers(0, length), max_size=8, unique=True).map(sorted)
    starts = [[0, *(n for n in data.draw(places) if 0 < n < length)] for _ in range(rows)]
    edges = [data.draw(places) for _ in range(rows)]
    ignored = [list(zip(e[::2], e[1::2], strict=False)) for e in edges]
    ids = torch.randint(0, 5, (rows, length), generator=torch.Generator().manual_seed(length))
    layouts = [
        SequenceLayout.create(
            ids, rank=rank, size=size, boundaries=starts, ignored=ignored, ignore_index=index,
            ring=ring, balance=balance,
        )
        for rank in range(size)
    ]  # fmt: skip
    labels, positions = torch.full_like(ids, index), torch.zeros_like(ids)
    for row in range(rows):
        for at in range(length):
            positions[row, at] = at - max(n for n in starts[row] if n <= at)
            out = any(begin <= at < end for begin, end in ignored[row])
            if at and at not in starts[row] and not out:
                labels[row, at - 1] = ids[row, at]
    for layout in layouts:
        assert torch.equal(layout.labels, layout.own(labels))
        assert torch.equal(layout.positions, layout.own(positions))
        assert layout.total_valid_tokens == int((labels != index).sum())
        assert torch.equal(layout.all_positions, positions)
    assert sum(layout.valid_tokens for layout in layouts) == layouts[0].total_valid_tokens


@pytest.mark.parametrize(
    "ranges", [[(3, 2)], [(0, 8)], [(4, 6), (5, 7)], [(2, 2)], [(-1, 2)]], ids=str
)
def test_impossible_ignored_ranges_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(LayoutError, match=r"Ignored ranges of row 1 must rise within 0 and 7"):
        SequenceLayout.create(IDS, ignored=[[], ranges])
    with pytest.raises(LayoutError, match=r"2 rows of ids, but ignored ranges of 1"):
        SequenceLayout.create(IDS, ignored=[[]])
    with pytest.raises(LayoutError, match=r"labels or ignored ranges, not both"):
        SequenceLayout.create(IDS, ignored=[[], []], labels=IDS)


def test_a_sequence_shorter_than_the_group_leaves_ranks_empty() -> None:
    layout = SequenceLayout.create(IDS[:, :2], rank=3, size=4)
    assert layout.sizes == (1, 1, 0, 0)
    assert layout.input_ids.shape == (2, 0)
    assert layout.valid_tokens == 0


@pytest.mark.parametrize("starts", [[[1], [0]], [[0, 3, 3], [0]], [[0, 7], [0]], [[0]], [[], [0]]])
def test_impossible_boundaries_are_refused(starts: list[list[int]]) -> None:
    with pytest.raises(LayoutError):
        SequenceLayout.create(IDS, boundaries=starts)


def test_a_foreign_rank_and_misshapen_labels_are_refused() -> None:
    with pytest.raises(LayoutError, match="Rank 2"):
        SequenceLayout.create(IDS, rank=2, size=2)
    with pytest.raises(LayoutError, match="shape of the ids"):
        SequenceLayout.create(IDS, labels=IDS[:, 1:])
    with pytest.raises(LayoutError, match=r"must be integers, got torch\.float32"):
        SequenceLayout.create(IDS.float())
    with pytest.raises(LayoutError, match="window of 0 hides"):
        SequenceLayout.create(IDS, window=0)
    for empty in (IDS[:, :0], IDS[:0], IDS[0]):
        with pytest.raises(LayoutError, match=r"must be \[B, S\] and not empty"):
            SequenceLayout.create(empty)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 6))
def test_a_plan_gives_every_query_head_once_with_the_key_value_head_it_reads(
    kv_heads: int, group: int, size: int
) -> None:
    heads = kv_heads * group
    plan = HeadPlan.create(heads, kv_heads, size)
    owned = [head for first, stop in plan.query for head in range(first, stop)]
    assert owned == list(range(heads))
    counts = [stop - first for first, stop in plan.query]
    assert max(counts) - min(counts) <= 1
    for rank, (first, stop) in enumerate(plan.query):
        kv_first, kv_stop = plan.key_value[rank]
        read = [kv_first + own for own in plan.kv_index(rank)]
        assert read == [head // group for head in range(first, stop)]
        # Exactly what is read is sent, each head once to each peer.
        assert sorted(set(read)) == list(range(kv_first, kv_stop))


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LayoutError, match="multiple of kv_heads=4"):
        HeadPlan.create(6, 4, 2)
    with pytest.raises(LayoutError, match="at least one head"):
        HeadPlan.create(0, 1, 2)
