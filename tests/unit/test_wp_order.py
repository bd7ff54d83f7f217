"""WP-2, without a process group: all ranks launch in one order, whatever their data leave idle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from internsp.wp.idle import Data
from internsp.wp.schedule import ChunkPlan
from internsp.wp.simulate import simulate
from internsp.wp.turns import Turns
from tests.unit.test_wp_schedule import PARTS, chunk, chunks

LAUNCHES = ("AG", "RS", "A2A")
USES = st.dictionaries(
    st.tuples(st.integers(0, 6), st.sampled_from(PARTS)), st.integers(0, 2), max_size=12
)


def named(uses: dict[tuple[int, str], int]) -> dict[str, int]:
    return {f"b{block}.{part}": count for (block, part), count in uses.items()}


@st.composite
def data(draw: st.DrawFn, exchanges: tuple[int, ...] = ()) -> Data:
    """What one rank's data leave idle. With exchanges no rank passes a block over: it has them."""
    skipped = st.frozensets(st.integers(0, 6), max_size=0 if exchanges else 5)
    return Data(
        uses=named(draw(USES)),
        most=named(draw(USES)),
        silent=frozenset() if exchanges else draw(st.frozensets(st.integers(0, 6))),
        skipped=draw(skipped),
        top=draw(st.booleans()),
        exchanges=exchanges,
    )


def launches(plan: ChunkPlan, overlap: bool, rank: list[Data]) -> list[str]:
    """What a rank launches in a step of several micro-batches, over all groups."""
    return simulate(plan, len(rank), overlap, rank).lines(LAUNCHES)


@settings(max_examples=40)
@given(plan=chunks, ranks=st.lists(st.lists(data(), min_size=2, max_size=2), min_size=2,
                                   max_size=3), overlap=st.booleans())  # fmt: skip
def test_all_ranks_launch_gathers_and_reductions_in_one_order_whatever_is_idle(
    plan: ChunkPlan, ranks: list[list[Data]], overlap: bool
) -> None:
    first = launches(plan, overlap, ranks[0])
    assert any(line.startswith("RS") for line in first)
    for other in ranks[1:]:
        assert launches(plan, overlap, other) == first


@settings(max_examples=40)
@given(plan=chunks, positions=st.sets(st.integers(0, 3), min_size=1), source=st.data())
def test_with_exchanges_in_the_blocks_one_order_holds_over_all_groups(
    plan: ChunkPlan, positions: set[int], source: st.DataObject
) -> None:
    plan = replace(plan, policy=replace(plan.policy, one_order=True))
    one, other = ([source.draw(data(tuple(positions)))] for _ in range(2))
    found = launches(plan, False, one)
    assert any(line.startswith("A2A") for line in found)
    assert launches(plan, False, other) == found


@settings(max_examples=40)
@given(plan=chunks, positions=st.sets(st.integers(0, 3), min_size=1), source=st.data())
def test_where_exchanges_need_no_order_of_all_groups_each_group_keeps_its_own(
    plan: ChunkPlan, positions: set[int], source: st.DataObject
) -> None:
    one, other = ([source.draw(data(tuple(positions)))] for _ in range(2))
    for kind in LAUNCHES:
        found = [simulate(plan, 1, True, rank).lines([kind]) for rank in (one, other)]
        assert found[0] == found[1]


@pytest.mark.parametrize("how", [{}, {"per_module": True}, {"rolling": True}])
def test_without_that_order_an_idle_weight_does_change_what_comes_first(how: Any) -> None:
    """So that the property above is not true of everything."""
    plan = chunk(2, **how)
    idle = Data(uses={"b1.w2": 0}, exchanges=(1,))
    one, other = (launches(plan, True, [d]) for d in (idle, Data(exchanges=(1,))))
    assert one != other
    assert sorted(one) == sorted(other)


@settings(max_examples=40)
@given(
    order=st.lists(st.integers(0, 5), unique=True),
    births=st.lists(st.integers(0, 5), max_size=12),
    at_close=st.booleans(),
)
def test_each_weight_has_one_turn_in_order_with_all_its_gradients(
    order: list[int], births: list[int], at_close: bool
) -> None:
    births = [weight for weight in births if weight in order]
    turns = Turns[int, int](order, lambda w: max(births.count(w), 1), int.__add__, at_close)
    found: list[tuple[int, int | None]] = []
    for weight in births:
        found += turns.ready(weight, 1)
        assert not (at_close and found)
    found += turns.close()
    assert found == [(w, births.count(w) or None) for w in order]
