"""WP-2 on a device: communicators that serve in different orders never wait for each other.

A model of ranks with one computing stream and a communicator for each kind of collective, which
play what the simulator prints. A collective is a kernel: it holds room on its device from when it
starts there until all ranks have started it (NCCL). Each communicator starts its own in their
order; which of several it is, is drawn for each rank anew. A launch and a wait come where the
schedule has them: a wait holds up the computing stream, and with it the launches behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from internsp.schedule.chunk import ChunkLayout, ScheduleLine, UnitLayout
from internsp.schedule.simulate import BatchUsage, simulate
from internsp.schedule.terms import FINISH
from internsp.schedule.turns import Turns
from tests.unit.test_wp_order import data
from tests.unit.test_wp_schedule import chunk, chunks

KINDS = ("AG", "RS", "A2A", "NEAR")  # a communicator each; NEAR: sums within a machine

Launch = tuple[str, int, str]
"""Kind, number among its kind, weight: ranks that send different weights never end either."""


@dataclass
class Rank:
    """One rank: its schedule, and how far it has come.

    Attributes:
        launched: launches that have not ended, oldest first.
        running: those that hold room on the device.
    """

    lines: Sequence[ScheduleLine]
    at: int = 0
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    last: dict[tuple[str, str], Launch] = field(default_factory=dict)
    launched: list[Launch] = field(default_factory=list)
    running: set[Launch] = field(default_factory=set)

    def go_on(self) -> bool:
        """Compute up to a wait for what has not ended; whether that was any step."""
        before = self.at
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if line.kind in KINDS:
                kind = "NEAR" if line.near and line.kind == "RS" else line.kind
                if kind == "A2A" and any(kind == "A2A" for kind, *_ in self.launched):
                    break  # each exchange is waited for before the next one
                new = kind, self.counts[kind], line.weight
                self.counts[kind] += 1
                self.launched.append(new)
                self.last[kind, line.weight] = new
            elif line.kind == "WAIT":
                kinds = ("RS",) if line.phase == FINISH else ("AG", "NEAR")
                if any(self.last.get((kind, line.weight)) in self.launched for kind in kinds):
                    break
            elif line.kind == "USE" and self.last.get(("AG", line.weight)) in self.launched:
                break
            self.at += 1
        return self.at > before

    def start(self, room: int, in_order: bool, source: Random) -> bool:
        """Start kernels while there is room: the oldest launch, or any communicator's next one."""
        before = len(self.running)
        while len(self.running) < room:
            busy = {kind for kind, *_ in self.running}
            first = {launch[0]: launch for launch in reversed(self.launched)}
            ready = [launch for kind, launch in first.items() if kind not in busy]
            if in_order:
                ready = [each for each in ready if each == self.launched[len(self.running)]]
            if not ready:
                break
            self.running.add(source.choice(sorted(ready)))
        return len(self.running) > before


def standing_still(
    ranks: Iterable[Sequence[ScheduleLine]], room: int, in_order: bool, seed: int
) -> bool:
    """Whether the ranks end in waits for each other."""
    source, every = Random(seed), [Rank(lines) for lines in ranks]
    while True:
        moved = [rank.go_on() for rank in every]
        moved += [rank.start(room, in_order, source) for rank in every]
        for done in set.intersection(*[rank.running for rank in every]):
            moved.append(True)
            for rank in every:
                rank.running.remove(done)
                rank.launched.remove(done)
        if not any(moved):
            return any(rank.at < len(rank.lines) or rank.launched for rank in every)


def lines(plan: ChunkLayout, overlap: bool, used: list[BatchUsage]) -> Sequence[ScheduleLine]:
    return simulate(plan, len(used), overlap, used).actions


def in_two_levels(plan: ChunkLayout) -> ChunkLayout:
    """With sums within a machine before they go to others (``reduce``)."""

    def far(unit: UnitLayout) -> UnitLayout:
        return replace(unit, weights=tuple(replace(w, far_bytes=8) for w in unit.weights))

    assert plan.embedding is not None
    assert plan.head is not None
    policy = replace(plan.policy, two_levels=True)
    return replace(
        plan, policy=policy, blocks=tuple(map(far, plan.blocks)), embedding=far(plan.embedding),
        head=far(plan.head), others=tuple(map(far, plan.others)),
    )  # fmt: skip


