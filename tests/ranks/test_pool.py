"""Ranks that stay: one body after another in the same processes, until one leaves something."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import compare
from tests.support.few import each_value
from tests.support.ranks import KEPT, RankError, run_ranks


def seen(rank: int, world_size: int) -> tuple[int, Any]:
    """The process, and what a body draws and sums in it."""
    total = torch.rand(1, dtype=torch.float64) + random.random() + len(os.environ)
    dist.all_reduce(total)
    os.environ["LEFT"] = "by a body"
    torch.set_default_dtype(torch.float64)
    return os.getpid(), total.item()


def replacing(rank: int, world_size: int) -> int:
    compare.close = print  # type: ignore[assignment]
    return os.getpid()


def failing(rank: int, world_size: int) -> None:
    raise ValueError("as it should")


def test_a_body_finds_the_same_state_in_any_process() -> None:
    KEPT.drop(2)
    first, again = run_ranks(seen, 2), run_ranks(seen, 2)
    assert again == first
    fresh = run_ranks(seen, 2, fresh=True)
    assert [total for _, total in fresh] == [total for _, total in first]
    assert {pid for pid, _ in fresh}.isdisjoint(pid for pid, _ in first)


@pytest.mark.parametrize("body", [replacing, failing])
def test_processes_end_with_a_body_that_leaves_something_behind(body: Any) -> None:
    KEPT.drop(2)  # which other tests of this worker may have used
    first = {pid for pid, _ in run_ranks(seen, 2)}
    if body is replacing:
        assert set(run_ranks(body, 2)) == first
    else:
        words = r"as it should(.|\n)*in the same processes before: seen"
        with pytest.raises(RankError, match=words):
            run_ranks(body, 2)
    assert 2 not in KEPT.members
    assert first.isdisjoint(pid for pid, _ in run_ranks(seen, 2))


def test_a_few_rows_have_every_value_of_every_axis() -> None:
    rows = [(a, b, c) for a in "abc" for b in (1, 2) for c in (None, True)]
    kept = [rows[n] for n in sorted(each_value(rows))]
    assert len(kept) == 3
    assert [set(axis) for axis in zip(*kept, strict=True)] == [set("abc"), {1, 2}, {None, True}]
