"""``internsp plan --search``: the layouts of a step that take least seconds on so many devices.

Candidates are ordered by a lower bound of their seconds, and evaluated in that order until the
bound is above the tenth best: no candidate that is left out can be among the ten. Those that do not
fit into memory are left out before; those that are printed are planned, and checked as a run is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from internsp.app.config import Config
from internsp.app.plan.answer import FREE, changed
from internsp.app.plan.block_seconds import BlockSeconds, block_seconds
from internsp.app.plan.bytes import step_bytes
from internsp.app.plan.configured import workload_of
from internsp.app.plan.devices import Device
from internsp.app.plan.layout import CHECKPOINTS, INTERLEAVED, SCHEDULES, V_SHAPED, Layout
from internsp.app.plan.seconds import (
    Computed,
    Sent,
    Stepped,
    StepSeconds,
    composed,
    ends,
    least_seconds,
)
from internsp.app.plan.weight_seconds import WeightMessages, dense_messages
from internsp.app.plan.workload import Workload
from internsp.errors import ConfigError
from internsp.mesh import MeshShape

ROWS = 10
TIE = 0.05  # seconds that differ by less are within the error of sharded weights' rows


@dataclass(frozen=True)
class Found:
    """A candidate with its predicted step."""

    layout: Layout
    load: Workload
    seconds: StepSeconds
    nbytes: float


@dataclass(frozen=True)
class Searched:
    """The best layouts, the least seconds first.

    Attributes:
        best: at most ten.
        possible, evaluated: numbers of candidates: all, and those that were looked at.
    """

    best: tuple[Found, ...]
    possible: int
    evaluated: int


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
        self._blocks: dict[tuple[Any, ...], tuple[BlockSeconds, tuple[float, float]]] = {}
        self.sent = lru_cache(maxsize=None)(self._sent)
        self.dense = lru_cache(maxsize=None)(self._dense)
        self.stepped = lru_cache(maxsize=None)(self._stepped)

    def allows(self, layout: Layout) -> bool:
        """Whether its degrees, batch and blocks divide."""
        if self.ranks % layout.pipeline or layout.pipeline not in self._pipelines():
            return False
        stage = self.ranks // layout.pipeline
        if (layout.sequence, layout.ring) not in set(self._sequences(stage)):
            return False
        weights, sizes = self.sizes(layout)
        numbers = self._micro_batches(
            stage // layout.sequence, layout.pipeline, layout.schedule
        )
        return (
            layout.schedule in self._schedules(layout.pipeline)
            and layout.micro_batches in set(numbers)
            and layout.expert in self._owners(stage)
            and layout.weight in weights
            and layout.expert_weight in sizes
        )

    def families(self) -> Iterator[Layout]:
        """Layouts with weights, and experts, sharded over one rank: others compute as much."""
        for pipeline in self._pipelines():
            stage = self.ranks // pipeline
            for schedule in self._schedules(pipeline):
                for sequence, ring in self._sequences(stage):
                    data = stage // sequence
                    for number in self._micro_batches(data, pipeline, schedule):
                        for owners, again in product(self._owners(stage), CHECKPOINTS):
                            yield Layout(
                                pipeline, schedule, sequence, ring, 1, 0, number, again, False,
                                owners, min(1, owners),
                            )  # fmt: skip

    def _pipelines(self) -> list[int]:
        if self.config.model.family == "hf":
            return [1]
        return [n for n in divisors(self.ranks) if n <= self.config.model.layers]

    def _schedules(self, pipeline: int) -> list[tuple[str, int]]:
        """Those whose chunks have a block at least."""
        found = SCHEDULES if pipeline > 1 else SCHEDULES[:1]
        return [one for one in found if self.config.model.layers >= pipeline * one[1]]

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

    def _micro_batches(
        self, data: int, pipeline: int, schedule: tuple[str, int]
    ) -> Iterator[int]:
        batch = self.config.train.global_batch
        if batch % data:
            return
        for number in divisors(batch // data):
            whole = schedule[0] != INTERLEAVED or number % pipeline == 0
            if pipeline == 1 or (number >= pipeline and whole):
                yield number

    def _owners(self, stage: int) -> tuple[int, ...]:
        """Over how many ranks experts may be divided; 0: there are none."""
        if not self.config.model.mixtures:
            return (0,)
        return divisors(math.gcd(stage, self.config.model.experts))

    def sizes(self, family: Layout) -> tuple[Sequence[int], Sequence[int]]:
        """Over how many ranks weights, and each expert, may be sharded in a family."""
        stage = self.ranks // family.pipeline
        return divisors(stage), divisors(stage // family.expert) if family.expert else (0,)

    def variants(self, layout: Layout) -> Iterator[Layout]:
        """The layout, and it with less traffic of the optimizer, or with more in host memory."""
        yield layout
        # Where weights are sharded, no message depends on who steps them: all of their copies do.
        if max(layout.weight, layout.expert_weight) == 1 < self.ranks // layout.pipeline:
            yield replace(layout, optimizer_ranks=1)
        yield replace(layout, offload=True)

    def best(
        self,
        layout: Layout,
        without: Collection[Layout] = (),
        below: float = math.inf,
        family: Family | None = None,
    ) -> Found | None:
        """The fastest variant that fits and is not in ``without``; ``None``: there is none.

        Args:
            below: a variant that takes as many seconds or more is not looked for.
            family: the layout's, if it is there already.
        """
        found, family = None, family or Family(self)
        late = False
        for one in self.variants(layout):
            # Copies never save time.
            if one in without or (one.offload and (late or found is not None)):
                continue
            seconds = family.seconds(one)
            if seconds.total >= below:
                late = True
                continue
            load = self.load(one)
            nbytes = step_bytes(load).total
            if nbytes > FREE * self.device.memory:
                continue
            if found is None or seconds.total < 0.999 * found.seconds.total:
                found = Found(one, load, seconds, nbytes)
        return found

    def block(self, layout: Layout) -> tuple[BlockSeconds, tuple[float, float]]:
        """A block's seconds, and those of the ends: of few values of a layout."""
        data = self.ranks // layout.pipeline // layout.sequence
        rows = self.config.train.global_batch // (data * layout.micro_batches)
        key = (
            rows, layout.sequence, layout.ring, layout.checkpoint, layout.expert,
            layout.expert_weight,
        )  # fmt: skip
        if key not in self._blocks:
            load = self.load(layout)
            self._blocks[key] = block_seconds(load, self.device), ends(load, self.device)
        return self._blocks[key]

    def _sent(self, how: Sharding) -> Sent:
        return Sent.of(self.load(how.layout()), self.device)

    def _dense(self, how: Sharding) -> WeightMessages:
        return dense_messages(self.load(how.layout()), self.device)

    def _stepped(self, how: Sharding, offload: bool) -> Stepped:
        return Stepped.of(self.load(how.layout(offload)), self.device)

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
        )

    def bound(self, family: Layout) -> float:
        """A lower bound of the seconds of every layout of a family."""
        load = self.load(family)
        return least_seconds(load, self.device, Computed.of(load, *self.block(family)))

    def parts(self, node: Node) -> Iterator[Node]:
        """What a node has, with bounds of their own.

        Recompute only adds, and experts' messages only add to those of other weights.
        """
        if node.level == ANY_CHECKPOINT:
            for at, name in enumerate(CHECKPOINTS):
                one = replace(node.any_of, checkpoint=name)
                bound = node.bound if at == 0 else self.bound(one)
                number = node.number + at * math.prod(map(len, self.sizes(one)))
                yield Node(bound, number, ANY_WEIGHT, one)
        else:
            family = Family(self)
            weights, sizes = self.sizes(node.any_of)
            for at, weight in enumerate(weights):
                one = replace(node.any_of, weight=weight)
                bound = max(node.bound, family.least(one) if one.expert else 0.0)
                yield Node(bound, node.number + at * len(sizes), ANY_SIZE, one, family)


