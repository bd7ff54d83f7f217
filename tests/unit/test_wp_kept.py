"""Which blocks stay unsharded: as many as fit the memory, where they save communication time."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from internsp.schedule.chunk import ChunkLayout, UnitLayout, WeightLayout
from internsp.schedule.simulate import simulate
from internsp.schedule.terms import BACKWARD, FORWARD, Policy, prefetch_targets, slot_sizes
from internsp.structure.kept import blocks_within, evenly_spread, extra_slot_bytes
from tools.bench.bounds import MBIT, play

SIZES = {"q": 1.0, "k": 1.0, "v": 1.0, "wo": 1.0, "w1": 8 / 3, "w3": 8 / 3, "w2": 8 / 3}
BLOCK = sum(SIZES.values())


def played(blocks: int, kept: tuple[int, ...], slowness: float, micro_batches: int) -> float:
    """Seconds of a step: a block's forward takes 1, backward 2, a collective `slowness`."""
    policy = Policy(blocks, kept=frozenset(kept))
    units = []
    for index in range(blocks):
        weights = [
            WeightLayout(f"b{index}.{p}", int(1e6 * s), int(1e6 * s), 256, 64)
            for p, s in SIZES.items()
        ]
        slot = policy.slot(index)
        units.append(UnitLayout(f"b{index}", tuple(weights), slot, index, trigger_at=3))
    schedule = simulate(ChunkLayout(policy, tuple(units), None, None, 2), micro_batches)
    seconds = {
        (phase, f"b{index}.{part}"): times * size / BLOCK
        for index in range(blocks)
        for part, size in SIZES.items()
        for phase, times in ((FORWARD, 1), (BACKWARD, 2))
    }
    lines = [(a.kind, a.phase, a.weight, a.nbytes) for a in schedule.actions]
    return play(lines, seconds, 1e6 * BLOCK / slowness / MBIT)


@pytest.mark.thorough(4)
@pytest.mark.unmeasured
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_no_choice_of_blocks_saves_much_more_time_than_an_even_spread(micro_batches: int) -> None:
    shortfall = []
    for slowness in (1.3, 2.0, 2.8):
        for count in (1, 2, 4):
            times = {
                chosen: played(8, chosen, slowness, micro_batches)
                for chosen in combinations(range(8), count)
            }
            none = played(8, (), slowness, micro_batches)
            best, ours = min(times.values()), times[evenly_spread(8, count)]
            assert ours < none
            shortfall.append((ours - best) / (none - best))
            assert ours <= times[tuple(range(8 - count, 8))], "the last blocks"
    assert max(shortfall) < 0.12
    assert sum(shortfall) / len(shortfall) < 0.05


def test_without_a_slow_link_there_is_nothing_to_save() -> None:
    assert played(8, evenly_spread(8, 3), 0.6, 1) == pytest.approx(played(8, (), 0.6, 1))


def test_the_choice_is_spread_over_all_but_the_last() -> None:
    assert [evenly_spread(8, n) for n in (0, 1, 2, 3, 4)] == [
        (), (3,), (1, 5), (1, 3, 5), (0, 2, 4, 6),
    ]  # fmt: skip
    assert evenly_spread(3, 3) == evenly_spread(3, 5) == (0, 1, 2)
    for blocks in range(1, 12):
        for count in range(blocks + 1):
            assert len(set(evenly_spread(blocks, count))) == count


@pytest.mark.thorough(1)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=9),
    depth=st.integers(0, 3),
    budget=st.integers(0, 400),
)
def test_a_budget_is_used_and_never_exceeded(sizes: list[int], depth: int, budget: int) -> None:
    chosen = blocks_within(sizes, depth, budget)
    assert extra_slot_bytes(sizes, depth, chosen) <= budget
    for more in range(len(chosen) + 1, len(sizes) + 1):
        assert extra_slot_bytes(sizes, depth, evenly_spread(len(sizes), more)) > budget


def test_the_cost_is_what_comes_on_top_of_the_shared_slots() -> None:
    assert extra_slot_bytes([5] * 6, 1, (1, 4)) == 10
    assert extra_slot_bytes([5, 5, 9, 5], 1, (2,)) == 9 - 2 * 4, "the shared slots shrink"
    assert extra_slot_bytes([5] * 4, 1, (0, 1, 2, 3)) == 10, "two slots are needed anyway"
    assert blocks_within([0, 0], 1, 100) == ()
    assert slot_sizes([5, 6, 7], 1, (1,)) == [7, 7, 6]


@given(blocks=st.integers(1, 9), depth=st.integers(1, 3), kept=st.frozensets(st.integers(0, 8)))
def test_kept_blocks_share_no_slot_and_every_slot_holds_its_blocks(
    blocks: int, depth: int, kept: frozenset[int]
) -> None:
    kept &= frozenset(range(blocks))
    sizes = [3 + i * 7 % 5 for i in range(blocks)]
    policy = Policy(blocks, depth, kept=kept)
    slots = [policy.slot(block) for block in range(blocks)]
    given_sizes = slot_sizes(sizes, depth, kept)
    assert set(slots) == set(range(len(given_sizes)))
    for block, slot in enumerate(slots):
        assert sizes[block] <= given_sizes[slot]
        if block in kept:
            assert slots.count(slot) == 1
            assert sizes[block] == given_sizes[slot]


def test_a_long_run_of_kept_blocks_is_not_gathered_at_once() -> None:
    assert prefetch_targets(range(1, 9), 1, frozenset(range(9))) == [1]
    assert prefetch_targets(range(1, 9), 2, frozenset(range(3, 9))) == [1, 2]
    assert prefetch_targets(range(1, 9), 2, frozenset({1, 3, 4})) == [1, 2, 3]
