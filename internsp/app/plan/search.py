"""``internsp plan --search``: the layouts of a step that take least seconds on so many devices.

Sets of layouts are opened in the order of a lower bound of their seconds, so that layouts come in
the order of their seconds. One that does not fit by a lower bound of its memory is left out; of the
others each is planned in its turn, and counts if a run takes it and its plan fits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from internsp.app.config import Config
from internsp.app.config.tiles import tile_tokens
from internsp.app.plan.answer import FREE, changed
from internsp.app.plan.block_seconds import BlockSeconds, block_seconds
from internsp.app.plan.configured import on_machines, workload_of
from internsp.app.plan.devices import Device
from internsp.app.plan.least import LeastBytes
from internsp.app.plan.longest import MemoryBudget
from internsp.app.plan.observe import Observations
from internsp.app.plan.seconds import (
    Computed,
    Stepped,
    StepSeconds,
    composed,
    ends,
    least_of,
    step_seconds,
)
from internsp.app.plan.step import Plan
from internsp.app.plan.weight_seconds import WeightMessages
from internsp.app.plan.workload import Recompute, Workload
from internsp.errors import ConfigError
from internsp.mesh import MeshShape

ROWS = 10
_WORTH = 0.999  # what fewer ranks of the optimizer take of the seconds at most, to be preferred
TIE = 0.05  # seconds that differ by less are within the error of sharded weights' rows
CHECKPOINTS: dict[str, tuple[Mapping[str, Any], Recompute]] = {
    "none": ({"mode": "none"}, Recompute()),
    "selective": ({"mode": "selective"}, Recompute(1.0, 0.0, 1.0)),
    "half": ({"mode": "full", "fraction": 0.5}, Recompute(0.5, 0.5, 0.5)),
    "full": ({"mode": "full"}, Recompute(1.0, 1.0, 1.0)),
}
INTERLEAVED, V_SHAPED = "Interleaved1F1B", "ZBVZeroBubble"
SCHEDULES = (("1F1B", 1), (INTERLEAVED, 2), (V_SHAPED, 2))


@dataclass(frozen=True)
class Layout:
    """What a search chooses among: degrees, micro-batches and what is recomputed.

    Attributes:
        optimizer_ranks: 0: all replicas.
        expert, expert_weight: of a model with experts; 0: there are none.
        offload: whether the optimizer's state and inputs of blocks are in host memory.
        tiled: whether feed-forwards are computed in tiles of the sequence.
    """

    pipeline: int
    schedule: tuple[str, int]
    sequence: int
    ring: int
    weight: int
    optimizer_ranks: int
    micro_batches: int
    checkpoint: str
    offload: bool
    expert: int = 0
    expert_weight: int = 0
    tiled: bool = False

    def settings(self) -> dict[str, Any]:
        """The keys of a configuration, as ``section.key``, and their values."""
        again = {"mode": "none", "fraction": 1.0, "offload": None} | dict(
            CHECKPOINTS[self.checkpoint][0]
        )
        if self.offload and again["mode"] == "full":
            again["offload"] = "all"
        found: dict[str, Any] = {
            "parallel.weight": self.weight,
            "parallel.sequence": self.sequence,
            "parallel.pipeline": self.pipeline,
            "parallel.optimizer_ranks": self.optimizer_ranks or None,
            "pipeline.schedule": self.schedule[0],
            "pipeline.chunks": self.schedule[1],
            "sequence.ring": self.ring if self.ring > 1 else None,
            "train.micro_batches": self.micro_batches,
            "weight_parallel.offload": ("optimizer",) if self.offload else (),
        }
        found["activation_checkpoint.tiles"] = "auto" if self.tiled else 1
        if self.expert:
            found |= {"parallel.expert": self.expert, "parallel.expert_weight": self.expert_weight}
        return found | {f"activation_checkpoint.{key}": value for key, value in again.items()}

    @property
    def whole(self) -> bool:
        """Whether no weight is sharded."""
        return max(self.weight, self.expert_weight) == 1

    @property
    def axes(self) -> int:
        """How many things are not as on one device: ties go to the fewest."""
        degrees = (self.pipeline, self.sequence, self.ring, self.weight, self.micro_batches)
        away = 2 * self.offload
        experts = (self.expert > 1) + (self.expert > 0 and self.expert_weight != self.weight)
        again = self.checkpoint != "none"
        return sum(degree > 1 for degree in degrees) + experts + again + away + self.tiled

    def label(self) -> str:
        """One line of a table."""
        told = [f"weight {self.weight}"]
        if self.sequence > 1:
            around = f" (ring {self.ring})" if self.ring > 1 else ""
            told.append(f"sequence {self.sequence}{around}")
        if self.pipeline > 1:
            told.append(f"pipeline {self.pipeline} {self.schedule[0]}")
        if self.expert:
            told.append(f"experts {self.expert} x {self.expert_weight}")
        if self.optimizer_ranks:
            told.append(f"optimizer ranks {self.optimizer_ranks}")
        told.append(f"{self.micro_batches} micro-batches")
        told.append(f"checkpoint {self.checkpoint}")
        told += ["tiles"] * self.tiled + ["offloaded"] * self.offload
        return ", ".join(told)


@dataclass(frozen=True)
class Found:
    """A layout that a run takes and that fits, with its predicted step.

    Attributes:
        plan: of its objects.
        nbytes: what its fullest rank needs, by its plan.
    """

    layout: Layout
    load: Workload
    seconds: StepSeconds
    config: Config
    plan: Plan
    nbytes: int


@dataclass(frozen=True)
class Searched:
    """The best layouts, the least seconds first.

    Attributes:
        best: as many as were asked for, if there are.
        possible, evaluated, planned: numbers of layouts: all, those whose seconds were computed,
            and those that were planned.
        space: of them.
    """

    space: Space
    best: tuple[Found, ...]
    possible: int
    evaluated: int
    planned: int


class Space:
    """All layouts of a configuration on so many devices.

    Args:
        config: its model, batch, sequence and dtypes stay; degrees, micro-batches, schedule and
            checkpointing are searched.
    """

    def __init__(self, config: Config, ranks: int, device: Device) -> None:
        self.config, self.ranks, self.device = config, ranks, device
        own = (1, 1) if config.model.mixtures else (0, 0)
        alone = Layout(1, SCHEDULES[0], 1, 1, 1, 0, 1, "none", False, *own)
        base = changed(config, alone.settings())
        if base is None:
            raise ConfigError("--search: the configuration is refused with all degrees 1")
        self.base = workload_of(base, MeshShape(1))
        self.memory, self.observations = FREE * device.memory, Observations()
        self.least = LeastBytes(base, self.base, device.near_ranks, self.observations)
        self._blocks: dict[object, tuple[BlockSeconds, tuple[float, float]]] = {}
        self.computed, self.ways = cache(self._computed), cache(self._ways)
        self.sent = cache(lambda how: WeightMessages.of(self.load(how), device))
        self.stepped = cache(lambda how: Stepped.of(self.load(how), device))

    def allows(self, layout: Layout) -> bool:
        """Whether its degrees, batch and blocks divide."""
        weights, sizes = self.sizes(layout)
        family = replace(layout, checkpoint="none", weight=1, expert_weight=min(1, layout.expert))
        shards = layout.weight in weights and layout.expert_weight in sizes
        return shards and family in self.families()

    def families(self) -> Iterator[Layout]:
        """Layouts that recompute nothing, with weights, and experts, sharded over one rank."""
        model = self.config.model
        pipelines = (1,) if model.family == "hf" else divisors(self.ranks)
        for pipeline, schedule in product(pipelines, SCHEDULES):
            # Each chunk has a block at least.
            if model.layers < pipeline * schedule[1] or (pipeline == 1 and schedule[1] > 1):
                continue
            stage = self.ranks // pipeline
            owners = divisors(math.gcd(stage, model.experts)) if model.mixtures else (0,)
            for sequence, ring in self._sequences(stage):
                numbers = self._micro_batches(stage // sequence, pipeline, schedule)
                for number, expert in product(numbers, owners):
                    yield Layout(
                        pipeline, schedule, sequence, ring, 1, 0, number, "none", False,
                        expert, min(1, expert),
                    )  # fmt: skip

    def _sequences(self, stage: int) -> Iterator[tuple[int, int]]:
        model = self.config.model
        for sequence in divisors(stage):
            if self.config.data.sequence_length % sequence:
                continue
            for ring in divisors(sequence):
                if model.family == "hf" and ring > 1:
                    continue
                if sequence // ring <= max(model.heads, 1):
                    yield sequence, ring

    def _micro_batches(self, data: int, pipeline: int, schedule: tuple[str, int]) -> Iterator[int]:
        batch = self.config.train.global_batch
        if batch % data:
            return
        for number in divisors(batch // data):
            whole = schedule[0] != INTERLEAVED or number % pipeline == 0
            if pipeline == 1 or (number >= pipeline and whole):
                yield number

    def sizes(self, family: Layout) -> tuple[Sequence[int], Sequence[int]]:
        """Over how many ranks weights, and each expert, may be sharded in a family."""
        stage = self.ranks // family.pipeline
        return divisors(stage), divisors(stage // family.expert) if family.expert else (0,)

    def variants(self, layout: Layout) -> Iterator[Variant]:
        """The layout, and it with less traffic of the optimizer, or with more in host memory.

        The later are for where those before do not fit: neither copies nor tiles, which compute
        feed-forwards again, save time. Those that cannot fit are left out.
        """
        plain = [layout]
        # Where weights are sharded, no message depends on who steps them: all of their copies do.
        if layout.whole and self.ranks > layout.pipeline:
            plain.append(replace(layout, optimizer_ranks=1))
        found = self._fitting(plain)
        if len(found) > 1 and found[1].seconds.total < _WORTH * found[0].seconds.total:
            found.reverse()
        yield from found
        smaller = [replace(layout, offload=True)]
        if self._can_tile(layout):
            tiled = replace(layout, tiled=True)
            smaller += [tiled, replace(tiled, offload=True)]
        yield from sorted(self._fitting(smaller), key=lambda one: one.seconds.total)

    def _fitting(self, layouts: Sequence[Layout]) -> list[Variant]:
        """Those that may fit, with their seconds."""
        loads = [(layout, self.load(layout)) for layout in layouts]
        return [
            Variant(layout, step_seconds(load, self.device))
            for layout, load in loads if self.least.of(load) <= self.memory
        ]  # fmt: skip

    def _can_tile(self, layout: Layout) -> bool:
        """Whether a run takes tiles, and there are two at least; a V computes gradients of weights
        apart, which tiles do not."""
        config = self.config
        if config.model.mixtures or config.weight_parallel.compile or config.model.family == "hf":
            return False
        rows = self.load(layout).rows
        tokens = rows * config.data.sequence_length // layout.sequence
        return layout.schedule[0] != V_SHAPED and tokens >= 2 * tile_tokens(config)

    def planned(self, one: Variant) -> Found | None:
        """The layout, planned; ``None``: a run refuses it, or it does not fit."""
        keys = {**one.layout.settings(), "launch.processes": self.ranks}
        config = changed(self.config, keys)
        if config is None or config.check(self.ranks):
            return None
        run = on_machines(config, self.ranks, self.device)
        budget = MemoryBudget(run, self.ranks, observations=self.observations)
        nbytes = budget.most(config.data.sequence_length, self.memory)
        if nbytes > self.memory:
            return None
        return Found(
            one.layout, self.load(one.layout), one.seconds, config, budget.plan, nbytes
        )

    def _computed(self, layout: Layout) -> tuple[Workload, Computed]:
        """The workload of a layout, and what it computes: a block's seconds, and those of the ends,
        are of few of its values."""
        load = self.load(layout)
        degrees = load.degrees
        key = (
            load.rows, degrees.context, degrees.ring, load.recompute, degrees.expert,
            degrees.expert_shards,
        )  # fmt: skip
        if key not in self._blocks:
            self._blocks[key] = block_seconds(load, self.device), ends(load, self.device)
        return load, Computed.of(load, self.device, *self._blocks[key])

    def _ways(
        self, pipeline: int, expert: int, weights: Sequence[int], sizes: Sequence[int]
    ) -> list[tuple[WeightMessages, Stepped]]:
        """The least that is sent and stepped with nothing sharded, for each number of owners of the
        optimizer's state, and with weights or experts over one of so many ranks."""
        hows = [
            Layout(pipeline, SCHEDULES[0], 1, 1, weight, 0, 1, "none", False, expert, size)
            for weight, size in product(weights, sizes)
        ]
        whole = [how for how in hows if how.whole]
        groups = [[replace(how, optimizer_ranks=owners)] for owners in (0, 1) for how in whole]
        groups.append([how for how in hows if not how.whole])
        return [
            (
                least_of([self.sent(how) for how in group]),
                least_of([
                    self.stepped(replace(how, offload=away))
                    for how, away in product(group, (False, True))
                ]),
            )
            for group in groups if group
        ]  # fmt: skip

    def load(self, layout: Layout) -> Workload:
        """The workload of a layout."""
        stage = self.ranks // layout.pipeline
        data = stage // layout.sequence
        owners, mixed = max(1, layout.expert), self.base.model.experts > 0
        size = layout.expert_weight or layout.weight
        alike = math.gcd(layout.optimizer_ranks, stage // (owners * size))
        degrees = replace(
            self.base.degrees,
            devices=self.ranks,
            weight=data,
            kind="zero3" if layout.weight > 1 else "zero1",
            optimizer=layout.optimizer_ranks or stage // layout.weight,
            pipeline=layout.pipeline,
            interleave=layout.schedule[1],
            v_shaped=layout.schedule[0] == V_SHAPED,
            context=layout.sequence,
            ring=layout.ring,
            shards=layout.weight,
            expert=owners,
            expert_shards=size if mixed else 0,
            expert_optimizer=alike if mixed else 1,
        )
        away = {"optimizer"} if layout.offload else set()
        if layout.offload and layout.checkpoint in ("full", "half"):
            away.add("activations")
        return replace(
            self.base,
            degrees=degrees,
            rows=self.config.train.global_batch // (data * layout.micro_batches),
            micro_batches=layout.micro_batches,
            recompute=CHECKPOINTS[layout.checkpoint][1],
            offload=frozenset(away),
            tiled=layout.tiled,
        )

    def bound(self, layout: Layout, weights: Sequence[int], sizes: Sequence[int]) -> float:
        """A lower bound of the seconds with weights, and experts, over one of so many ranks.

        Layouts that differ in how weights and the optimizer are sharded compute alike.
        """
        load, computed = self.computed(replace(layout, weight=1))
        ways = self.ways(layout.pipeline, layout.expert, weights, sizes)
        return min(composed(load, self.device, computed, *way).total for way in ways)

    def roots(self) -> tuple[list[Node], int]:
        """A node for each of the :meth:`families`, and how many layouts there are."""
        found, number = [], 0
        for one in self.families():
            weights, sizes = self.sizes(one)
            found.append(Node(self.bound(one, weights, sizes), number, ANY_CHECKPOINT, one))
            number += len(CHECKPOINTS) * len(weights) * len(sizes)
        return found, number

    def parts(self, node: Node) -> Iterator[Node]:
        """What a node has, with bounds of their own: recompute only adds."""
        if node.level == ANY_VARIANT:
            yield Node.of(node.number, node.any_of, self.variants(node.any_of))
            return
        weights, sizes = self.sizes(node.any_of)
        values: dict[str, Sequence[Any]] = {
            "checkpoint": tuple(CHECKPOINTS), "weight": weights, "expert_weight": sizes,
        }  # fmt: skip
        name, *later = [*values][node.level :]
        each = math.prod(len(values[other]) for other in later)
        for at, value in enumerate(values[name]):
            one = replace(node.any_of, **{name: value})
            over = [values[n] if n in later else (getattr(one, n),) for n in [*values][1:]]
            yield Node(self.bound(one, *over), node.number + at * each, node.level + 1, one)


class Variant(NamedTuple):
    """A layout and its seconds."""

    layout: Layout
    seconds: StepSeconds


@dataclass(frozen=True, order=True)
class Node:
    """Layouts that agree in all but some values, and a lower bound of their seconds.

    Attributes:
        number: of the first of them, in the order of all.
        level: in what they differ.
        any_of: the first of them.
        now, left: of one layout alone, its first variant, which has the seconds of ``bound``, and
            the others; ``None``: none can fit.
    """

    bound: float
    number: int
    level: int = field(compare=False)
    any_of: Layout = field(compare=False)
    now: Variant | None = field(compare=False, default=None)
    left: Iterator[Variant] = field(compare=False, default=iter(()))

    @classmethod
    def of(cls, number: int, layout: Layout, left: Iterator[Variant]) -> Node:
        """One layout, with the variants that are left."""
        now = next(left, None)
        bound = math.inf if now is None else now.seconds.total
        return cls(bound, number, ONE, layout, now=now, left=left)


# Each differs in what the next does, too.
ANY_CHECKPOINT, ANY_WEIGHT, ANY_SIZE, ANY_VARIANT, ONE = range(5)


def search(config: Config, ranks: int, device: Device, rows: int = ROWS) -> Searched:
    """The layouts that fit and take least seconds, at most ``rows``.

    Raises:
        ConfigError: no layout fits.
    """
    space = Space(config, ranks, device)
    evaluated = planned = 0
    queue, possible = space.roots()
    heapq.heapify(queue)
    best: list[Found] = []
    while queue and len(best) < rows:
        node = heapq.heappop(queue)
        if node.level != ONE:
            parts = list(space.parts(node))
            evaluated += len(parts) if node.level == ANY_SIZE else 0
        else:
            assert node.now is not None, "those that cannot fit are left out"
            planned += 1
            found = space.planned(node.now)
            if found is not None:
                best.append(found)
                continue
            parts = [Node.of(node.number, node.any_of, node.left)]
        for part in parts:
            if part.bound < math.inf:
                heapq.heappush(queue, part)
    if not possible:
        batch, length = config.train.global_batch, config.data.sequence_length
        raise ConfigError(
            f"--search: {ranks} devices cannot share {batch} sequences of {length} tokens evenly: "
            "plan another number of devices, or change train.global_batch"
        )
    if not best:
        raise ConfigError(
            f"--search: no layout of this step fits on {ranks} x {device.name}; plan more devices, "
            "a shorter sequence or a smaller model"
        )
    return Searched(space, tuple(best), possible, evaluated, planned)


def chosen(best: Sequence[Found]) -> Found:
    """The layout with the fewest axes among those that tie with the first."""
    first = best[0].seconds.total
    ties = [one for one in best if one.seconds.total <= (1 + TIE) * first]
    return min(ties, key=lambda one: (one.layout.axes, one.seconds.total))


def neighbors(space: Space, layout: Layout) -> Iterator[tuple[str, Found | None]]:
    """What one more or less of each degree would cost; ``None``: impossible, or too large."""
    plain = replace(layout, optimizer_ranks=0, offload=False, tiled=False)
    for name in ("weight", "sequence", "pipeline", "micro_batches", "expert", "expert_weight"):
        now = getattr(layout, name)
        for other in (2 * now, now // 2):
            if not other or other == now:
                continue
            moved = replace(plain, **{name: other})
            if name == "pipeline":
                moved = replace(moved, schedule=SCHEDULES[0])
            label = f"{name.replace('_', '-')} {other}"
            found = map(space.planned, space.variants(moved) if space.allows(moved) else ())
            yield label, next(filter(None, found), None)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)
