from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, ranks, run_ranks

pytestmark = pytest.mark.ranks


def sum_over_ranks(rank: int, world_size: int, factor: int) -> tuple[int, torch.Tensor, int]:
    total = torch.tensor([float(factor * (rank + 1))], dtype=torch.float64)
    dist.all_reduce(total)
    return rank, total, torch.get_num_threads()


def fail_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the weight of rank one is missing")
    dist.barrier()


def hang_on_rank_one(rank: int, world_size: int) -> int:
    if rank == 1:
        sleep_where_it_hangs()
    return rank


def sleep_where_it_hangs() -> None:
    time.sleep(100)


def die_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        import os

        os._exit(7)
    dist.barrier()


def unpicklable(rank: int, world_size: int) -> Any:
    return lambda: rank


def test_values_come_back_by_rank_and_ranks_really_talk() -> None:
    results = run_ranks(sum_over_ranks, 3, 10)
    assert [rank for rank, _, _ in results] == [0, 1, 2]
    assert [total.item() for _, total, _ in results] == [60.0] * 3
    assert [threads for _, _, threads in results] == [1, 1, 1]


def test_a_failing_rank_is_named_with_its_traceback_and_the_others_are_not_waited_for() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2 failed") as caught:
        run_ranks(fail_on_rank_one, 2)
    assert "the weight of rank one is missing" in str(caught.value)
    assert "in fail_on_rank_one" in str(caught.value)
    assert time.monotonic() - start < 10


def test_a_timeout_names_the_ranks_still_alive_and_shows_where_they_are() -> None:
    with pytest.raises(RankError, match=r"ranks \[1\] of 2 were still alive") as caught:
        run_ranks(hang_on_rank_one, 2, timeout=2)
    assert "in sleep_where_it_hangs" in str(caught.value)


def test_a_rank_that_dies_is_told_by_its_exit_code() -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code 7"):
        run_ranks(die_on_rank_one, 2)


def test_a_value_that_cannot_come_back_is_an_error_not_a_hang() -> None:
    with pytest.raises(RankError, match="pickle"):
        run_ranks(unpicklable, 1)


@pytest.mark.parametrize(("world_size", "factor"), [(1, 2), (3, 5)])
@ranks()
def test_a_tests_body_runs_on_all_ranks_with_its_parameters(
    rank: int, world_size: int, factor: int, tmp_path: Path
) -> None:
    assert dist.get_world_size() == world_size
    assert sum_over_ranks(rank, world_size, factor)[1] == factor * sum(range(1, world_size + 1))
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert {path.name for path in tmp_path.iterdir()} == {str(r) for r in range(world_size)}


# Run by the tests below: pytest itself does not collect what is not named `test_...`.
@ranks(2)
def wrong_on_rank_one(rank: int, world_size: int, offset: int) -> None:
    assert rank + offset < world_size, "one too many"


@ranks(1)
def checks_nothing() -> None:
    return dist.get_world_size() == 1  # type: ignore[return-value]


def test_a_body_that_fails_on_one_rank_fails_the_test_with_that_ranks_traceback() -> None:
    assert list(inspect.signature(wrong_on_rank_one).parameters) == ["offset"]
    wrong_on_rank_one(offset=0)
    with pytest.raises(RankError, match="rank 1 of 2 failed") as caught:
        wrong_on_rank_one(offset=1)
    assert "one too many" in str(caught.value)
    assert "in wrong_on_rank_one" in str(caught.value)


def test_a_body_that_returns_what_it_should_have_checked_is_refused() -> None:
    with pytest.raises(RankError, match="returned True"):
        checks_nothing()
