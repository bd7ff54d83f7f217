"""Random programs for the gather queue: chunks of a few small units, and events in the order in
which hooks report them, for what data may do (weights unused or used twice, blocks without a
gradient, silent triggers) and for models of all kinds (recompute, units in blocks, learned orders,
split backwards, near slices, frozen weights)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from random import Random
from typing import Any

from internsp.schedule.enclosing import Enclosing
from internsp.schedule.queue import GatherQueue
from internsp.schedule.terms import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    Action,
    Group,
    Parcel,
    Policy,
    Unit,
)
from tests.support import queue_oracle

Event = tuple[Any, ...]
"""A path from the queue to a method, such as ``backward.pre_backward``, and its arguments; or
``weight.autocast``, ``weight.freeze``: what a program does to a weight."""


@dataclass(eq=False)
class Weight:
    """What the schedule sees of a weight."""

    name: str
    needs_gather: bool = True
    needs_wait: bool = True
    slices: int = 0
    trained: bool = True
    compute_dtype: str = "bf16"
    gradient_bytes: int = 10


@dataclass
class Chunk:
    """What a queue is made for."""

    policy: Policy
    blocks: list[Unit[Weight]]
    root: list[Unit[Weight]]
    head: Unit[Weight] | None
    enclosing: list[tuple[Any, ...]]
    order: list[int]  # of the learned runs; empty: as declared
    options: dict[str, Any]
    parcels: list[Parcel[Weight]]

    @property
    def run(self) -> list[Unit[Weight]]:
        return [self.blocks[block] for block in self.order] or self.blocks

    @property
    def alone(self) -> Unit[Weight] | None:
        return None if self.head in self.root else self.head

    @property
    def rests(self) -> list[Unit[Weight]]:
        return [rest for _, _, rest, *_ in self.enclosing]

    @property
    def units(self) -> list[Unit[Weight]]:
        alone = [self.alone] if self.alone is not None else []
        return [*self.blocks, *self.root, *alone, *self.rests]

    @property
    def run_policy(self) -> Policy:
        kept = frozenset(n for n, block in enumerate(self.order) if block in self.policy.kept)
        rolling = self.policy.rolling and len(set(self.order)) == len(self.order)
        return replace(self.policy, blocks=len(self.order), kept=kept, rolling=rolling)

    def queue(self) -> GatherQueue[Weight]:
        """The queue of the library."""
        enclosing = [Enclosing(*each) for each in self.enclosing]
        made = GatherQueue(
            self.policy, self.blocks, self.root, self.head, enclosing, **self.options
        )
        if self.order:
            made.reorder(self.run_policy, self.run)
        made.reductions.exchanges.declare(self.parcels, 25)
        return made

    def oracle(self) -> Any:
        """The queue before its parts were divided."""
        made: Any = queue_oracle.GatherQueue(
            self.policy, self.blocks, self.root, self.head, **self.options
        )
        if self.enclosing:
            queue_oracle.EnclosingBlocks(
                made, [queue_oracle.Enclosing(*each) for each in self.enclosing]
            )
        if self.order:
            made.reorder(self.run_policy, self.run)
            made.strict = True  # as a learned order is required from the first step on
        made.reductions.exchanges.declare(self.parcels, 25)
        return made


def random_chunk(draw: Random) -> Chunk:
    """Of one to five blocks, with weights of ten bytes, alone or in groups of two."""
    blocks, depth = draw.randint(1, 5), draw.randint(0, 2)
    per_module = draw.random() < 0.25
    kept = frozenset(block for block in range(blocks) if draw.random() < 0.15)
    policy = Policy(
        blocks,
        depth,
        per_module=per_module,
        kept=kept if len(kept) < blocks else frozenset(),
        rolling=not per_module and draw.random() < 0.25,
        one_order=draw.random() < 0.2,
    )
    slices = 2 if draw.random() < 0.2 else 0

    def unit(name: str, slot: int, block: int = -1, again: bool = False, around: int = -1) -> Any:
        weights = [
            Weight(
                f"{name}.w{index}",
                needs_gather=draw.random() < 0.95,
                needs_wait=draw.random() < 0.95,
                slices=slices if block >= 0 else 0,
                trained=draw.random() < 0.9,
                gradient_bytes=draw.randint(1, 20),
            )
            for index in range(draw.randint(1, 4))
        ]
        trigger, at_entry = draw.choice([-1, 0, 1]), draw.random() < 0.2
        made = Unit(name, weights, slot, block, again, trigger, at_entry, around)
        groups: list[Group[Weight]] = []
        rest = weights
        while rest:
            together = draw.randint(1, 2)
            start = groups[-1].end if groups else 0
            group, rest = rest[:together], rest[together:]
            groups.append(Group(group, start, start + 10 * len(group)))
        made.groups = groups
        return made

    again = [draw.random() < 0.4] * blocks if draw.random() < 0.4 else [
        draw.random() < 0.4 for _ in range(blocks)
    ]  # fmt: skip
    around, enclosing = [-1] * blocks, []
    if blocks > 1 and draw.random() < 0.25:
        first = draw.randint(0, blocks - 2)
        last, whole = draw.randint(first + 1, blocks - 1), draw.random() < 0.5
        for block in range(first, last + 1):
            around[block], again[block] = 0, whole
        enclosing = [("around", 0, unit("rest", 103), first, last, whole)]
    made = [unit(f"b{n}", policy.slot(n), n, again[n], around[n]) for n in range(blocks)]
    root = [unit("embed", 100)] + ([unit("other", 101)] if draw.random() < 0.3 else [])
    head = draw.choice([None, root[0], unit("head", 102)])
    order: list[int] = []
    if not enclosing and draw.random() < 0.2:
        for _ in range(draw.randint(1, 6)):
            block = draw.randrange(blocks)
            order += [block] if order[-1:] != [block] else []
    options = {
        "overlap": draw.random() < 0.8,
        "strict": draw.random() < 0.7,
        "limit": draw.choice([0, 15, 1000]),
    }
    parcels = [Parcel(u.name, tuple(u.weights), 10) for u in (*reversed(made), *root)]
    return Chunk(
        policy, made, root, head, enclosing, order, options, parcels if draw.random() < 0.6 else []
    )


@dataclass
class Program:
    """Writes the events of a random program.

    Args:
        orderly: only what a model does whose blocks run in their order on every rank, with one
            gradient for each use at most. Otherwise weights are also used, released and written
            at any time, blocks are left out, gradients come too often, and passes fail.
    """

    chunk: Chunk
    draw: Random
    orderly: bool
    events: list[Event] = field(default_factory=list)
    used: Counter[tuple[int, Weight]] = field(default_factory=Counter)

    def maybe(self, probability: float) -> bool:
        """Something disorderly happens."""
        return not self.orderly and self.draw.random() < probability

    def noise(self) -> None:
        while self.maybe(0.03):
            unit = self.draw.choice(self.chunk.units)
            weight = self.draw.choice(unit.weights)
            phase = self.draw.choice([FORWARD, BACKWARD, RECOMPUTE])
            self.events.append(self.draw.choice([
                ("use", unit, weight, phase),
                ("release", unit, weight),
                ("slots.invalidate", [weight]),
                ("slots.wait_for", unit, weight, "settle"),
                ("prefetch_pass", self.draw.choice([FORWARD, BACKWARD])),
                ("weight.autocast", weight),
                ("weight.freeze", weight),
            ]))  # fmt: skip

    def steps(self) -> list[Event]:
        """All events of some steps."""
        draw, events = self.draw, self.events
        split = not self.chunk.order and draw.random() < 0.15
        split &= not (self.orderly and self.chunk.enclosing)
        for _ in range(draw.randint(1, 4)):
            if draw.random() < 0.1:
                every = [weight for unit in self.chunk.blocks for weight in unit.weights]
                events.append(("uses.set", {weight: draw.randint(1, 2) for weight in every}))
            if draw.random() < 0.2:
                events.append(("prefetch",))
            if draw.random() < 0.1:
                events.append(("reshard", draw.choice(self.chunk.units)))
            graphs = draw.choice([1, 1, 1, 2])
            for _ in range(graphs):
                self.forward()
            if not self.maybe(0.15):
                self.backward(graphs, split)
                if draw.random() < 0.15:  # of another loss, through the same graph
                    self.backward(1, split)
            if draw.random() < 0.5:
                events.append(("reductions.finish", draw.random() < 0.5))
            if draw.random() < 0.3:
                events.append(("reductions.complete",))
            if draw.random() < 0.3:
                events += [("slots.wait_for_gathers",), ("slots.invalidate_contents",)]
        return events

    def forward(self) -> None:
        draw, events = self.draw, self.events
        if self.maybe(0.1):
            events.append(("begin_blocks", draw.random() < 0.5))
        else:
            events.append(("root_pre_forward", draw.random() < 0.5, draw.random() < 0.1))
        leaves = bool(self.chunk.order) and self.maybe(0.1)
        for number, unit in enumerate(self.chunk.run):
            if leaves and number == 1:
                events.append(("passes.leave_order",))
            if unit.around >= 0 and unit.block == self.chunk.enclosing[0][3]:
                events.append(("backward.enclosing.pre_forward",))
                self.outside(self.chunk.rests[0])
            self.block(number, unit)
            if self.maybe(0.03):
                break
        for unit in (*self.chunk.root, *([self.chunk.alone] if self.chunk.alone else [])):
            self.outside(unit)

    def outside(self, unit: Unit[Weight]) -> None:
        for weight in unit.weights:
            self.events += [("use", unit, weight, FORWARD), ("release", unit, weight)]

    def block(self, number: int, unit: Unit[Weight]) -> None:
        """A block's forward."""
        draw, events = self.draw, self.events
        events.append(("pre_forward", unit))
        self.noise()
        if self.maybe(0.05):
            events.append(("slots.gather_again", unit))
        trigger_at = draw.randint(0, len(unit.weights))
        if unit.unshard_at_entry:
            events.append(("use_all", unit, FORWARD, True))
        for position, weight in enumerate(unit.weights):
            if position == trigger_at and draw.random() < 0.9:
                events.append(("trigger", unit, False))
            if unit.unshard_at_entry:
                self.used[number, weight] = 1
                continue
            uses = self.used[number, weight] = draw.choice([1, 1, 1, 0, 2])
            events += [("use", unit, weight, FORWARD), ("release", unit, weight)] * uses
        if unit.unshard_at_entry:
            events += [("release", unit, weight) for weight in unit.weights]
        events.append(("post_forward", unit))

    def backward(self, graphs: int, split: bool) -> None:
        draw, events = self.draw, self.events
        all_ranks = self.orderly or draw.random() < 0.7
        if split:
            events.append(("backward.begin_backward_part", False))
        if not self.maybe(0.05):
            events.append(("backward.root_pre_backward", not self.chunk.order))
        for graph in range(graphs):
            if graph:
                events.append(("backward.begin_earlier_graph", all_ranks, 0))
            if draw.random() < 0.8:
                events.append(("backward.prefetch_at_output",))
            self.graph(all_ranks, with_gradients=not split or not self.orderly)
        if self.maybe(0.04):
            events.append(("reset",))
            return
        events.append(("backward.root_post_backward", all_ranks, int(self.maybe(0.2))))
        events.append(("backward.end_pass",))
        if split:
            events.append(("backward.end_backward_part",))
            if draw.random() < 0.3:  # of another micro-batch, between the two parts
                self.forward()
            events.append(("backward.begin_backward_part", True))
            for unit in reversed(self.chunk.blocks):
                for weight in reversed(unit.weights):
                    if draw.random() < 0.9 and (weight.trained or not self.orderly):
                        events.append(("backward.grad_ready", unit, weight, False))
            events += [("backward.end_backward_part",), ("backward.end_pass",)]

    def graph(self, all_ranks: bool, with_gradients: bool) -> None:
        """Backward through the graph of one forward."""
        draw, events, head = self.draw, self.events, self.chunk.head
        if head is not None and draw.random() < 0.8:
            for weight in head.weights:
                events.append(("use", head, weight, BACKWARD))
                if with_gradients and (weight.trained or not self.orderly):
                    events.append(("backward.grad_ready", head, weight, False))
        again: list[Unit[Weight]] = []  # units that the recompute of a whole block has run
        for number, unit in reversed([*enumerate(self.chunk.run)]):
            if draw.random() < 0.1:
                continue
            if unit.around >= 0:
                events.append(("backward.enclosing.pre_backward", all_ranks))
                if unit.recomputed and not again and draw.random() < 0.8:
                    again = [each for each in self.chunk.blocks if each.around >= 0]
                    for each in again:
                        self.recompute(each)
            run = number if self.chunk.order or draw.random() < 0.5 else None
            events.append(("backward.pre_backward", unit, all_ranks, run))
            self.noise()
            if unit.recomputed and unit not in again:
                self.recompute(unit)
            if unit.unshard_at_entry and not unit.recomputed:
                events.append(("use_all", unit, BACKWARD, True))
            if with_gradients:
                self.gradients(number, unit)
            if head is not None and self.maybe(0.05):
                events.append(("backward.grad_ready", head, head.weights[0], False))

    def recompute(self, unit: Unit[Weight]) -> None:
        if unit.around >= 0:
            self.events.append(("backward.enclosing.recompute", unit))
        for weight in unit.weights:
            if self.draw.random() < 0.3:
                self.events.append(("trigger", unit, True))
            self.events.append(("use", unit, weight, RECOMPUTE))
        if unit.around >= 0:
            self.events.append(("backward.leave_recompute", unit))

    def gradients(self, number: int, unit: Unit[Weight]) -> None:
        draw, events = self.draw, self.events
        weights = [weight for weight in unit.weights if weight.trained or not self.orderly]
        if unit.unshard_at_entry and draw.random() < 0.5:
            events.append(("backward.grads_ready", unit, weights))
            return
        for weight in reversed(weights):
            most = self.used[number, weight] if self.orderly else 2
            for _ in range(min(most, draw.choice([1, 1, 1, 0, 2]))):
                if not unit.unshard_at_entry or not self.orderly:
                    events.append(("backward.use", unit, weight))
                events.append(("backward.grad_ready", unit, weight, self.maybe(0.1)))


def random_program(seed: int, orderly: bool) -> tuple[Chunk, list[Event]]:
    """A chunk and the events of a program; the same for the same seed."""
    draw = Random(seed)
    chunk = random_chunk(draw)
    return chunk, Program(chunk, draw, orderly).steps()


def report(queue: Any, event: Event, path: str) -> list[Action[Any]]:
    """Report ``event`` to a queue that has the method at ``path``."""
    arguments: Sequence[Any] = event[1:]
    if event[0] == "prefetch":
        arguments = (queue.prefetchable(),)
    elif event[0] in ("backward.enclosing.pre_forward", "backward.enclosing.pre_backward"):
        around = attrgetter(path.rpartition(".")[0])(queue)
        arguments = (around.blocks[0], *arguments)
    found = attrgetter(path)(queue)(*arguments)
    return found if isinstance(found, list) else []


def change_weight(event: Event) -> bool:
    """Do what ``event`` does to a weight, if it is such an event."""
    if event[0] == "weight.autocast":
        event[1].compute_dtype = "fp32" if event[1].compute_dtype == "bf16" else "bf16"
    elif event[0] == "weight.freeze":
        event[1].trained = not event[1].trained
    return str(event[0]).startswith("weight.")
