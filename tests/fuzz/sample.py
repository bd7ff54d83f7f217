"""Few draws that together have everything that is drawn: what the tests run of the fuzzer."""

from __future__ import annotations

import collections

from tests.fuzz.draw import Case, draw
from tests.fuzz.shapes import BASES, BESIDE, IN_BLOCK, OUTPUTS

SHAPES = {*BASES, *BESIDE, *IN_BLOCK, *(f"output={output}" for output in OUTPUTS)}
FIRST = {3: 5, 4: 4}  # draws of the larger worlds, from the first on
POOL = 150  # draws of two ranks, which take the least time, to choose from


def sample(seed: int) -> dict[int, list[int]]:
    """Numbers of draws by world: of two ranks those that add most to what is there already.

    Every shape of models and every other feature (option, optimizer, operation of the loop, way to
    skip a reduction, ...) occurs at least once.
    """
    found = {world: list(range(count)) for world, count in FIRST.items()}
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
