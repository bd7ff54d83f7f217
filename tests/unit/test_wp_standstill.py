"""When a rank may abort a wait: never while another order of events could still end it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from internsp.failure.comm_context import CommContext
from internsp.failure.guard import MOST_READ, FailureGuard
from internsp.failure.rank_report import RankReport, RankState, WaitedCollective, find_fatal_cause

GATHER, REDUCE = "gathers", "reductions"


def report(
    rank: int, state: RankState, gathers: int, reductions: int, **given: object
) -> RankReport:
    made = RankReport(
        rank, state, 0, (gathers, reductions), {GATHER: gathers, REDUCE: reductions, "own": rank},
        "something", recent_tags=((7,) * gathers, (8,) * reductions),
    )  # fmt: skip
    return replace(made, **given)  # type: ignore[arg-type]


def waits(rank: int, gathers: int, reductions: int, entry: int = 0, **given: object) -> RankReport:
    group, number, tag = ((GATHER, gathers, 7), (REDUCE, reductions, 8))[entry]
    wait = WaitedCollective((group,), entry, number, tag)
    return report(rank, RankState.IN_COLLECTIVE, gathers, reductions, wait=wait, **given)


FAILED = report(1, RankState.FAILED, 5, 5)
MEETS = report(1, RankState.IN_STORE, 5, 5, ranks=(0, 1))
REFUSED = report(1, RankState.REFUSED, 5, 5, refusals=1)
LOST = report(1, RankState.LOST, 5, 5)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (waits(0, 6, 5), FAILED), (waits(0, 6, 5), LOST), (waits(0, 5, 6), REFUSED),
        (waits(0, 6, 5), MEETS), (replace(MEETS, rank=0), waits(1, 6, 5)),
        (replace(MEETS, rank=0), LOST), (waits(0, 6, 5), waits(1, 5, 6, 1)),
        (waits(0, 5, 5), waits(1, 6, 5, recent_tags=((7, 7, 7, 7, 9, 7), (8,)))),
        (report(0, RankState.IN_COLLECTIVE, 6, 5, wait=WaitedCollective(("own",))),
         report(1, RankState.FAILED, 6, 5, sequence_numbers={"own": -1})),
    ],
)  # fmt: skip
def test_a_wait_that_cannot_end_is_given_up(mine: RankReport, other: RankReport) -> None:
    assert find_fatal_cause(mine, [other])
    assert not find_fatal_cause(mine, [replace(other, epoch=1)]), "the ranks have recovered since"
    for given in (other, replace(other, what="no file \udc80")):
        assert RankReport.loads(given.dumps()) == given


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (waits(0, 5, 5), FAILED),  # it has launched the same: this one may fail alike
        (waits(0, 4, 5), FAILED),
        (waits(0, 6, 5, refusals=1), REFUSED),  # refused on both, and this one has gone on
        (waits(0, 5, 5), MEETS),  # a slow transfer
        (replace(MEETS, rank=0), FAILED),  # it may come to the same place, to save something
        (replace(MEETS, rank=0), MEETS),
        (replace(MEETS, rank=0), waits(1, 5, 5)),
        (waits(0, 6, 5), waits(1, 5, 5)),  # that one waits for a slow transfer
        (waits(0, 6, 5), waits(1, 5, 6)),  # ahead of each other, but both for what is on its way
        (
            waits(0, 6, 5),
            waits(1, 5, 6, 1, sequence_numbers={"others": 5}),
        ),  # in no group of this one
    ],
)
def test_a_wait_that_may_end_is_not_given_up(mine: RankReport, other: RankReport) -> None:
    assert not find_fatal_cause(mine, [other])


@pytest.mark.parametrize("met", [True, False])
def test_a_report_that_is_published_late_ends_no_wait(met: bool) -> None:
    """On a busy machine a rank's thread may publish what its rank waited for some calls ago."""
    store = dist.HashStore()
    mesh = SimpleNamespace(stage_ranks=[0, 1], stage_groups=[], pairs={}, tensor_rank=0)
    late, waiting = (
        FailureGuard(SimpleNamespace(**vars(mesh), rank=rank), CommContext(), store, "a", str)  # type: ignore[arg-type]
        for rank in (0, 1)
    )
    with late.waits_in_store("first", (0, 1), "call", 0):
        for _ in range(2):
            late.check()
        stale, _ = late._current_report()
        again, _ = late._current_report()
    if met:
        with waiting.waits_in_store("first", (0, 1), "call", 0):
            pass
    with waiting.waits_in_store("second", (0, 1), "call" if met else "another call", 1):
        waiting.check()
        for report in (stale, again):
            assert report is not None
            late._write_report(report)
            waiting.check()
    assert bool(waiting.fatal_cause) == (not met), "where they never met, each waits for the other"


