"""Covering sets: a few combinations in which every pair of option values occurs together."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any

Combination = dict[str, Any]
Pair = tuple[str, Any, str, Any]


def all_pairs(
    options: Mapping[str, Sequence[Any]], possible: Callable[[Combination], bool]
) -> set[Pair]:
    """Every pair of values of two options that some possible combination holds."""
    found: set[Pair] = set()
    for a, b in combinations(options, 2):
        for x, y in product(options[a], options[b]):
            if possible({a: x, b: y}):
                found.add((a, x, b, y))
    return found


def pairs_of(combination: Combination) -> set[Pair]:
    """The pairs that ``combination`` covers."""
    return {(a, combination[a], b, combination[b]) for a, b in combinations(combination, 2)}


def covering(
    options: Mapping[str, Sequence[Any]],
    possible: Callable[[Combination], bool] = lambda _: True,
    seed: int = 0,
    tries: int = 5,
    cost: Callable[[Combination], float] = lambda _: 1.0,
    given: Iterable[Combination] = (),
) -> list[Combination]:
    """A small list of combinations that covers every possible pair; deterministic.

    Greedy: a combination grows from an uncovered pair, option by option in a random order, by the
    value that covers most; of ``tries`` such, the one that covers most for its cost is taken.

    Args:
        possible: whether a combination, perhaps of some options only, may occur.
        cost: the work that a combination takes, in any unit.
        given: values of some options that must occur together, each in a separate combination,
            regardless of the pairs that it covers.
    """
    generator = random.Random(seed)
    left = all_pairs(options, possible)
    chosen: list[Combination] = []

    def grown(fixed: Combination) -> Combination | None:
        made = dict(fixed)
        for name in generator.sample(list(options), len(options)):
            values = generator.sample(list(options[name]), len(options[name]))
            able = [value for value in values if possible({**made, name: value})]
            if name not in made:
                if not able:
                    return None
                made[name] = max(able, key=partial(covered, made, name))
        return {name: made[name] for name in options}

    def covered(made: Combination, name: str, value: Any) -> int:
        return sum(
            (other, known, name, value) in left or (name, value, other, known) in left
            for other, known in made.items()
        )

    def choose(fixed: Combination, tries: int) -> None:
        candidates = [made for _ in range(tries) if (made := grown(fixed)) is not None]
        if not candidates:
            raise ValueError(f"no possible combination holds {fixed}")
        best = max(candidates, key=lambda c: len(pairs_of(c) & left) / cost(c))
        chosen.append(best)
        left.difference_update(pairs_of(best))

    for fixed in given:
        choose(fixed, tries if left else 1)
    while left:
        a, x, b, y = sorted(left, key=repr)[0]
        choose({a: x, b: y}, tries)
    return chosen
