"""Simulate a pipeline's step: gathers and reductions of each rank, and whether the order can run.

The order of computations and messages is torch's (:mod:`internsp.pipeline.schedules`). The gathers
and reductions of a computation come from the simulator that also plans a step without a pipeline;
each chunk has one. No process group is needed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from internsp.errors import OrderError
from internsp.pipeline.hooks import (
    FULL,
    INPUT,
    WEIGHT,
    ComputeAction,
    last_weight_backwards,
    next_gather,
)
from internsp.pipeline.schedules import Order, ScheduleAction
from internsp.schedule.chunk import ChunkLayout, Schedule
from internsp.schedule.simulate import Simulator


def compute_actions(
    computations: Sequence[ScheduleAction],
    stages: Sequence[int],
    splits_backward: Mapping[int, bool],
) -> list[ComputeAction]:
    """The actions of a rank's stages, as hooks get them, made from its computations.

    The first stage has no input gradients, so that torch runs its full backward as the weight
    backward. A chunk that cannot split runs its full backward as the input backward.

    Args:
        stages: this rank's stages, ascending; their positions are the chunk indices.
        splits_backward: by stage, whether it can split its backward.
    """
    found = []
    for computation in computations:
        part = {"F": "", "B": FULL, "I": INPUT, "W": WEIGHT}[computation.kind]
        stage = computation.stage
        if part in (INPUT, WEIGHT) and (stage == 0 or not splits_backward[stage]):
            if part == (INPUT if stage == 0 else WEIGHT):
                continue
            part = FULL
        chunk = list(stages).index(stage)
        found.append(ComputeAction(stage, chunk, computation.micro_batch, part))
    return found


class _ChunkSimulator(Simulator):
    """Simulates one chunk's actions in any order; slots keep their contents between actions."""

    def __init__(self, plan: ChunkLayout, overlap: bool, out: Schedule) -> None:
        super().__init__(plan, overlap)
        self.schedule = out
        self.at_next_pass = lambda: None  # type: ignore[method-assign]
        self.set_uses()

    def run_action(self, action: ComputeAction) -> None:
        if not action.part:
            self.forward()
            return
        if action.part == WEIGHT:  # one order for all units
            self.queue.backward.begin_backward_part(weights=True, exchanges=self.exchanges)
            self.record(self.queue.backward.end_backward_part())
            self.end_pass()
        else:
            if action.part == INPUT:
                self.queue.backward.begin_backward_part(weights=False)
            self.backward(weight_gradients=action.part != INPUT)
        self.record(self.queue.reductions.finish(last=self.exchanges))


def simulate_with_launches(
    actions: Sequence[ComputeAction], plans: Sequence[ChunkLayout], overlap: bool
) -> tuple[Schedule, list[tuple[int, int]]]:
    """Gathers and reductions of one rank in one step, and how many of each an action launches.

    Slots are empty at its beginning.

    Args:
        actions: this rank's actions, from :func:`compute_actions`.
        plans: the plans of this rank's chunks.
    """
    out = Schedule()
    chunks = [_ChunkSimulator(plan, overlap, out) for plan in plans]
    launched = []
    reducing = last_weight_backwards(actions)
    for index, action in enumerate(actions):
        before = len(out.actions)
        coming = next_gather(actions, index)

        def expect(coming: tuple[ComputeAction, str] | None = coming) -> None:
            if coming is not None:
                other = chunks[coming[0].chunk]
                other.record(other.queue.prefetch_pass(coming[1]))

        simulated = chunks[action.chunk]
        simulated.at_next_pass = expect  # type: ignore[method-assign]
        accumulates = simulated.plan.policy.accumulate_whole
        simulated.queue.reductions.accumulating = accumulates and index not in reducing
        simulated.exchanges = index in reducing
        simulated.run_action(action)
        expect()
        kinds = Counter(action.kind for action in out.actions[before:])
        launched.append((kinds["AG"], kinds["RS"]))
    return out, launched


@dataclass(frozen=True)
class TimedAction:
    """An action of a rank with its start and end; the unit of time is one forward."""

    rank: int
    action: ScheduleAction
    start: float
    end: float


COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def check_order(
    order: Order,
    rank_of: Callable[[int], int],
    stages: int,
    cost: Callable[[ScheduleAction], float] = lambda action: COSTS[action.kind],
    message: float = 0.0,
) -> list[TimedAction]:
    """Simulate the computations and messages of all ranks, and check that the order can run.

    Messages between two ranks have no tag: the n-th received is the n-th sent.

    Args:
        cost: time of a computation; by default one unit for a forward, an input backward and a
            weight backward.
        message: time from a send to its arrival.

    Returns:
        Every computation with its start and end.

    Raises:
        OrderError: a rank would wait for ever, or receive another message than it expects.
    """
    _check_pairs(order, rank_of)
    arrived: dict[_Key, float] = {}
    clocks = dict.fromkeys(order, 0.0)
    at = dict.fromkeys(order, 0)
    played: list[TimedAction] = []
    while any(at[rank] < len(order[rank]) for rank in order):
        moved = False
        for rank, actions in order.items():
            while at[rank] < len(actions):
                action = actions[at[rank]]
                key, end = _key(action), 0.0  # a receive is posted at once
                needed = _needed(key, rank_of, stages)
                if not all(map(arrived.__contains__, needed)):
                    break
                if action.kind in COSTS:
                    begin = max(clocks[rank], *map(arrived.__getitem__, needed), 0.0)
                    clocks[rank] = end = begin + cost(action)
                    played.append(TimedAction(rank, action, begin, end))
                elif action.kind.startswith("SEND"):
                    end = clocks[rank] + message
                arrived[key] = end
                at[rank] += 1
                moved = True
        if not moved:
            raise OrderError(_describe_deadlock(order, at))
    return played


_Key = tuple[int, str, int]
"""Stage, kind and micro-batch of an action; an input backward counts as a full one."""


def _key(action: ScheduleAction) -> _Key:
    return action.stage, "B" if action.kind == "I" else action.kind, action.micro_batch


def _needed(key: _Key, rank_of: Callable[[int], int], stages: int) -> tuple[_Key, ...]:
    """What must have ended, or arrived, before an action."""
    stage, kind, number = key
    if kind.startswith("RECV"):
        return ()
    if kind.startswith("SEND"):
        return ((stage, kind.removeprefix("SEND_"), number),)
    if kind == "W":
        return ((stage, "B", number),)
    source, own = (stage - 1, ()) if kind == "F" else (stage + 1, ((stage, "F", number),))
    if not 0 <= source < stages:
        return own
    if rank_of(source) == rank_of(stage):
        return *own, (source, kind, number)
    return *own, (stage, f"RECV_{kind}", number), (source, f"SEND_{kind}", number)


def _check_pairs(order: Order, rank_of: Callable[[int], int]) -> None:
    """Check that each message that one rank sends is the next that another one expects of it."""
    sent: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    expected: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for rank, actions in order.items():
        for action in actions:
            side, _, way = action.kind.partition("_")
            if not way:
                continue
            ahead = 1 if way == "F" else -1
            source = action.stage if side == "SEND" else action.stage - ahead
            what = "output" if way == "F" else "gradient"
            text = f"{what} of stage {source}, micro-batch {action.micro_batch}"
            if side == "SEND":
                sent[rank, rank_of(source + ahead)].append(text)
            else:
                expected[rank_of(source), rank].append(text)
    for pair in {*sent, *expected}:
        messages = zip_longest(sent[pair], expected[pair], fillvalue="nothing")
        for number, (a, b) in enumerate(messages):
            if a != b:
                raise OrderError(
                    f"message {number} from pipeline rank {pair[0]} to {pair[1]} is {a}, but the "
                    f"receiver expects {b}: the schedule's lists do not fit each other"
                )


def _describe_deadlock(order: Order, at: Mapping[int, int]) -> str:
    waiting = [
        f"pipeline rank {rank} at {order[rank][at[rank]]}"
        for rank in order
        if at[rank] < len(order[rank])
    ]
    return f"the schedule would wait for ever: {', '.join(waiting)} (stage, action, micro-batch)"
