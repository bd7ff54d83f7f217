"""A launcher's environment: missing or invalid variables are reported before torch is loaded."""

from __future__ import annotations

import pytest

from internsp.app.process.environment import launched

WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "29400"}


def test_a_whole_environment_and_none_at_all_are_right() -> None:
    around = launched(WHOLE | {"LOCAL_RANK": "1"}, joins=True)
    assert (around.rank, around.world_size, around.problems) == (1, 4, ())
    alone = launched({}, joins=True)
    assert (alone.rank, alone.world_size, alone.problems) == (None, None, ())


def test_a_plan_takes_the_number_of_ranks_alone() -> None:
    around = launched({"WORLD_SIZE": "512"}, joins=False)
    assert (around.rank, around.world_size, around.problems) == (None, 512, ())


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "0"}, "RANK: is set and WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not: start"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE: is set and RANK is not: start with torchrun"),
        (WHOLE | {"WORLD_SIZE": "abc"},
         'WORLD_SIZE: expected a whole number from 1 to 1048576 in the environment, got "abc"'),
        (WHOLE | {"WORLD_SIZE": ""}, "WORLD_SIZE: expected a whole number"),
        (WHOLE | {"WORLD_SIZE": "0"}, "WORLD_SIZE: expected a whole number"),
        (WHOLE | {"RANK": "-1"}, "RANK: expected a whole number from 0"),
        (WHOLE | {"RANK": "²"}, "RANK: expected a whole number from 0"),
        (WHOLE | {"RANK": "9" * 5000}, "RANK: expected a whole number from 0"),
        (WHOLE | {"RANK": "4"}, "RANK: 4 is not one of the WORLD_SIZE = 4 ranks"),
        (WHOLE | {"LOCAL_RANK": "one"}, "LOCAL_RANK: expected a whole number"),
        (WHOLE | {"LOCAL_WORLD_SIZE": "all"}, "LOCAL_WORLD_SIZE: expected a whole number from 1"),
        (WHOLE | {"MASTER_PORT": "70000"}, "MASTER_PORT: expected a whole number from 1 to 65535"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_line_with_the_remedy(environment: dict, expected: str) -> None:
    (problem,) = launched(environment, joins=True).problems
    assert str(problem).startswith(expected)
    assert "torchrun" in str(problem) or "counted from 0" in str(problem)
    assert len(str(problem)) < 300
