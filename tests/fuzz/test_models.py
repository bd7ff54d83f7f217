"""Drawn models, meshes, options and loops give what one process gives, or one of our refusals.

By hand, for any length: ``python -m tests.fuzz.models --help``.
"""

from __future__ import annotations

import pytest

from tests.fuzz.draw import draw, fitted, simpler
from tests.fuzz.faults import FAULTS
from tests.fuzz.models import tell
from tests.fuzz.runner import MEANINGLESS, RIGHT, run

SEED = 0
CASES = {2: 70, 3: 32, 4: 20}  # some twenty-five seconds each on two quiet cores


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("world", CASES, ids=lambda world: f"world{world}")
def test_drawn_models_train_as_on_one_process(world: int) -> None:
    results = list(run([draw(SEED, n, world) for n in range(CASES[world])]))
    assert len(results) == CASES[world]
    failed = [(n, result) for n, result in enumerate(results) if result.failed]
    texts = [
        tell(SEED, n, result, 0.0 if i else 20.0, world=world)
        for i, (n, result) in enumerate(failed)
    ]
    assert not failed, "\n".join(texts)
    kinds = [result.kind for result in results]
    assert kinds.count(MEANINGLESS) < len(kinds) / 10, "too few of the drawn cases say anything"
    assert kinds.count(RIGHT) > len(kinds) / 2, "most of what is drawn is supported"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["scaled_gradient", "skipped_regather", "stale_reuse"])
def test_a_fault_that_is_put_in_is_found(fault: str) -> None:
    results = list(run([draw(SEED, n, 2) for n in range(30)], fault, first=True))
    assert results[-1].failed, f"{len(results)} cases and {fault} was not seen"
    assert FAULTS[fault].__doc__


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