class CountingStore:
    """A store that counts requests, and keys asked for."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.requests = self.keys = 0

    def __getattr__(self, name: str) -> Any:
        called = getattr(self._store, name)

        def call(first: Any, *rest: Any) -> Any:
            self.requests += 1
            self.keys += len(first) if isinstance(first, list) else 1
            return called(first, *rest)

        return call


def ranks_that_wait(count: int, group: str = "all") -> tuple[CountingStore, list[FailureGuard]]:
    """``count`` ranks in one process, each of which waits for its fifth collective."""
    store, guards = CountingStore(), []
    for rank in range(count):
        fake: Any = SimpleNamespace(
            rank=rank, stage_ranks=range(count), stage_groups=[], pairs={}, tensor_rank=0
        )
        comm: Any = CommContext()
        guards.append(FailureGuard(fake, comm, store, "a", str))  # type: ignore[arg-type]
        index = comm.register(group)
        comm.counts[index] = 5
        comm.recent_tags[index].append(7)
        comm.waiting = WaitedCollective((group,), index, 5, 7), "unit", "weight", "forward"
        guards[-1].sequence_numbers = lambda: {group: 5}  # type: ignore[method-assign]
    return store, guards


def test_a_check_costs_the_store_as_much_with_512_ranks_as_with_64() -> None:
    cost = {}
    for count in (64, 512):
        store, guards = ranks_that_wait(count)
        for _ in range(2 + count // MOST_READ):  # until each rank's report has been read once
            for guard in guards[:4]:
                guard.check()
        store.requests = store.keys = 0
        for guard in guards[:4]:
            guard.check()
        cost[count] = store.requests / 4, store.keys / 4
        assert not any(guard.fatal_cause for guard in guards)
    assert cost == {64: (3, 65), 512: (3, 66)}, "its own report, the signal, and 64 others at most"


def test_the_first_failure_of_512_ranks_is_found_in_one_check_and_a_crossed_pair_in_turn() -> None:
    _, guards = ranks_that_wait(512)
    guards[300]._comm_context.counts[0] = 4
    guards[300].report_failed("ValueError: a bad batch")
    for guard in guards[::25]:
        if guard is not guards[300]:
            guard.check()
            assert "rank 300 failed first" in guard.fatal_cause

    _, guards = ranks_that_wait(512)
    guards[9]._comm_context.recent_tags[0][-1] = 8  # it has launched another collective
    checks = 0
    while not guards[0].fatal_cause and checks < 12:
        checks += 1
        for guard in (guards[0], guards[9]):
            guard.check()
    assert "run different collectives" in guards[0].fatal_cause
    assert checks <= 2 + 512 // MOST_READ


def test_a_refusal_that_is_withdrawn_names_no_rank_any_more() -> None:
    store, (first, second) = ranks_that_wait(2)
    first.report_refused("ValueError: a step")
    assert store.get(first._signal_key(0, "a")) == b"0"
    first.begin_pass()
    first.close()
    second.report_failed("ValueError: later")
    assert store.get(first._signal_key(0, "a")) == b"1"