plans = chunks | chunks.map(in_two_levels)
ROOMS = [(1, True), (len(KINDS), False)]
"""Room for one kernel, served as launched; room for each communicator, in any order."""


@pytest.mark.parametrize(("room", "in_order"), ROOMS)
@settings(max_examples=25)
@given(plan=plans, ranks=st.lists(st.lists(data(), min_size=2, max_size=2), min_size=3,
                                   max_size=3), overlap=st.booleans(),
       seed=st.integers(0, 99))  # fmt: skip
def test_gathers_and_reductions_of_idle_weights_never_wait_for_each_other(
    plan: ChunkLayout, ranks: list[list[BatchUsage]], overlap: bool, seed: int, room: int,
    in_order: bool,
) -> None:  # fmt: skip
    played = [lines(plan, overlap, used) for used in ranks]
    assert not standing_still(played, room, in_order, seed)


@pytest.mark.parametrize(("room", "in_order"), ROOMS)
@settings(max_examples=25)
@given(plan=plans, positions=st.sets(st.integers(0, 3), min_size=1), source=st.data(),
       seed=st.integers(0, 99))  # fmt: skip
def test_nor_do_they_with_exchanges_of_sequences_or_tokens_between(
    plan: ChunkLayout, positions: set[int], source: st.DataObject, seed: int, room: int,
    in_order: bool,
) -> None:  # fmt: skip
    plan = replace(plan, policy=replace(plan.policy, one_order=True))
    played = [lines(plan, True, [source.draw(data(tuple(positions)))]) for _ in range(3)]
    assert not standing_still(played, room, in_order, seed)


IDLE = BatchUsage(uses={"b1.w2": 0, "b1.q": 0, "b2.wo": 0}, without_trigger=frozenset({1}))


def stands_still_somewhere(rolling: bool, overlap: bool, exchanges: tuple[int, ...] = ()) -> bool:
    plan = chunk(3, rolling=rolling)
    usual = BatchUsage(exchanges=exchanges)
    played = [lines(plan, overlap, [used]) for used in (replace(IDLE, exchanges=exchanges), usual)]
    return any(standing_still(played, 1, True, seed) for seed in range(3))


def test_it_is_seen_where_exchanges_come_in_an_order_that_data_change() -> None:
    """Without ``Policy.one_order``, on a device that has room for one kernel."""
    assert stands_still_somewhere(rolling=False, overlap=True, exchanges=(1, 3))


def test_it_is_seen_where_the_sums_of_one_rank_leave_a_reduction_later() -> None:
    late: list[ScheduleLine] = []
    held: list[ScheduleLine] = []
    first, other = (lines(in_two_levels(chunk(3)), True, [used]) for used in (IDLE, BatchUsage()))
    for line in first:
        if line.kind == "RS" and not line.near:
            held.append(line)
            continue
        leaves = line.near or (line.kind == "WAIT" and line.phase == FINISH)
        late += [line, *held] if line.near else [*held, line] if leaves else [line]
        held = [] if leaves else held
    assert any(standing_still([late, other], 1, True, seed) for seed in range(3))


@pytest.mark.parametrize("rolling", [True, False])
def test_it_is_seen_where_a_weight_is_reduced_when_its_gradient_comes(
    rolling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that is put in: a turn comes when its gradient is ready, in no declared order."""

    def as_they_come(turns: Turns, weights: Any = None, last: bool = False) -> list[Any]:
        turns._ready.update(dict.fromkeys(weights or (), 1))
        taken = [
            turn for turn in turns._turns
            if weights is None or all(turns._ready.get(weight) for weight in turn[2])
        ]  # fmt: skip
        for turn in taken:
            turns._turns.remove(turn)
            turns.due.difference_update(turn[2])
        return taken

    assert not stands_still_somewhere(rolling, overlap=True)
    monkeypatch.setattr(Turns, "take", as_they_come)
    assert stands_still_somewhere(rolling, overlap=True)
