"""Rows of values in which every possible pair of values of two axes occurs. Pure functions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

_TRIED = 400  # candidate rows, of which the best is taken


def pairs(row: Mapping[str, Any]) -> set[Pair]:
    """All pairs of axes with their values."""
    return set(itertools.combinations(row.items(), 2))


def rows_of(axes: Mapping[str, Sequence[Any]], legal: Callable[[Row], bool]) -> list[Row]:
    """Every legal row."""
    made = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [row for row in made if legal(row)]


def covering(
    axes: Mapping[str, Sequence[Any]],
    legal: Callable[[Row], bool],
    cost: Callable[[Row], float],
    seed: int = 0,
) -> list[Row]:
    """A few legal rows with every pair that occurs in a legal row; deterministic for a seed.

    Args:
        axes: values (hashable) by axis.
        cost: of a row; the rows with most new pairs for their cost are taken.
    """
    every = rows_of(axes, legal)
    places: dict[Pair, int] = {}
    masks = [_mask(row, places) for row in every]
    source = random.Random(seed)
    missing = 0
    for mask in masks:
        missing |= mask
    found: list[Row] = []
    while missing:
        wanted = missing & -missing  # an uncovered pair; the best row with it is taken
        tried = [n for n, mask in enumerate(masks) if mask & wanted]
        tried = source.sample(tried, min(_TRIED, len(tried)))
        best = max(tried, key=lambda n: (masks[n] & missing).bit_count() / cost(every[n]))
        missing &= ~masks[best]
        found.append(every[best])
    return found


def _mask(row: Row, places: dict[Pair, int]) -> int:
    """The pairs of a row as bits of an integer; each pair has its own bit."""
    found = 0
    for pair in itertools.combinations(row.items(), 2):
        found |= 1 << places.setdefault(pair, len(places))
    return found
