"""Covering arrays: every possible pair, and nothing else."""

from __future__ import annotations

from tests.support.covering import covering, pairs, rows_of

AXES = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (False, True), "d": ("x", "y", "z")}


def legal(row: dict) -> bool:
    return row["a"] * row["b"] <= 6 and not (row["c"] and row["d"] == "x")


def test_every_pair_of_a_legal_row_is_covered_by_legal_rows_and_by_few() -> None:
    found = covering(AXES, legal, cost=lambda row: row["a"])
    assert all(legal(row) for row in found)
    every = rows_of(AXES, legal)
    assert set().union(*map(pairs, found)) == set().union(*map(pairs, every))
    assert len(found) <= 12 < len(every)
    assert found == covering(AXES, legal, cost=lambda row: row["a"])


def test_a_pair_that_no_legal_row_has_is_not_asked_for() -> None:
    found = covering(AXES, lambda row: legal(row) and row["a"] != 3, cost=lambda row: 1)
    assert {row["a"] for row in found} == {1, 2}
