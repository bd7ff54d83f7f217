"""Ranks that agree by the store: one verdict for all, and no wait for a rank that cannot come."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from internsp.errors import CollectiveError
from internsp.failure import consensus
from internsp.failure.consensus import Consensus
from internsp.failure.recovery import Recovery
from internsp.parallel.checks import register_read_checks

SECONDS = 20.0


def of_two(
    monkeypatch: pytest.MonkeyPatch, store: Any, seconds: float = SECONDS
) -> tuple[Consensus, Consensus]:
    monkeypatch.setattr(consensus, "default_store", lambda: store)
    first, second = (Consensus("name", rank, [0, 1], seconds) for rank in range(2))
    return first, second


def together(*calls: Callable[[], bool]) -> list[bool]:
    start = time.monotonic()
    with ThreadPoolExecutor(len(calls)) as pool:
        found = [each.result() for each in [pool.submit(call) for call in calls]]
    assert time.monotonic() - start < SECONDS / 2, "a rank has waited for what cannot come"
    return found


@pytest.mark.parametrize(
    ("one", "other", "agreed"),
    [("3 4", "3 4", True), ("3 4", "3 5", False), (None, "3 4", False), ("3 4", None, False)],
)
def test_all_ranks_get_one_verdict(
    monkeypatch: pytest.MonkeyPatch, one: str | None, other: str | None, agreed: bool
) -> None:
    first, second = of_two(monkeypatch, dist.HashStore())
    for topic in ("failed/0", "failed/1"):  # a failure that they agreed on, or not, binds no other
        found = together(lambda: first.verdict(topic, one), lambda: second.verdict(topic, other))  # noqa: B023 - called at once
        assert found == [agreed, agreed]
    assert together(lambda: first.verdict("failed/0", "3 4")) == [agreed], "the first one holds"


@pytest.mark.parametrize("end", ["gone", "refuse"])
def test_no_rank_waits_for_a_verdict_of_one_that_has_ended_or_refused(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    first, second = of_two(monkeypatch, dist.HashStore())
    if end == "gone":
        second.gone()
    else:
        second.refuse("failed/0")
    assert together(lambda: first.verdict("failed/0", "3 4")) == [False]


@pytest.mark.parametrize(
    ("error", "cause"),
    [(None, "rank 1's program has ended (sys.exit, or its last line) before others"),
     (ValueError("7"), "rank 1, of two, failed first: ValueError: 7")],
)  # fmt: skip
def test_a_process_that_ends_in_order_or_not_is_waited_for_no_more_and_leaves_its_cause(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, cause: str
) -> None:
    first, second = of_two(monkeypatch, dist.HashStore())
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    Recovery(second, "rank 1, of two,")._at_exit(error)
    assert Recovery(first, "rank 0").first_cause() == cause
    assert together(lambda: first.verdict("failed/0", "3 4")) == [False]


def test_a_rank_that_comes_too_late_is_refused_as_those_that_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = of_two(monkeypatch, dist.HashStore(), 0.1)
    assert together(lambda: first.verdict("failed/0", "3 4")) == [False]
    assert together(lambda: second.verdict("failed/0", "3 4")) == [False]


class Lost:
    """A store whose process has ended."""

    def __getattr__(self, name: str) -> Any:
        raise dist.DistNetworkError("connection reset by peer")


def test_without_the_store_no_rank_agrees_and_each_has_its_own_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, _ = of_two(monkeypatch, Lost())
    assert together(lambda: first.verdict("failed/0", "3 4")) == [False]
    assert first.first("cause/0", "mine") == "mine"
    first.gone()


class Lasting(dist.HashStore):
    """A store whose process ends once all ranks have come to a call."""

    def delete_key(self, name: str) -> bool:
        raise dist.DistNetworkError("connection reset by peer")


def guarded(monkeypatch: pytest.MonkeyPatch, store: Any) -> Consensus:
    monkeypatch.setattr(consensus, "default_store", lambda: store)
    guard: Any = SimpleNamespace(waits_in_store=lambda *what: nullcontext(), fatal_cause="")
    return Consensus("name", 1, [1], SECONDS, guard)


def test_a_call_whose_store_is_gone_names_itself_and_that_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = r"rank 1 reached full_tensor\(\) of w, which all ranks .* store has ended .*barrier"
    with pytest.raises(CollectiveError, match=told) as raised:
        guarded(monkeypatch, Lost()).same("reads", "full_tensor() of w")
    assert isinstance(raised.value.__cause__, dist.DistNetworkError)
    lasting = guarded(monkeypatch, Lasting())
    for number in range(2):  # the second one has a key of the first to delete
        assert lasting.gather("reads", str(number)) == {1: str(number)}


def test_the_first_cause_stays_unless_its_own_rank_knows_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = of_two(monkeypatch, dist.HashStore())
    assert first.known("cause/0") == ""
    assert first.first("cause/0", "unknown") == "unknown"
    assert second.first("cause/0", "later") == "unknown"
    assert first.first("cause/0", "known", replaces="unknown") == "known"
    assert second.known("cause/0") == "known"


def test_a_read_meets_the_ranks_of_its_replica_and_a_sum_meets_all() -> None:
    asked: list[tuple[list[int], str]] = []

    def among(name: str, group: list[int]) -> Any:
        return SimpleNamespace(same=lambda topic, what: asked.append((group, what)))

    mesh = SimpleNamespace(mesh=torch.tensor([[0, 1], [2, 3]]))
    axis = type("Axis", (), {"param_mesh": mesh, "replica_rank": 1, "name": "dense"})
    weight: Any = SimpleNamespace(axis=axis)
    recovery: Any = SimpleNamespace(shared_name="model", among=among)
    register_read_checks([weight], recovery)
    weight.meet("full_tensor()")
    weight.meet("its gradient", everyone=True)
    assert asked == [([2, 3], "full_tensor()"), ([0, 1, 2, 3], "its gradient")]
