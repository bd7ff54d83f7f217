"""Idle time of the link: hand-made steps of two ranks, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tools.bench.bounds import MBIT
from tools.overlap import idle, picture

RATE = 8.0  # 10^6 bytes a second
SECOND = RATE * MBIT
MARKS = [("forward", 0.0), ("backward", 4.0), ("optimizer", 9.0), ("end", 10.0)]


def event(kind: str, unit: str, phase: str, start: float, end: float) -> list[Any]:
    return [kind, unit, "w", phase, start, end, 1]


EVENTS = [
    event("AG", "a", "forward", 0.0, 1.0),
    event("WAIT", "a", "forward", 0.0, 1.0),
    event("USE", "a", "forward", 1.0, 1.0),
    event("AG", "b", "forward", 1.0, 3.0),
    event("WAIT", "b", "forward", 2.0, 3.0),
    event("USE", "b", "forward", 3.0, 3.0),
    event("USE", "b", "backward", 4.0, 4.0),
    event("RS", "b", "backward", 6.0, 9.0),
    event("WAIT", "b", "finish", 7.0, 9.0),
]


def samples(busy: list[tuple[float, float]], end: float = 10.0) -> list[tuple[float, float]]:
    """The counter every half second of a link that sends at full rate during ``busy``."""
    times = [i / 2 for i in range(int(end * 2) + 1)]
    return [(t, SECOND * sum(max(0.0, min(b, t) - a) for a, b in busy)) for t in times]


def profile(events: list[list[Any]], zero: float = 0.0) -> dict[str, Any]:
    link = samples([(0.0, 1.0), (1.5, 3.0), (7.0, 9.0)])
    return {"zero": zero, "marks": MARKS, "events": events, "link": link}


def late(events: list[list[Any]], which: int, seconds: float) -> list[list[Any]]:
    out = [list(e) for e in events]
    out[which][4] += seconds
    return out


def test_the_step_is_cut_at_its_marks_and_where_the_last_reduction_leaves() -> None:
    assert idle.phases(MARKS, 6.0) == [
        (0.0, 4.0, "forward"), (4.0, 6.0, "backward"), (6.0, 9.0, "finish"),
        (9.0, 10.0, "optimizer"),
    ]  # fmt: skip
    assert [name for _, _, name in idle.phases(MARKS, None)] == ["forward", "backward", "optimizer"]
    behind = [("forward", 0.5), *MARKS[1:]]
    assert idle.phases(behind, None)[0] == (0.0, 4.0, "forward"), "no time without a name"


def test_a_block_lasts_until_the_next_one_uses_or_waits_and_finishing_changes_nothing() -> None:
    found = idle.blocks(EVENTS, 10.0)
    names = {t: next(name for a, b, name in found if a <= t < b) for t in (0.5, 1.5, 2.5, 8.0)}
    assert names == {0.5: "a", 1.5: "a", 2.5: "b", 8.0: "b"}


def test_a_collective_can_travel_only_once_the_last_rank_has_launched_it() -> None:
    here, there = [(0.0, 1.0), (1.0, 3.0)], [(0.0, 1.0), (1.5, 3.0)]
    assert idle.causes([here, there], 4.0) == [
        (0.0, 1.0, idle.FLYING), (1.0, 1.5, idle.BEHIND), (1.5, 3.0, idle.FLYING),
        (3.0, 4.0, idle.NOTHING),
    ]  # fmt: skip
    # While one waits for the other rank, an earlier one still occupies the link.
    assert idle.causes([[(0.0, 2.0), (1.0, 3.0)], [(0.0, 2.0), (1.5, 3.0)]], 3.0) == [
        (0.0, 3.0, idle.FLYING)
    ]


def test_what_the_rate_did_not_carry_is_told_by_phase_block_and_cause() -> None:
    other = late(EVENTS, 3, 0.5)  # the second rank launches b's gather half a second late
    for e in other:
        e[4], e[5] = e[4] - 100.0, e[5] - 100.0
    told = idle.found([profile(EVENTS), profile(other, zero=100.0)], RATE)
    assert told is not None
    assert told["seconds"] == 10.0
    assert told["idle"] == pytest.approx(10.0 - 4.5)
    assert told["phases"] == pytest.approx(
        {"forward": 1.5, "backward": 2.0, "finish": 1.0, "optimizer": 1.0}
    )
    assert told["causes"] == pytest.approx(
        {idle.BEHIND: 0.5, idle.NOTHING: 1.0 + 2.0 + 1.0, idle.FLYING: 1.0}
    )
    by_block = {(block, phase): s for block, phase, s in told["blocks"]}
    assert by_block == pytest.approx(
        {("a", "forward"): 0.5, ("b", "forward"): 1.0, ("b", "backward"): 2.0, ("b", "finish"): 1.0,
         ("b", "optimizer"): 1.0}
    )
    assert told["blocks"][0] == ("b", "backward", pytest.approx(2.0)), "longest first"
    said = idle.sentence("internsp", told)
    assert "link idle in one step, 5.500 s of 10.000 s (55%)" in said
    assert "forward 1500 ms" in said
    assert "b backward 2000 ms" in said
    assert f"{idle.BEHIND} 500 ms" in said


def test_a_burst_makes_up_for_the_pause_before_it() -> None:
    link = [(0.0, 0.0), (1.0, 0.0), (2.0, 2 * SECOND)]
    assert sum(idle.lost(link, RATE, [], 2.0).values()) == pytest.approx(0.0)


def test_without_a_trace_only_phases_are_told_and_without_a_counter_nothing() -> None:
    told = idle.found([profile([]), profile([])], RATE)
    assert told is not None
    assert (told["blocks"], told["causes"]) == ([], {})
    assert set(told["phases"]) == {"forward", "backward", "optimizer"}
    assert "by block" not in idle.sentence("FSDP2", told)
    # Ranks whose collectives cannot be matched one by one are not evaluated.
    unlike = idle.found([profile(EVENTS), profile(EVENTS[:-2])], RATE)
    assert unlike is not None
    assert unlike["causes"] == {}
    assert idle.found([profile(EVENTS) | {"link": []}], RATE) is None


def test_the_picture_shows_no_single_bursts() -> None:
    fine = [(i * 0.004, float(i)) for i in range(10)]
    assert picture.thinned(fine) == [fine[0], fine[3], fine[6], fine[9]]
