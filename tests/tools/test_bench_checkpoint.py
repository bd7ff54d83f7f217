"""Figures of ``tools.bench_checkpoint``."""

from __future__ import annotations

import pytest

from tools.bench_checkpoint import Pairs, interval


@pytest.mark.parametrize(
    ("count", "places"), [(3, (0, 2)), (6, (0, 5)), (10, (1, 8)), (15, (3, 11)), (25, (7, 17))]
)
def test_a_medians_interval_is_that_of_the_tables(count: int, places: tuple[int, int]) -> None:
    assert interval(count) == places


def test_a_ratio_is_of_pairs_and_no_outlier_moves_it() -> None:
    line = Pairs([0.010, 0.030, 9.0, 0.020, 0.010, 0.010], [0.010, 0.020, 0.010, 0.020, 0.010, 0.1])
    assert line.line("clock") == (
        "clock: training stops for 15.0 ms, the copy alone takes 15.0 ms; of 6 pairs the median is "
        "1.000 of it (95 %: 0.100 to 900.000)"
    )
