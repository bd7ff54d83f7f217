"""Random models, meshes, options and loops give one process's results, or one of our refusals.

On the command line, for any number of cases: ``python -m tests.fuzz.models --help``.
"""

from __future__ import annotations

import pytest

from tests.fuzz.draw import draw, fitted, simpler
from tests.fuzz.faults import FAULTS
from tests.fuzz.models import tell
from tests.fuzz.runner import MEANINGLESS, RIGHT, run
from tests.fuzz.sample import SHAPES, sample

SEED = 0
NUMBERS = sample(SEED)  # about a minute on two cores


@pytest.mark.ranks
@pytest.mark.slow(10)
@pytest.mark.parametrize("world", sorted(NUMBERS), ids=lambda world: f"world{world}")
def test_drawn_models_train_as_on_one_process(world: int) -> None:
    numbers = NUMBERS[world]
    results = list(run([draw(SEED, n, world) for n in numbers]))
    assert len(results) == len(numbers)
    pairs = zip(numbers, results, strict=True)
    failed = [(n, result) for n, result in pairs if result.failed]
    texts = [
        tell(SEED, n, result, 0.0 if i else 20.0, world=world)
        for i, (n, result) in enumerate(failed)
    ]
    assert not failed, "\n".join(texts)
    kinds = [result.kind for result in results]
    assert kinds.count(MEANINGLESS) <= len(kinds) / 7, "too few of the drawn cases say anything"
    assert kinds.count(RIGHT) >= len(kinds) / 2, "half of what is drawn is supported, or more"


@pytest.mark.ranks
@pytest.mark.slow(2)
@pytest.mark.parametrize("fault", ["scaled_gradient", "skipped_regather", "stale_reuse"])
def test_a_fault_that_is_put_in_is_found(fault: str) -> None:
    results = list(run([draw(SEED, n, 2) for n in range(30)], fault, first=True))
    assert results[-1].failed, f"{len(results)} cases and {fault} was not seen"
    assert FAULTS[fault].__doc__


def test_every_shape_is_drawn_and_all_worlds() -> None:
    cases = [draw(SEED, n, world) for world, numbers in NUMBERS.items() for n in numbers]
    assert set().union(*(case.features() for case in cases)) >= SHAPES
    assert {case.world for case in cases} == {2, 3, 4}


def test_a_case_is_the_same_whatever_was_drawn_before() -> None:
    assert draw(SEED, 7) == draw(SEED, 7)
    assert draw(SEED, 7) != draw(SEED, 8)
    assert draw(SEED, 7, world=3).world == 3


def test_what_is_simpler_is_another_case_that_means_something() -> None:
    for number in range(20):
        case = draw(SEED, number)
        for less in simpler(case):
            assert less != case
            assert fitted(less) == less
