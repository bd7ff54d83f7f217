"""A few draws that together contain every feature: the fuzzer's part in the tests."""

from __future__ import annotations

import collections
import itertools

from tests.fuzz.draw import Case, draw
from tests.fuzz.shapes import BASES, BESIDE, IN_BLOCK, OUTPUTS

SHAPES = {*BASES, *BESIDE, *IN_BLOCK, *(f"output={output}" for output in OUTPUTS)}
FIRST = {3: 3, 4: 2}  # the first draws of the larger world sizes; and one on two machines
POOL = 150  # candidate draws with two ranks, which are the fastest


def sample(seed: int) -> dict[int, list[int]]:
    """Numbers of draws by world size; with two ranks those that add most new features.

    Every shape of models and every other feature (option, optimizer, operation of the loop, way to
    skip a reduction, ...) occurs at least once.
    """
    found = {world: list(range(count)) for world, count in FIRST.items()}
    found[4].append(next(n for n in itertools.count(FIRST[4]) if draw(seed, n, 4).machine))
    pool = {number: _features(draw(seed, number, 2)) for number in range(POOL)}
    there = collections.Counter(
        word
        for world, numbers in found.items()
        for number in numbers
        for word in _features(draw(seed, number, world))
    )
    drawn = collections.Counter(word for words in pool.values() for word in words)
    missing = {word: 1 - there[word] for word in drawn}
    found[2] = []
    while any(count > 0 for count in missing.values()):
        best = max(pool, key=lambda number: sum(missing[word] > 0 for word in pool[number]))
        found[2].append(best)
        for word in pool.pop(best):
            missing[word] -= 1
    return found


def _features(case: Case) -> set[str]:
    return case.features() - {""}