@dataclass(frozen=True, order=True)
class Node:
    """Layouts that agree in all but some values, and a lower bound of their seconds.

    Attributes:
        number: of the first of them, in the order of all.
        level: in what they differ.
        any_of: the first of them.
        family: of those that differ in how experts are sharded only.
    """

    bound: float
    number: int
    level: int = field(compare=False)
    any_of: Layout = field(compare=False)
    family: Family | None = field(compare=False, default=None)


ANY_CHECKPOINT, ANY_WEIGHT, ANY_SIZE = range(3)  # each differs in what the next does, too


class Sharding(NamedTuple):
    """What messages of weights, and the optimizer, depend on."""

    pipeline: int
    weight: int
    optimizer_ranks: int
    expert: int
    expert_weight: int

    @classmethod
    def of(cls, layout: Layout) -> Sharding:
        """That of a layout."""
        how = layout.pipeline, layout.weight, layout.optimizer_ranks
        return cls(*how, layout.expert, layout.expert_weight)

    def layout(self, offload: bool = False) -> Layout:
        """A layout with it."""
        first = self.pipeline, SCHEDULES[0], 1, 1, self.weight, self.optimizer_ranks, 1, "none"
        return Layout(*first, offload, self.expert, self.expert_weight)


class Family:
    """Layouts that compute alike: they differ in how weights and the optimizer are sharded."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._computed: dict[int, Computed] = {}
        self._loads: dict[bool, Workload] = {}

    def seconds(self, layout: Layout) -> StepSeconds:
        """As :func:`step_seconds` of the layout's workload, of parts that layouts share."""
        space, how = self.space, Sharding.of(layout)
        load, stepped = self._load(layout), space.stepped(how, layout.offload)
        return composed(load, space.device, self._of(layout), space.sent(how), stepped)

    def least(self, layout: Layout) -> float:
        """A lower bound for any number of ranks that share an expert."""
        if layout.weight == 1:  # whole weights are sent in another way
            return 0.0
        space, how = self.space, Sharding.of(layout)
        sent = Sent(space.dense(how), (0.0, 0.0))
        stepped = space.stepped(how, layout.offload)
        load = self._load(layout)
        return composed(load, space.device, self._of(layout), sent, stepped).total

    def _of(self, layout: Layout) -> Computed:
        size = layout.expert_weight
        if size not in self._computed:
            load = self.space.load(layout)
            self._computed[size] = Computed.of(load, *self.space.block(layout))
        return self._computed[size]

    def _load(self, layout: Layout) -> Workload:
        if layout.offload not in self._loads:
            self._loads[layout.offload] = self.space.load(layout)
        return self._loads[layout.offload]


