"""WP-2, without a process group: all ranks launch in one order, whatever parameters are unused."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from internsp.schedule.chunk import ChunkLayout, UnitLayout, WeightLayout
from internsp.schedule.learned import slots_for_order, with_run_order
from internsp.schedule.queue import GatherQueue
from internsp.schedule.simulate import BatchUsage, simulate
from internsp.schedule.terms import FORWARD, Action, Policy
from tests.unit.test_wp_schedule import PARTS, chunk, chunks

LAUNCHES = ("AG", "RS", "A2A")
USES = st.dictionaries(
    st.tuples(st.integers(0, 6), st.sampled_from(PARTS)), st.integers(0, 2), max_size=12
)


def named(uses: dict[tuple[int, str], int]) -> dict[str, int]:
    return {f"b{block}.{part}": count for (block, part), count in uses.items()}


@st.composite
def data(draw: st.DrawFn, exchanges: tuple[int, ...] = ()) -> BatchUsage:
    """Unused parameters of one rank. With token exchanges no rank skips a block."""
    skipped = st.frozensets(st.integers(0, 6), max_size=0 if exchanges else 5)
    return BatchUsage(
        uses=named(draw(USES)),
        earlier_uses=named(draw(USES)),
        without_trigger=frozenset() if exchanges else draw(st.frozensets(st.integers(0, 6))),
        without_gradient=draw(skipped),
        head_gradient=draw(st.booleans()),
        exchanges=exchanges,
    )


def launches(
    plan: ChunkLayout, overlap: bool, rank: list[BatchUsage], summed_losses: bool = False
) -> list[str]:
    """What a rank launches in a step of several micro-batches, over all groups."""
    return simulate(plan, len(rank), overlap, rank, summed_losses).lines(LAUNCHES)


@settings(max_examples=40)
@given(plan=chunks, ranks=st.lists(st.lists(data(), min_size=2, max_size=2), min_size=2,
                                   max_size=3), overlap=st.booleans(),
       summed_losses=st.booleans())  # fmt: skip
def test_all_ranks_launch_gathers_and_reductions_in_one_order_whatever_is_idle(
    plan: ChunkLayout, ranks: list[list[BatchUsage]], overlap: bool, summed_losses: bool
) -> None:
    first = launches(plan, overlap, ranks[0], summed_losses)
    assert any(line.startswith("RS") for line in first)
    for other in ranks[1:]:
        assert launches(plan, overlap, other, summed_losses) == first


@settings(max_examples=25)
@given(plan=chunks, ranks=st.lists(st.lists(data(), min_size=2, max_size=2), min_size=2,
                                   max_size=2), source=st.data())  # fmt: skip
def test_so_they_do_in_a_learned_order_in_which_blocks_recur_or_are_missing(
    plan: ChunkLayout, ranks: list[list[BatchUsage]], source: st.DataObject
) -> None:
    drawn = source.draw(st.lists(st.sampled_from(range(len(plan.blocks))), min_size=1, max_size=9))
    order = [block for block, _ in groupby(drawn)]
    learned = with_run_order(plan, order)
    first = launches(learned, True, ranks[0])
    for other in ranks[1:]:
        assert launches(learned, True, other) == first
    names = {line.split()[2].split(".")[0] for line in first}
    assert names <= {"embed", "other", "head", *(f"b{block}" for block in order)}


@settings(max_examples=40)
@given(blocks=st.integers(1, 7), depth=st.integers(0, 3), source=st.data())
def test_blocks_that_come_one_after_another_in_a_learned_order_have_different_slots(
    blocks: int, depth: int, source: st.DataObject
) -> None:
    kept = source.draw(st.frozensets(st.integers(0, blocks - 1)))
    policy = Policy(blocks, depth, kept=kept)
    order = source.draw(st.lists(st.integers(0, blocks - 1), unique=True))
    slots = slots_for_order(order, policy)
    moving = [slots[block] for block in order if block not in kept]
    for at in range(len(moving)):
        near = moving[at : at + depth + 1]
        assert len(set(near)) == len(near)
    assert all(slots[block] == policy.slot(block) for block in kept)
    assert not moving or max(moving) < policy.slots - len(kept)


@pytest.mark.parametrize("how", [
    {}, {"per_module": True}, {"rolling": True}, {"depth": 2}, {"depth": 0},
    {"depth": 0, "rolling": True},
])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_backward_through_two_forwards_is_one_order_whichever_of_them_leave_what_idle(
    blocks: int, how: Any
) -> None:
    plan = chunk(blocks, **how)
    usual = launches(plan, False, [BatchUsage(), BatchUsage()], True)
    idle = BatchUsage(
        uses={"b0.q": 0, "b0.w2": 0}, without_gradient=frozenset({blocks - 1}), head_gradient=False
    )
    for data in ([idle, BatchUsage()], [BatchUsage(), idle], [idle, idle]):
        assert launches(plan, False, data, True) == usual
    assert usual.count("RS backward head.w") == usual.count("RS backward b0.q") == 2


@settings(max_examples=40)
@given(plan=chunks, positions=st.sets(st.integers(0, 3), min_size=1), source=st.data())
def test_with_exchanges_in_the_blocks_one_order_holds_over_all_groups(
    plan: ChunkLayout, positions: set[int], source: st.DataObject
) -> None:
    plan = replace(plan, policy=replace(plan.policy, one_order=True))
    one, other = ([source.draw(data(tuple(positions)))] for _ in range(2))
    found = launches(plan, False, one)
    assert any(line.startswith("A2A") for line in found)
    assert launches(plan, False, other) == found


@settings(max_examples=40)
@given(plan=chunks, positions=st.sets(st.integers(0, 3), min_size=1), source=st.data())
def test_where_exchanges_need_no_order_of_all_groups_each_group_keeps_its_own(
    plan: ChunkLayout, positions: set[int], source: st.DataObject
) -> None:
    one, other = ([source.draw(data(tuple(positions)))] for _ in range(2))
    for kind in LAUNCHES:
        found = [simulate(plan, 1, True, rank).lines([kind]) for rank in (one, other)]
        assert found[0] == found[1]


@pytest.mark.parametrize("how", [{}, {"per_module": True}, {"rolling": True}])
def test_without_that_order_an_idle_weight_does_change_what_comes_first(how: Any) -> None:
    """Shows that the property above is not trivially true."""
    plan = chunk(2, **how)
    idle = BatchUsage(uses={"b1.w2": 0}, exchanges=(1,))
    one, other = (launches(plan, True, [d]) for d in (idle, BatchUsage(exchanges=(1,))))
    assert one != other
    assert sorted(one) == sorted(other)


@settings(max_examples=40)
@given(
    order=st.lists(st.integers(0, 5), unique=True),
    readied=st.lists(st.integers(0, 5), max_size=12),
    at_close=st.booleans(),
)
def test_each_weight_has_one_turn_in_order_with_all_its_gradients(
    order: list[int], readied: list[int], at_close: bool
) -> None:
    """As many as the forward has used it, or those ready when the block's backward is over."""
    weights = {n: WeightLayout(f"w{n}", 0, 20, 0, 64, needs_gather=False) for n in order}
    block = UnitLayout("b0", tuple(weights.values()), 0, 0)
    policy = Policy(1, one_order=at_close)
    queue = GatherQueue[WeightLayout](policy, [block], limit=10**6)
    ready = [weights[number] for number in readied if number in weights]
    queue.root_pre_forward(False)
    queue.pre_forward(block)
    for weight in ready:
        queue.use(block, weight, FORWARD)
    queue.post_forward(block)
    queue.backward.root_pre_backward()
    queue.backward.pre_backward(block, all_ranks=True)
    found: list[str] = []
    seen: list[WeightLayout] = []
    for weight in ready:
        seen.append(weight)
        for reduced in reduced_by(queue.backward.grad_ready(block, weight)):
            found.append(reduced.name)
            assert not at_close
            assert seen.count(reduced) == ready.count(reduced), "all its gradients"
    rest = reduced_by(queue.backward.root_post_backward(all_ranks=True))
    found += [reduced.name for reduced in rest]
    assert found == [weight.name for weight in reversed(weights.values())]


def reduced_by(actions: list[Action[WeightLayout]]) -> list[WeightLayout]:
    """The weights whose reductions ``actions`` launch."""
    return [weight for action in actions if action.kind == "RS" for weight in action.weights]


def test_after_a_failure_no_turn_is_left() -> None:
    """A gradient of the failed backward would count in the next one."""
    weight = WeightLayout("w", 0, 20, 0, 64, needs_gather=False)
    block = UnitLayout("b0", (weight,), 0, 0)
    queue = GatherQueue[WeightLayout](Policy(1), [block], limit=10**6)
    queue.root_pre_forward(False)
    queue.pre_forward(block)
    queue.use(block, weight, FORWARD)
    queue.post_forward(block)
    queue.backward.root_pre_backward()
    queue.backward.pre_backward(block, all_ranks=True)
    assert queue.backward.turns.due == {weight}
    queue.reset()
    assert queue.backward.turns.due == set()
    assert queue.backward.turns.take() == []
