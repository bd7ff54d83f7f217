"""Overlap is computed from intervals: compared with hand-made traces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from internsp.app.report.timeline import (
    Bar,
    Communication,
    build_timeline,
    communication,
    intersect,
    mean_waits,
    measure,
    merge,
    step_times,
    subtract,
    where_waited,
    window_of,
)
from internsp.base.trace import Event


def event(kind, start, end, unit="", weight="", phase="", nbytes=0):
    return Event(
        kind, unit, weight, phase, float(start), None if end is None else float(end), nbytes
    )


# A step of 100 seconds on one rank. Waits: 0-4, 30-32, 60-65, 88-90 (13 in all).
STEP = [
    event("AG", 0, 4, "layers.0", "wq", "forward", 100),
    event("WAIT", 0, 4, "layers.0", "wq", "forward"),
    event("USE", 4, 4, "layers.0", "wq", "forward"),
    event("AG", 10, 32, "layers.1", "wq", "forward", 100),
    event("AG", 12, 26, "layers.1", "wk", "forward", 50),
    event("WAIT", 30, 32, "layers.1", "wq", "forward"),
    event("USE", 32, 32, "layers.1", "wq", "forward"),
    event("USE", 50, 50, "layers.1", "wq", "backward"),
    event("A2A", 60, 65, "layers.1", "", "backward", 10),
    event("A2A_WAIT", 60, 65, "layers.1", "", "backward"),
    event("RS", 62, 90, "layers.1", "wq", "backward", 100),
    event("WAIT", 88, 90, "layers.1", "wq", "optimizer"),
    event("STEP", 90, 96, "", "", "optimizer"),
    event("PUBLISH", 95, 100, "", "", "optimizer", 7),
]


def test_waits_and_compute_make_up_the_step():
    times = step_times(STEP)
    assert times.step == 100
    assert times.exposed == 13
    assert times.compute == 87
    # In flight: 0-4, 10-32, 60-90, 95-100 = 61; waits cover 13 of it.
    assert times.hidden == 48
    assert times.communication == 61


def test_each_kind_is_split_into_hidden_and_exposed():
    found = communication([*STEP, event("AG", 70, 80, "layers.0", "wq", "backward", 1)])
    assert found == {
        "AG": Communication(4, 251, 6, 30),  # 0-4, 10-32, 70-80; waits 0-4 and 30-32
        "A2A": Communication(1, 10, 5, 0),
        "RS": Communication(1, 100, 5, 23),  # 62-90, with waits 62-65 and 88-90
        "PUBLISH": Communication(1, 7, 0, 5),
    }


def test_a_wait_is_attributed_to_the_collective_it_waited_for():
    found = where_waited(STEP)
    assert found == {
        ("AG", "layers.0", "forward"): 4,
        ("AG", "layers.1", "forward"): 2,
        ("A2A", "layers.1", "backward"): 5,
        ("RS", "layers.1", "optimizer"): 2,
    }
    assert list(found.values()) == [5, 4, 2, 2]
    alone = [event("WAIT", 1, 3, "layers.7")]
    assert where_waited(alone) == {("", "layers.7", ""): 2}
    assert mean_waits({0: STEP, 1: alone, 2: []})["", "layers.7", ""] == 1


def test_a_collective_in_flight_lasts_to_the_end_of_the_step():
    events = [event("AG", 4, None), event("WAIT", 8, None), event("USE", 10, 10)]
    assert communication(events)["AG"] == Communication(1, 0, exposed=2, hidden=4)
    assert step_times(events).compute == 4


def test_a_step_without_communication_is_all_compute():
    times = step_times([event("USE", 3, 3), event("USE", 5, 5)])
    assert (times.step, times.compute, times.hidden, times.exposed) == (2, 2, 0, 0)
    assert step_times([]).step == 0
    assert communication([]) == {}
    assert window_of([]) == (0, 0)


def test_lanes_hold_what_the_rank_did_and_compute_is_cut_by_unit_and_phase():
    lanes = build_timeline(STEP)
    assert list(lanes) == ["compute", "gathers", "reduce-scatters", "all-to-alls", "optimizer"]
    assert [(b.kind, b.start, b.end, b.unit, b.phase) for b in lanes["compute"]] == [
        ("WAIT", 0, 4, "layers.0", "forward"),
        ("COMPUTE", 4, 30, "layers.0", "forward"),
        ("WAIT", 30, 32, "layers.1", "forward"),
        ("COMPUTE", 32, 50, "layers.1", "forward"),
        ("COMPUTE", 50, 60, "layers.1", "backward"),
        ("WAIT", 60, 65, "layers.1", "backward"),
        ("COMPUTE", 65, 88, "layers.1", "backward"),
        ("WAIT", 88, 90, "layers.1", "optimizer"),
        ("COMPUTE", 96, 100, "", "optimizer"),
    ]
    assert [(b.start, b.end) for b in lanes["gathers"]] == [(0, 4), (10, 32), (12, 26)]
    assert lanes["reduce-scatters"] == [
        Bar("RS", 62, 90, "layers.1", "wq", "backward", 100),
    ]
    assert [b.kind for b in lanes["optimizer"]] == ["STEP", "PUBLISH"]


def test_forward_and_backward_marks_name_a_phase_where_no_weight_is_used():
    events = [event("FORWARD", 0, 4, "a"), event("BACKWARD", 4, 10, "a")]
    bars = build_timeline(events)["compute"]
    assert [(b.start, b.end, b.unit, b.phase) for b in bars] == [
        (0, 4, "a", "forward"),
        (4, 10, "a", "backward"),
    ]


interval_lists = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


@pytest.mark.thorough(1)
@given(interval_lists, interval_lists)
def test_interval_arithmetic_equals_sets_of_points(a, b):
    def cells(intervals):
        return {i for start, end in intervals for i in range(start, end)}

    assert cells(merge(a)) == cells(a)
    assert measure(a) == len(cells(a))
    assert cells(intersect(a, b)) == cells(a) & cells(b)
    assert cells(subtract(a, b)) == cells(a) - cells(b)
    for result in (merge(a), intersect(a, b), subtract(a, b)):
        assert all(start < end for start, end in result)
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(result))
    assert measure(intersect(a, b)) + measure(subtract(a, b)) == pytest.approx(measure(a))


def test_what_follows_a_recompute_is_backward():
    events = [
        event("USE", 0, 0, "layers.1", "wq", "recompute"),
        event("USE", 2, 2, "layers.1", "w2", "recompute"),
        event("BACKWARD", 3, 3, "layers.1"),
        event("RS", 5, 9, "layers.1", "w2", "backward"),
        event("USE", 8, 8, "layers.0", "w2", "backward"),
        event("STEP", 10, 10),
    ]
    bars = build_timeline(events)["compute"]
    assert [(b.start, b.end, b.unit, b.phase) for b in bars] == [
        (0, 3, "layers.1", "recompute"),
        (3, 8, "layers.1", "backward"),
        (8, 10, "layers.0", "backward"),
    ]