def search(
    config: Config,
    ranks: int,
    device: Device,
    prune: bool = True,
    without: Collection[Layout] = (),
) -> Searched:
    """The ten layouts that fit and take least seconds.

    Args:
        prune: false evaluates every layout that fits.
        without: layouts that are known not to fit.

    Raises:
        ConfigError: no layout fits.
    """  # fmt: skip
    space = Space(config, ranks, device)
    possible = evaluated = 0
    queue: list[Node] = []
    for family in space.families():
        if family.checkpoint == "none":
            bound = space.bound(family) if prune else 0.0
            queue.append(Node(bound, possible, ANY_CHECKPOINT, family))
        possible += math.prod(map(len, space.sizes(family)))
    heapq.heapify(queue)
    best: list[tuple[float, int, Found]] = []  # a heap, the worst first
    while queue:
        node = heapq.heappop(queue)
        worst = -best[0][0] if prune and len(best) == ROWS else math.inf
        if node.bound > worst:
            break
        if node.level != ANY_SIZE:
            for part in space.parts(node):
                if part.bound <= worst:
                    heapq.heappush(queue, part)
            continue
        for number, size in enumerate(space.sizes(node.any_of)[1], node.number):
            layout = replace(node.any_of, expert_weight=size)
            worst = -best[0][0] if prune and len(best) == ROWS else math.inf
            evaluated += 1
            found = space.best(layout, without, worst, node.family)
            if found is None:
                continue
            entry = (-found.seconds.total, -number, found)
            if len(best) < ROWS:
                heapq.heappush(best, entry)
            elif entry > best[0]:
                heapq.heapreplace(best, entry)
    if not best:
        raise ConfigError(
            f"--search: no layout of this step fits on {ranks} x {device.name}; plan more devices, "
            "a shorter sequence or a smaller model"
        )
    ordered = sorted(best, reverse=True)
    return Searched(tuple(entry[2] for entry in ordered), possible, evaluated)


def chosen(best: Sequence[Found]) -> Found:
    """The layout with the fewest axes among those that tie with the first."""
    first = best[0].seconds.total
    ties = [one for one in best if one.seconds.total <= (1 + TIE) * first]
    return min(ties, key=lambda one: (one.layout.axes, one.seconds.total))


def neighbors(space: Space, layout: Layout) -> Iterator[tuple[str, Found | None]]:
    """What one more or less of each degree would cost; ``None``: impossible, or too large."""
    for name in ("weight", "sequence", "pipeline", "micro_batches", "expert", "expert_weight"):
        now = getattr(layout, name)
        for other in (2 * now, now // 2):
            if not other or other == now:
                continue
            moved = replace(layout, **{name: other})
            if name == "pipeline":
                moved = replace(moved, schedule=SCHEDULES[0])
            label = f"{name.replace('_', '-')} {other}"
            plain = replace(moved, optimizer_ranks=0, offload=False)
            yield label, space.best(plain) if space.allows(plain) else None


@lru_cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)
