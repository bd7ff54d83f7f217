"""Seconds of a planned step, replayed action by action: what ``internsp plan`` prints.

The actions are those that :mod:`internsp.schedule.simulate` returns, which ``internsp plan`` prints
and a trace of a run has; they are replayed on a compute stream and on a link. Between them blocks
compute: a forward and a recompute at each use of a weight, gradients where a unit's backward comes
to it. A message starts when it is launched and those before it have ended; computation beside it is
slowed down.

Of many micro-batches a few are replayed and multiplied: from the second on, each takes as long as
the one before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from internsp.app.config import Config
from internsp.app.plan.block_seconds import block_seconds
from internsp.app.plan.compute import head
from internsp.app.plan.configured import on_machines, workload_of
from internsp.app.plan.devices import Device
from internsp.app.plan.links import Group
from internsp.app.plan.seconds import (
    Part,
    Stepped,
    StepSeconds,
    ends,
    paces,
    step_seconds,
)
from internsp.app.plan.step import Plan, make_plan
from internsp.app.plan.workload import Workload
from internsp.pipeline.schedules import ScheduleAction
from internsp.pipeline.simulate import check_order
from internsp.schedule.chunk import ChunkLayout, ScheduleLine, UnitLayout, WeightLayout
from internsp.schedule.simulate import Simulator, simulate
from internsp.schedule.terms import BACKWARD, FINISH, FORWARD, RECOMPUTE

GRADIENT = "GRADIENT"
GATHER, REDUCE, EXCHANGE = "AG", "RS", "EX"
_FEW = 200  # passes of blocks that are replayed one by one
_KINDS: Mapping[str, str] = {Part.GATHERS: GATHER, Part.REDUCTIONS: REDUCE, Part.REPLICAS: EXCHANGE}
_PASSES = (2, 3)  # numbers of micro-batches that are multiplied


class Computing(Simulator):
    """A simulator that also records where gradients of a weight are computed."""

    def _grad_ready(
        self,
        unit: UnitLayout,
        weight: WeightLayout,
        last: bool = False,
        weight_gradients: bool = True,
    ) -> None:
        self.add(GRADIENT, BACKWARD, weight)
        super()._grad_ready(unit, weight, last, weight_gradients)


@dataclass
class Clocks:
    """A compute stream and a link.

    Attributes:
        now: seconds of the compute stream.
        free: when the link has no message any more.
        waited: seconds that computation waited for a kind of message.
        slowed: seconds that computation took longer beside a kind of message.
    """

    slowdown: float
    now: float = 0.0
    free: float = 0.0
    kind: str = GATHER
    waited: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    slowed: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def compute(self, seconds: float) -> None:
        """Compute beside the messages that are on their way."""
        beside = max(0.0, self.free - self.now)
        rate = 1 / (1 + self.slowdown)
        done = min(seconds, beside * rate)
        taken = done / rate + seconds - done
        self.slowed[self.kind] += taken - seconds
        self.now += taken

    def send(self, kind: str, seconds: float) -> float:
        """Launch a message; returns when it has arrived."""
        self.kind = kind
        self.free = max(self.now, self.free) + seconds
        return self.free

    def wait(self, kind: str, until: float) -> None:
        """Wait for a message."""
        self.waited[kind] += max(0.0, until - self.now)
        self.now = max(self.now, until)


UnitSeconds = Mapping[str, tuple[float, float]]
"""Seconds of computation of a unit in one micro-batch, of its weights and of attention: of
``FORWARD`` and ``RECOMPUTE``, and as ``GRADIENT`` of its backward.

