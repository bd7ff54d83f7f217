"""In any combination, loss and every gradient equal those of one process: 1e-10 in fp64.

All pairs of: ranks that share heads, a ring, which of them are near, grouped heads, documents, a
window, odd lengths, checkpointing, offload, tiles, a pipeline; weights are always sharded. Further
random rows run with the marker ``thorough``.
"""

from __future__ import annotations

import random

import pytest

from tests.support import matrix
from tests.support.covering import Row, covering, pairs, rows_of
from tests.support.matrix import AXES, legal, world_of
from tests.support.ranks import run_ranks

EVERY = rows_of(AXES, legal)
ROWS = covering(AXES, legal, cost=lambda row: world_of(row) ** 1.3, seed=1)


def test_every_pair_that_can_be_is_a_row() -> None:
    assert set().union(*map(pairs, ROWS)) == set().union(*map(pairs, EVERY))
    assert all(legal(row) for row in ROWS)
    counts = [sum(world_of(row) == world for row in ROWS) for world in (2, 4, 8)]
    assert sum(counts) == len(ROWS)
    assert all(count <= 12 for count in counts)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4, 8])
def test_all_pairs_equal_one_process(world: int) -> None:
    """Ranks run several rows, one after another."""
    rows = [row for row in ROWS if world_of(row) == world]
    assert run_ranks(matrix.compare, world, rows) == [[]] * world


@pytest.mark.ranks
@pytest.mark.parametrize("fault", matrix.FAULTS)
def test_a_fault_that_others_had_is_caught_by_the_row_that_is_meant_for_it(fault: str) -> None:
    """A deliberate mistake. For tiles by a rank's own length see ``test_tiles``."""
    found = run_ranks(matrix.faulty, 2, fault)
    assert [right for right, _ in found] == [[], []]
    names = [name for _, wrong in found for name in wrong]
    assert [name for name in names if name != "loss"], f"{fault} went unnoticed"


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world", [2, 4, 8])
def test_random_rows_equal_one_process(world: int, seed: int) -> None:
    rows = [row for row in EVERY if world_of(row) == world]
    drawn: list[Row] = random.Random(seed).sample(rows, 6)
    assert run_ranks(matrix.compare, world, drawn) == [[]] * world
