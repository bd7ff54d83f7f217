"""Seconds of a planned schedule: its actions, replayed on a compute stream and on a link. Pure.

The actions are those that :mod:`internsp.schedule.simulate` returns, which ``internsp plan`` prints
and a trace of a run has. Between them blocks compute: a forward and a recompute at each use of a
weight, gradients where a unit's backward comes to it. A message starts when it is launched and
those before it have ended; computation beside it is slowed down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from internsp.schedule.chunk import ChunkLayout, ScheduleLine, UnitLayout, WeightLayout
from internsp.schedule.simulate import Simulator
from internsp.schedule.terms import BACKWARD, FINISH

GRADIENT = "GRADIENT"
GATHER, REDUCE, EXCHANGE = "AG", "RS", "EX"


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
