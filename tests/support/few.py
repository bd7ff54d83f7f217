"""Few cases of many: what ``make test`` runs of a product or a list, and what is thorough.

A test of ranks takes a second of processor time for each case. Each value of each axis is enough to
find a fault of that value; faults of a pair are found by the covering sets of the parity tests,
by drawn programs, and by ``make thorough``, which runs the rest.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest


def each_value(rows: Sequence[Sequence[Hashable]]) -> set[int]:
    """Numbers of a few rows in which every value of every axis occurs; always the same ones."""
    left = {(axis, value) for row in rows for axis, value in enumerate(row)}
    found: set[int] = set()
    while left:
        best = max(
            (n for n in range(len(rows)) if n not in found),
            key=lambda n: (len(left & set(enumerate(rows[n]))), -n),
        )
        left -= set(enumerate(rows[best]))
        found.add(best)
    return found


def parted(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
    """A few of a covering set's rows in which every value of every axis occurs, and the others."""
    kept = each_value([tuple(row.values()) for row in rows])
    chosen, others = (
        [row for n, row in enumerate(rows) if (n in kept) is some] for some in (True, False)
    )
    return chosen, others


def products(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of tests with several ``parametrize``: those that repeat each value of all others."""
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_test.setdefault(item.nodeid.split("[")[0], []).append(item)
    return [
        item
        for cases in by_test.values()
        if len(list(cases[0].iter_markers("parametrize"))) > 1
        for kept in [each_value([_values(item) for item in cases])]
        for n, item in enumerate(cases)
        if n not in kept
    ]


def _values(item: pytest.Item) -> list[Hashable]:
    """Of each ``parametrize``, which row a test has: the objects that it gives, by identity."""
    params: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]
    axes = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(",", " ").split() if isinstance(names, str) else names
        axes.append(tuple(id(params[name]) for name in names))
    return axes


def few(name: str, cases: Sequence[Any], number: int, seconds: float = 10) -> pytest.MarkDecorator:
    """Give a test ``number`` of ``cases``, evenly spread; those between are one thorough test.

    Args:
        name: the test's parameter: a list of cases.
        seconds: about how long the thorough test takes.
    """
    chosen = {round(n * len(cases) / number) for n in range(number)}
    parts = [[c for n, c in enumerate(cases) if (n in chosen) is some] for some in (True, False)]
    return pytest.mark.parametrize(
        name,
        [
            pytest.param(parts[0], id="few"),
            pytest.param(parts[1], id="others", marks=pytest.mark.thorough(seconds)),
        ],
    )


def some(rows: Iterable[Any], number: int, seconds: float = 5) -> list[Any]:
    """Rows for ``parametrize``: ``number`` of them, evenly spread, as they are; others thorough.

    Args:
        rows: values of one parameter, or tuples of several.
    """
    listed = list(rows)
    chosen = {round(n * len(listed) / number) for n in range(number)}
    mark = pytest.mark.thorough(seconds)
    return [
        row if n in chosen
        else pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=mark)
        for n, row in enumerate(listed)
    ]  # fmt: skip
