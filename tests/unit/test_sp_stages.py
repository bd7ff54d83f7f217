"""The order in which the parts of one attention sublayer are computed, sent and waited for."""

from __future__ import annotations

from collections import Counter

import pytest

from internsp.sp.gloo.stages import (
    COMPUTE,
    OWN,
    PREPOST,
    QKV,
    RECEIVE,
    REST,
    SEND,
    WAIT,
    Action,
    ExchangeOrder,
    exchange_order,
)

SIZES = [2, 3, 5]


def messages(orders: list[ExchangeOrder], stage: str, kind: str) -> Counter[tuple[int, int, str]]:
    """Messages of all ranks, by sender, receiver and content."""
    found: Counter[tuple[int, int, str]] = Counter()
    for rank, each in enumerate(orders):
        for action in getattr(each, stage):
            if action.kind == kind:
                pair = (rank, action.peer) if kind == SEND else (action.peer, rank)
                found[*pair, action.what] += 1
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", ExchangeOrder._fields)
def test_every_message_that_is_sent_is_received_once_and_between_any_two(
    size: int, stage: str
) -> None:
    orders = [exchange_order(rank, size) for rank in range(size)]
    sent = messages(orders, stage, SEND)
    assert sent == messages(orders, stage, RECEIVE)
    whats = {"heads": QKV, "heads_gradient": ("qkv",)}.get(stage, ("out",))
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    assert sent == Counter((a, b, what) for a, b in pairs for what in whats)


@pytest.mark.parametrize("size", SIZES)
def test_a_part_is_sent_when_it_is_made_and_nothing_is_own_before_all_of_it_is_sent(
    size: int,
) -> None:
    for stage in exchange_order(1, size):
        kinds = [action.kind for action in stage]
        for at, action in enumerate(stage):
            if action.kind == SEND:
                assert stage[at - 1] == Action(COMPUTE, *action[1:])
        last_sent = max(at for at, kind in enumerate(kinds) if kind == SEND)
        assert kinds.index(PREPOST) == last_sent + 1 < kinds.index(OWN)
        assert kinds.index(OWN) < kinds.index(WAIT)
        assert REST not in kinds or kinds.index(REST) > kinds.index(WAIT)


def test_the_first_message_of_each_rank_goes_to_another_rank() -> None:
    firsts = [
        next(a.peer for a in exchange_order(rank, 4).heads if a.kind == SEND) for rank in range(4)
    ]
    assert sorted(firsts) == [0, 1, 2, 3]


@pytest.mark.parametrize("size", SIZES)
def test_without_overlap_the_same_is_done_and_the_wait_comes_first(size: int) -> None:
    for apart, together in zip(
        exchange_order(0, size, overlap=False), exchange_order(0, size), strict=True
    ):
        assert sorted(apart) == sorted(together)
        kinds = [action.kind for action in apart]
        assert kinds.index(WAIT) < kinds.index(OWN)


def test_actions_read_as_the_plan_prints_them() -> None:
    assert [action.line() for action in exchange_order(0, 2).output] == [
        "RECEIVE out from 1", "COMPUTE out for 1", "SEND out to 1", "PREPOST out", "OWN out",
        "WAIT out", "REST out",
    ]  # fmt: skip
