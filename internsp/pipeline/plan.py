"""Pure: what each rank of a pipeline gathers and reduces in a step, and whether the plan can run.

The order of computations and messages is torch's own (:mod:`internsp.pipeline.schedules`); what
every computation makes of the weights is told by the simulator that also prints a plan without a
pipeline, one for each chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from internsp.errors import OrderError
from internsp.pipeline.hooks import (
    FULL,
    INPUT,
    WEIGHT,
    ComputeAction,
    following,
    last_weight_backwards,
    phase_of,
)
from internsp.pipeline.schedules import Order, Step
from internsp.plan.chunk import ChunkPlan, Schedule
from internsp.plan.simulate import Simulator
from internsp.wp.schedule import FORWARD


def passes(
    steps: Sequence[Step], stages: Sequence[int], splits: Mapping[int, bool]
) -> list[ComputeAction]:
    """What a rank's stages do, as their hooks see it, from its computations.

    The first stage has no input to give gradients to, so torch leaves it all to the weight part;
    a chunk that cannot split computes it all in the input part.

    Args:
        stages: of this rank, ascending; their positions are the chunks.
        splits: by stage, whether weight gradients may come apart.
    """
    found = []
    for step in steps:
        part = {"F": "", "B": FULL, "I": INPUT, "W": WEIGHT}[step.kind]
        if part in (INPUT, WEIGHT) and (step.stage == 0 or not splits[step.stage]):
            if part == (INPUT if step.stage == 0 else WEIGHT):
                continue
            part = FULL
        chunk = list(stages).index(step.stage)
        found.append(ComputeAction(step.stage, chunk, step.micro_batch, part))
    return found


class _ChunkSimulator(Simulator):
    """A chunk's passes, in any order; slots and what is in them persist between passes."""

    def __init__(self, plan: ChunkPlan, overlap: bool, out: Schedule) -> None:
        super().__init__(plan, overlap)
        self.out = out
        self.at_next_pass = lambda: None  # type: ignore[method-assign]
        self.learn()

    def run_pass(self, action: ComputeAction) -> None:
        if not action.part:
            self.forward()
            return
        if action.part == WEIGHT:
            self._weights()
        else:
            if action.part == INPUT:
                self.queue.begin_part(weights=False)
            self.backward(gives=action.part != INPUT)
        self.perform(self.queue.reductions.finish(last=self.exchanges))

    def _weights(self) -> None:
        """A weight part: one order of all units."""
        self.queue.begin_part(weights=True, exchanges=self.exchanges)
        self.perform(self.queue.end_part())
        self.end_pass()


def simulate_passes(
    actions: Sequence[ComputeAction], plans: Sequence[ChunkPlan], overlap: bool = True
) -> Schedule:
    """The actions of one rank in one step from rest.

    Args:
        actions: from :func:`passes`.
        plans: of this rank's chunks.
    """
    return simulate_each(actions, plans, overlap)[0]


def simulate_each(
    actions: Sequence[ComputeAction], plans: Sequence[ChunkPlan], overlap: bool = True
) -> tuple[Schedule, list[tuple[int, int]]]:
    """:func:`simulate_passes`, and for each pass how many gathers and reductions it launched."""
    out = Schedule()
    chunks = [_ChunkSimulator(plan, overlap, out) for plan in plans]
    launched = []
    reducing = last_weight_backwards(actions)
    for index, action in enumerate(actions):
        before = len(out.actions)
        coming = following(actions, index)

        def expect(coming: ComputeAction | None = coming) -> None:
            if coming is not None:
                other = chunks[coming.chunk]
                other.perform(other.queue.expect(phase_of(coming) or FORWARD))

        chunk = chunks[action.chunk]
        chunk.at_next_pass = expect  # type: ignore[method-assign]
        whole = chunk.plan.policy.accumulate_whole
        chunk.queue.reductions.accumulating = whole and index not in reducing
        chunk.exchanges = index in reducing
        chunk.run_pass(action)
        expect()
        kinds = Counter(action.kind for action in out.actions[before:])
        launched.append((kinds["AG"], kinds["RS"]))
    return out, launched


@dataclass(frozen=True)
class Timed:
    """A step of a rank with its place in time, a forward taking one unit."""

    rank: int
    step: Step
    start: float
    end: float


COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def check(order: Order, rank_of: Callable[[int], int], stages: int) -> list[Timed]:
    """Play the computations and messages of all ranks.

    Messages between two ranks carry no name: the n-th received is the n-th sent.

    Returns:
        Every computation with its time, were forward, input and weight gradients to take one unit
        each and messages none.

    Raises:
        OrderError: some rank would wait for ever, or receive another message than it expects.
    """
    _check_pairs(order, rank_of)
    arrived: dict[tuple[int, str, int], float] = {}
    clocks = dict.fromkeys(order, 0.0)
    at = dict.fromkeys(order, 0)
    played: list[Timed] = []
    while any(at[rank] < len(order[rank]) for rank in order):
        moved = False
        for rank, steps in order.items():
            while at[rank] < len(steps):
                step = steps[at[rank]]
                start = _ready(step, arrived, rank_of, stages)
                if start is None:
                    break
                if step.kind in COSTS:
                    begin = max(clocks[rank], start)
                    clocks[rank] = begin + COSTS[step.kind]
                    played.append(Timed(rank, step, begin, clocks[rank]))
                    arrived[step.stage, step.kind, step.micro_batch] = clocks[rank]
                elif step.kind.startswith("SEND"):
                    sent = (step.stage, step.kind, step.micro_batch)
                    arrived[sent] = clocks[rank]
                else:
                    arrived[step.stage, step.kind, step.micro_batch] = 0.0  # posted
                at[rank] += 1
                moved = True
        if not moved:
            raise OrderError(_stuck(order, at))
    return played


def _ready(
    step: Step,
    arrived: Mapping[tuple[int, str, int], float],
    rank_of: Callable[[int], int],
    stages: int,
) -> float | None:
    """From when ``step`` can run; ``None``: not yet."""
    stage, number = step.stage, step.micro_batch
    if step.kind == "F":
        return _input(stage, stage - 1, "F", number, arrived, rank_of, stages)
    if step.kind in ("B", "I"):
        if (stage, "F", number) not in arrived:
            return None
        return _input(stage, stage + 1, "B", number, arrived, rank_of, stages)
    if step.kind == "W":
        return arrived.get((stage, "I", number))
    if step.kind == "SEND_F":
        return arrived.get((stage, "F", number))
    if step.kind == "SEND_B":
        return _first(arrived, stage, ("B", "I"), number)
    return 0.0  # a receive is posted at once


def _input(
    stage: int,
    source: int,
    kind: str,
    number: int,
    arrived: Mapping[tuple[int, str, int], float],
    rank_of: Callable[[int], int],
    stages: int,
) -> float | None:
    """When what ``stage`` computes from is there: local, or sent and asked for."""
    if not 0 <= source < stages:
        return 0.0
    if rank_of(source) == rank_of(stage):
        return _first(arrived, source, ("F",) if kind == "F" else ("B", "I"), number)
    if (stage, f"RECV_{kind}", number) not in arrived:
        return None
    return arrived.get((source, f"SEND_{kind}", number))


def _first(
    arrived: Mapping[tuple[int, str, int], float], stage: int, kinds: Sequence[str], number: int
) -> float | None:
    """When that of ``kinds`` which the schedule has was computed."""
    return next((t for k in kinds if (t := arrived.get((stage, k, number))) is not None), None)


def _check_pairs(order: Order, rank_of: Callable[[int], int]) -> None:
    sent: dict[tuple[int, int], list[str]] = {}
    expected: dict[tuple[int, int], list[str]] = {}
    for rank, steps in order.items():
        for step in steps:
            forward = step.kind.endswith("_F")
            if step.kind.startswith("SEND"):
                peer = rank_of(step.stage + (1 if forward else -1))
                what = f"{'output' if forward else 'gradient'} of stage {step.stage}"
                sent.setdefault((rank, peer), []).append(f"{what}, micro-batch {step.micro_batch}")
            elif step.kind.startswith("RECV"):
                source = step.stage + (-1 if forward else 1)
                what = f"{'output' if forward else 'gradient'} of stage {source}"
                expected.setdefault((rank_of(source), rank), []).append(
                    f"{what}, micro-batch {step.micro_batch}"
                )
    for pair in {*sent, *expected}:
        mine, theirs = sent.get(pair, []), expected.get(pair, [])
        for number in range(max(len(mine), len(theirs))):
            a = mine[number] if number < len(mine) else "nothing"
            b = theirs[number] if number < len(theirs) else "nothing"
            if a != b:
                raise OrderError(
                    f"message {number} from pipeline rank {pair[0]} to {pair[1]} is {a}, but the "
                    f"receiver expects {b}: the schedule's lists do not fit each other"
                )


def _stuck(order: Order, at: Mapping[int, int]) -> str:
    waiting = [
        f"pipeline rank {rank} at {order[rank][at[rank]]}"
        for rank in order
        if at[rank] < len(order[rank])
    ]
    return f"the schedule would wait for ever: {', '.join(waiting)} (stage, action, micro-batch)"
