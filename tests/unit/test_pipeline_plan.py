"""Plans of pipelines: torch's own order, validated before it runs; gathers counted by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from internsp.base.trace import Trace
from internsp.errors import ConfigError, OrderError
from internsp.pipeline.hooks import ComputeAction, ISPCommunicatorSchedulerHook, next_gather
from internsp.pipeline.schedules import (
    SCHEDULES,
    Order,
    computations,
    schedule_kind,
    schedule_order,
)
from internsp.pipeline.schedules import ScheduleAction as Act
from internsp.pipeline.simulate import (
    check_order,
    compute_actions,
    simulate_with_launches,
)
from internsp.schedule.chunk import ChunkLayout, UnitLayout, WeightLayout
from internsp.schedule.terms import Policy


def order_of(name: str, ranks: int = 2, micro_batches: int = 4) -> tuple[Order, int]:
    kind = SCHEDULES[name]
    chunks = kind.chunks or 2
    return schedule_order(kind, ranks, chunks, micro_batches), chunks


def checked(name: str, order: Order, ranks: int, chunks: int) -> list[float]:
    rank_of = partial(SCHEDULES[name].rank_of, ranks=ranks, chunks=chunks)
    return [timed.end for timed in check_order(order, rank_of, ranks * chunks)]


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (2, 8), (4, 8), (3, 6)])
def test_every_schedule_can_run_and_does_all_the_work(
    name: str, ranks: int, micro_batches: int
) -> None:
    order, chunks = order_of(name, ranks, micro_batches)
    assert checked(name, order, ranks, chunks)
    for kinds in (("F",), ("B", "I"), ("B", "W")):
        done = [(s.stage, s.micro_batch) for r in order for s in order[r] if s.kind in kinds]
        every = [(s, m) for s in range(ranks * chunks) for m in range(micro_batches)]
        assert sorted(done) == every


def test_one_forward_one_backward_is_as_in_the_paper() -> None:
    order, _ = order_of("1F1B", 2, 3)
    assert [str(s) for s in computations(order, 0)] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    assert [str(s) for s in computations(order, 1)] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]


def test_split_schedules_take_less_time_than_1f1b() -> None:
    """A forward takes 1, a backward 2: 4 micro-batches on 2 ranks are 12 without a bubble."""
    ends = {}
    for name in ("GPipe", "1F1B", "ZBVZeroBubble"):
        order, chunks = order_of(name)
        ends[name] = max(checked(name, order, 2, chunks)) / chunks
    assert ends["GPipe"] == ends["1F1B"] == 15
    assert ends["ZBVZeroBubble"] < 14


def test_messages_in_another_order_are_refused() -> None:
    order, chunks = order_of("1F1B")
    at = [i for i, s in enumerate(order[1]) if s.kind == "RECV_F"][:2]
    order[1][at[0]], order[1][at[1]] = order[1][at[1]], order[1][at[0]]
    with pytest.raises(OrderError, match="message 0 from pipeline rank 0 to 1 is output of stage"):
        checked("1F1B", order, 2, chunks)


def test_a_message_that_is_never_sent_is_refused() -> None:
    order, chunks = order_of("ZBVZeroBubble")
    lost = next(s for s in order[1] if s.kind == "SEND_B")
    order[1].remove(lost)
    with pytest.raises(OrderError, match=r"from pipeline rank 1 to 0 .* expects gradient"):
        checked("ZBVZeroBubble", order, 2, chunks)


def test_two_ranks_that_wait_for_each_other_are_refused() -> None:
    order = {
        0: [Act(0, "F", 0), Act(0, "RECV_B", 0), Act(0, "B", 0), Act(0, "SEND_F", 0)],
        1: [Act(1, "RECV_F", 0), Act(1, "F", 0), Act(1, "B", 0), Act(1, "SEND_B", 0)],
    }
    with pytest.raises(OrderError, match="wait for ever: pipeline rank 0 at 0B0"):
        check_order(order, lambda stage: stage, 2)


SENT = [Act(0, "F", 0), Act(0, "SEND_F", 0), Act(0, "RECV_B", 0), Act(0, "B", 0)]
RECEIVED = [
    Act(1, "RECV_F", 0), Act(1, "F", 0), Act(1, "I", 0), Act(1, "SEND_B", 0), Act(1, "W", 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("early", "late"),
    [("SEND_F", "F"), ("SEND_B", "I"), ("W", "I"), ("F", "RECV_F"), ("B", "RECV_B")],
)
def test_what_a_rank_would_do_before_it_has_what_it_needs_is_refused(
    early: str, late: str
) -> None:
    """torch would send nothing, or compute from a buffer that was never received."""
    order = {0: list(SENT), 1: list(RECEIVED)}
    assert check_order(order, lambda stage: stage, 2)
    rank = next(r for r in order if {early, late} <= {step.kind for step in order[r]})
    moved = next(step for step in order[rank] if step.kind == early)
    order[rank].remove(moved)
    order[rank].insert(next(i for i, s in enumerate(order[rank]) if s.kind == late), moved)
    with pytest.raises(OrderError, match=f"wait for ever: pipeline rank .*{rank}{early}0"):
        check_order(order, lambda stage: stage, 2)


def test_a_message_too_many_is_refused() -> None:
    order = {0: [*SENT, Act(0, "SEND_F", 0)], 1: list(RECEIVED)}
    with pytest.raises(OrderError, match=r"message 1 from pipeline rank 0 to 1 .* expects nothing"):
        check_order(order, lambda stage: stage, 2)


def test_a_backward_before_its_forward_is_refused() -> None:
    order, chunks = order_of("GPipe")
    order[1].insert(0, order[1].pop(next(i for i, s in enumerate(order[1]) if s.kind == "B")))
    with pytest.raises(OrderError, match="wait for ever"):
        checked("GPipe", order, 2, chunks)


def test_a_pass_that_is_not_the_planned_one_is_refused() -> None:
    communicator: Any = SimpleNamespace(state=SimpleNamespace(trace=Trace()))
    hook = ISPCommunicatorSchedulerHook({0: communicator})
    hook.begin_step([ComputeAction(0, 0, 0), ComputeAction(0, 0, 0, "full")])
    for step in (hook.before_forward, hook.before_backward):
        with pytest.raises(OrderError, match=r"runs Compute.*micro_batch=1.*the plan has Compute"):
            step(ComputeAction(0, 0, 1))


def test_numbers_that_do_not_fit_a_schedule_are_explained() -> None:
    assert "takes 2 chunks a rank, not 1" in schedule_kind("DualPipeV").why_invalid(2, 1, 4)
    too_few = schedule_kind("DualPipeV").why_invalid(2, 2, 3)
    assert "at least as many microbatches as stages" in too_few
    assert schedule_kind("1F1B").why_invalid(4, 1, 2) != ""
    assert schedule_kind("Interleaved1F1B").why_invalid(2, 3, 4) == ""
    with pytest.raises(ConfigError, match="choose one of GPipe, 1F1B"):
        schedule_kind("1f2b")


def test_the_next_pass_that_gathers_is_prefetched_for_wherever_it_is() -> None:
    places = [
        ComputeAction(1, 0, 0), ComputeAction(1, 0, 0, "input"), ComputeAction(1, 0, 0, "weight"),
        ComputeAction(3, 1, 0, "full"),
        ComputeAction(1, 0, 1), ComputeAction(1, 0, 1, "weight"),
    ]  # fmt: skip
    assert [next_gather(places, index) for index in range(len(places))] == [
        (places[1], "backward"), (places[3], "backward"), (places[3], "backward"),
        (places[4], "forward"), None, None,
    ]  # fmt: skip


def test_the_first_stage_leaves_all_to_the_weight_part_another_that_cannot_split_nothing() -> None:
    steps = [Act(0, "I", 0), Act(3, "I", 0), Act(0, "W", 0), Act(3, "F", 1), Act(3, "W", 0)]
    assert compute_actions(steps, [0, 3], {0: True, 3: True}) == [
        ComputeAction(3, 1, 0, "input"), ComputeAction(0, 0, 0, "full"), ComputeAction(3, 1, 1),
        ComputeAction(3, 1, 0, "weight"),
    ]  # fmt: skip
    assert compute_actions(steps, [0, 3], {0: False, 3: False}) == [
        ComputeAction(3, 1, 0, "full"), ComputeAction(0, 0, 0, "full"), ComputeAction(3, 1, 1),
    ]  # fmt: skip


def chunk(blocks: int, keep: bool = False) -> ChunkLayout:
    policy = Policy(blocks, kept=frozenset(range(blocks if keep else 0)))
    units = tuple(
        UnitLayout(f"b{i}", (WeightLayout(f"b{i}.w", 8, 8, 16, 8),), policy.slot(i), i)
        for i in range(blocks)
    )
    return ChunkLayout(policy, units, None, None, 2)


def gathers(name: str, blocks: int, keep: bool = False) -> int:
    """Rank 0 of two, with four micro-batches."""
    order, chunks = order_of(name)
    stages = SCHEDULES[name].stages_of(0, 2, chunks)
    places = compute_actions(computations(order, 0), stages, dict.fromkeys(stages, True))
    plans = [chunk(blocks, keep) for _ in stages]
    return simulate_with_launches(places, plans, True)[0].count("AG")


def test_gathers_of_a_step_are_those_counted_by_hand() -> None:
    # Three blocks, two slots. A forward after a forward finds b1 only: b0 and b2 are gathered...
    assert gathers("GPipe", 3) == 3 + 2 * 3 + 1 + 2 * 3
    # ...and 1F1B's rank 0 alternates: b2 and b1 are there when backward begins, b0 and b1 after.
    assert gathers("1F1B", 3) == 3 + 2 + 1 + 1 + 1 + 1 + 1 + 2
    # Two blocks fit the two slots: one gather each for the whole step.
    assert gathers("GPipe", 2) == 2
    assert gathers("ZBVZeroBubble", 2) == 4


def lines(
    name: str, blocks: int, kinds: tuple[str, ...] = ("AG", "USE"), **policy: bool
) -> list[str]:
    """Gathers and uses of rank 0 of two, weights ``b0.u`` and ``b0.v`` in each block."""
    order, chunks = order_of(name)
    stages = SCHEDULES[name].stages_of(0, 2, chunks)
    places = compute_actions(computations(order, 0), stages, dict.fromkeys(stages, True))
    rule = Policy(blocks, **policy)
    units = tuple(
        UnitLayout(
            f"b{i}",
            tuple(WeightLayout(f"b{i}.{w}", 8, 8, 16, 8) for w in "uv"),
            rule.slot(i),
            i,
        )
        for i in range(blocks)
    )
    plan = ChunkLayout(rule, units, None, None, 2)
    return simulate_with_launches(places, [plan] * len(stages), True)[0].lines(kinds)


def test_a_pass_gathers_for_the_next_one_before_its_own_last_use() -> None:
    found = lines("GPipe", 3)  # the second forward's first block needs the slot of the last
    assert found.index("AG forward b2.u") < found.index("USE forward b1.u")
    backwards = found[found.index("USE backward b2.v") :]
    again = backwards[backwards.index("USE backward b0.v") :]
    assert again[:2] == ["USE backward b0.v", "USE backward b0.u"]
    four = lines("GPipe", 4)
    last = four.index("USE backward b0.v")
    assert "AG backward b3.v" in four[last - 2 : last]


def test_with_prefetch_per_module_too_weight_by_weight() -> None:
    found = lines("GPipe", 4, ("AG", "USE", "FREE"), per_module=True)
    # The next forward's first weight is gathered while this one's last is in use...
    at = found.index("USE forward b3.v")
    assert found[at + 1 : at + 3] == ["AG forward b0.u", "FREE forward b3.v"]
    # ...and the next backward's, too.
    at = found.index("USE backward b0.v")  # a backward gathers nothing between its reductions
    assert found[at - 2 : at] == ["AG backward b0.u", "AG backward b3.v"]
    assert found.index("AG backward b3.u", at) > found.index("USE backward b0.u", at)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_kept_blocks_are_gathered_once(name: str) -> None:
    chunks = SCHEDULES[name].chunks or 2
    assert gathers(name, 5, keep=True) == 5 * chunks
    assert chunk(5, keep=True).slots() == [16] * 5
    assert chunk(5).slots() == [16] * 2


def test_weight_parts_gather_nothing_and_reduce_everything() -> None:
    order, chunks = order_of("ZBVZeroBubble")
    stages = SCHEDULES["ZBVZeroBubble"].stages_of(1, 2, chunks)
    places = compute_actions(computations(order, 1), stages, dict.fromkeys(stages, True))
    _, launched = simulate_with_launches([replace(p) for p in places], [chunk(3)] * 2, True)
    weight = [n for p, n in zip(places, launched, strict=True) if p.part == "weight"]
    inputs = [n for p, n in zip(places, launched, strict=True) if p.part == "input"]
    assert weight
    assert all(reductions == 3 for _, reductions in weight)
    assert all(reductions == 0 for _, reductions in inputs)