Those of weights are divided by elements; attention computes before the weight at which the next
unit's gather is triggered, the output projection, unless that is the unit's entry."""


def replay(
    chunk: ChunkLayout,
    actions: Sequence[ScheduleLine],
    units: Mapping[str, UnitSeconds],
    message: Mapping[str, Mapping[str, float]],
    slowdown: float,
) -> Clocks:
    """Replay ``actions`` of ``chunk``.

    Args:
        units: by the name of a unit, what it computes; others compute nothing.
        message: by kind (``AG``, ``RS``, ``EX``), seconds of the message of a weight or parcel.
    """
    clocks = Clocks(slowdown)
    weights = _shares(chunk)
    arrives: dict[tuple[str, str], float] = {}
    for action in actions:
        kind, name = action.kind, action.weight
        if kind in (GATHER, REDUCE, EXCHANGE):
            arrives[kind, name] = clocks.send(kind, message[kind].get(name, 0.0))
        elif kind == "WAIT":
            sent = REDUCE if action.phase == FINISH else GATHER
            clocks.wait(sent, arrives.get((sent, name), 0.0))
        elif kind in ("USE", GRADIENT) and name in weights:
            of, share, attends = weights[name]
            phase = GRADIENT if kind == GRADIENT else action.phase
            if seconds := units.get(of, {}).get(phase):
                clocks.compute(share * seconds[0] + attends * seconds[1])
    for kind in (REDUCE, EXCHANGE):  # the step ends when all have arrived
        last = max((end for (own, _), end in arrives.items() if own == kind), default=0.0)
        clocks.wait(kind, last)
    return clocks


def _shares(chunk: ChunkLayout) -> dict[str, tuple[str, float, float]]:
    """By weight: its unit's name, its share of the unit's elements, and that of attention."""
    found = {}
    for unit in chunk.units:
        sizes = [weight.unsharded_bytes or weight.slot_bytes for weight in unit.weights]
        at = unit.trigger_at - 1
        for position, weight in enumerate(unit.weights):
            share = sizes[position] / (sum(sizes) or 1)
            attends = float(position == at) if at >= 0 else share
            found[weight.name] = (unit.name, share, attends)
    return found


class StepReplay:
    """A planned step on any device of the kind whose machines it was planned for."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.load = workload_of(plan.config, plan.shape)
        overlap = plan.config.weight_parallel.overlap
        self._actions = cache(lambda n: simulate(plan.chunk, n, overlap, by=Computing).actions)

    def on(self, device: Device) -> StepSeconds:
        """Seconds of the step."""
        load = self.load
        closed = step_seconds(load, device)
        if load.degrees.pipeline > 1:
            return _pipeline(self.plan, load, device, closed)
        if self.plan.shape.weight == 1:
            return closed
        number, at = load.micro_batches, _PASSES
        if number <= at[1] or load.model.layers * number <= _FEW:
            at = (number, number)
        found = {n: _replay(load, device, self.plan.chunk, self._actions(n)) for n in {*at}}

        def multiplied(name: str, kind: str) -> float:
            values = [getattr(found[n], name)[kind] for n in at]
            return max(0.0, values[1] + (values[1] - values[0]) * (number - at[1]))

        slowed = {part: multiplied("slowed", kind) for part, kind in _KINDS.items()}
        waited = {p: multiplied("waited", kind) + slowed[p] for p, kind in _KINDS.items()}
        messages = closed.messages - closed.parts.get(Part.REPLICAS, 0.0)
        parts = {part: value for part, value in {**closed.parts, **waited}.items() if value > 0}
        return StepSeconds(parts, messages, closed.compute, slowed)


def replayed(config: Config, ranks: int, device: Device) -> StepSeconds:
    """Seconds of a step of ``config`` on so many devices."""
    return StepReplay(make_plan(on_machines(config, ranks, device), ranks)).on(device)


def _pipeline(plan: Plan, load: Workload, device: Device, closed: StepSeconds) -> StepSeconds:
    """The order of torch's schedule, each pass with the seconds of its stage."""
    stages, number = load.degrees.pipeline, load.micro_batches
    blocks = {chunk.stage: len(chunk.blocks) for rank in plan.ranks for chunk in rank.chunks}
    chunks = len(blocks) // stages
    block, outer = block_seconds(load, device), ends(load, device)
    multiplied = head(load, device)[1].products
    passes = number * stages
    waits = [closed.parts.get(name, 0.0) / number for name in (Part.GATHERS, Part.REDUCTIONS)]
    mean = load.model.layers / (stages * chunks)
    ahead, behind = paces(load, block)
    sums = Stepped.of(load, device).accumulated / chunks

    def cost(action: ScheduleAction) -> float:
        last = action.stage == stages * chunks - 1
        share = blocks[action.stage]
        each = share / mean / chunks
        if action.kind == "F":
            own = share * ahead + waits[0] / 2 * each
            return own + (outer[0] if last else 0.0)
        own = share * behind + (waits[0] / 2 + waits[1]) * each
        own += outer[1] if last else 0.0
        own += sums
        weights = (share * block.backward.products + last * multiplied) / 2 + sums
        return {"B": own, "I": own - weights, "W": weights}[action.kind]

    rank_of = partial(plan.kind.rank_of, ranks=stages, chunks=chunks)
    neighbors = Group(2, load.degrees.devices // stages, device)
    message = neighbors.pass_on(load.tokens * load.model.hidden * 2)
    timed = check_order(plan.order, rank_of, stages * chunks, cost, message)
    parts = {name: value for name, value in closed.parts.items() if name != Part.BUBBLE}
    after = (Part.REPLICAS, Part.OPTIMIZER, Part.COPIES)
    of_passes = sum(value for name, value in parts.items() if name not in after)
    end = max(action.end for action in timed)
    # Idle time is what the slowest rank needs beyond an average one, and all that it waits.
    parts[Part.BUBBLE] = max(0.0, end - of_passes)
    messages = closed.messages + 2 * message * passes / stages
    return StepSeconds(parts, messages, closed.compute)


def _replay(
    load: Workload, device: Device, chunk: ChunkLayout, actions: Sequence[ScheduleLine]
) -> Clocks:
    block = block_seconds(load, device)
    before, after = ends(load, device)
    share = load.recompute.products or 1.0  # of the blocks that recompute
    attends = block.forward.attention + block.sequences[0]
    again = block.again.attention / share
    backward = block.backward.attention + block.sequences[1]
    pace = paces(load, block)
    rest = [
        pace[0] - attends,
        (block.again.total - block.again.attention) / share,
        pace[1] - block.again.total - backward,
    ]
    one = {
        FORWARD: (rest[0], attends), RECOMPUTE: (rest[1], again), GRADIENT: (rest[2], backward),
    }  # fmt: skip
    units = dict.fromkeys((unit.name for unit in chunk.blocks), one)
    if chunk.head is not None:
        units[chunk.head.name] = {FORWARD: (before, 0.0), GRADIENT: (after, 0.0)}
    return replay(chunk, actions, units, messages(load, device, chunk), device.fitted.slowdown)


def messages(load: Workload, device: Device, chunk: ChunkLayout) -> dict[str, dict[str, float]]:
    """Seconds of each message, by kind and by the name of its weight or parcel."""
    degrees, parts = load.degrees, load.habits.sends_parts
    group = Group(degrees.sharded, degrees.tensor, device)
    few = Group(degrees.expert_shards, degrees.expert_stride, device)
    others = Group(degrees.copies, degrees.tensor * degrees.sharded, device)
    found: dict[str, dict[str, float]] = {GATHER: {}, REDUCE: {}, EXCHANGE: {}}
    for unit in chunk.units:
        for weight in unit.weights:
            quantized = load.habits.gather_bytes < 2 and weight.encoding is not None
            size = weight.unsharded_bytes * (0.5 if quantized else 1.0)
            among = few if weight.expert and degrees.expert_shards else group
            found[GATHER][weight.name] = among.gather(size)
            in_parts = parts and not load.habits.reduces_in_ring
            found[REDUCE][weight.name] = among.reduce(weight.gradient_bytes, in_parts)
            if weight.far_bytes:  # half for each of its two messages
                groups = round(among.size * (1 - weight.reduce_bytes / weight.gradient_bytes))
                near = replace(among, size=among.size // groups)
                far = replace(among, size=groups, stride=among.stride * near.size)
                both = near.reduce(weight.gradient_bytes, parts)
                both += far.reduce(weight.far_bytes * groups / (groups - 1), parts)
                found[REDUCE][weight.name] = both / 2
    parcels = chunk.parcels if chunk.exchanged else ()
    alike = others
    if degrees.expert_shards:
        alike = Group(degrees.expert_copies, degrees.expert * degrees.expert_shards, device)
    names = Counter(parcel.name for parcel in parcels)  # a unit's own, and its experts'
    for parcel in parcels:
        among = alike if parcel.weights[0].expert else others
        mean = among.all_reduce(parcel.nbytes, parts) / names[parcel.name]
        found[EXCHANGE][parcel.name] = found[EXCHANGE].get(parcel.name, 0.0) + mean
    return found
