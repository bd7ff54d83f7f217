"""``internsp plan --search``: the layouts of a step that take least seconds on so many devices.

Candidates are ordered by a lower bound of their seconds, and evaluated in that order until the
bound is above the tenth best: no candidate that is left out can be among the ten. Those that do not
fit into memory are left out before; those that are printed are planned, and checked as a run is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from internsp.app.config import Config
from internsp.app.plan.answer import FREE, changed
from internsp.app.plan.bytes import step_bytes
from internsp.app.plan.configured import workload_of
from internsp.app.plan.devices import Device
from internsp.app.plan.seconds import StepSeconds, least_seconds, step_seconds
from internsp.app.plan.workload import Recompute, Workload
from internsp.errors import ConfigError
from internsp.mesh import MeshShape

ROWS = 10
TIE = 0.05  # seconds that differ by less are within the error of sharded weights' rows
_CHECKPOINTS: dict[str, tuple[Mapping[str, Any], Recompute]] = {
    "none": ({"mode": "none"}, Recompute()),
    "selective": ({"mode": "selective"}, Recompute(1.0, 0.0, 1.0)),
    "half": ({"mode": "full", "fraction": 0.5}, Recompute(0.5, 0.5, 0.5)),
    "full": ({"mode": "full"}, Recompute(1.0, 1.0, 1.0)),
}
_SCHEDULES = (("1F1B", 1), ("Interleaved1F1B", 2))


@dataclass(frozen=True)
class Layout:
    """A candidate: degrees, micro-batches and what is recomputed.

    Attributes:
        optimizer_ranks: 0: all replicas.
        expert, expert_weight: of a model with experts; 0: there are none.
        offload: whether the optimizer's state and inputs of blocks are in host memory.
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

    def settings(self) -> dict[str, Any]:
        """The keys of a configuration, as ``section.key``, and their values."""
        again = {"mode": "none", "fraction": 1.0, "offload": None} | dict(
            _CHECKPOINTS[self.checkpoint][0]
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
        if self.expert:
            found |= {"parallel.expert": self.expert, "parallel.expert_weight": self.expert_weight}
        return found | {f"activation_checkpoint.{key}": value for key, value in again.items()}

    @property
    def axes(self) -> int:
        """How many things are not as on one device: ties go to the fewest."""
        degrees = (self.pipeline, self.sequence, self.ring, self.weight, self.micro_batches)
        away = 2 * self.offload
        experts = (self.expert > 1) + (self.expert > 0 and self.expert_weight != self.weight)
        again = self.checkpoint != "none"
        return sum(degree > 1 for degree in degrees) + experts + again + away

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
        told.append(f"checkpoint {self.checkpoint}" + (", offloaded" if self.offload else ""))
        return ", ".join(told)


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
        possible, evaluated, fitting: numbers of candidates: all, those that were looked at, and
            those of them that fit.
    """

    best: tuple[Found, ...]
    possible: int
    evaluated: int
    fitting: int


class Space:
    """All layouts of a configuration on so many devices.

    Args:
        config: its model, batch, sequence and dtypes stay; degrees, micro-batches, schedule and
            checkpointing are searched.
    """

    def __init__(self, config: Config, ranks: int, device: Device) -> None:
        self.config, self.ranks, self.device = config, ranks, device
        own = (1, 1) if config.model.mixtures else (0, 0)
        alone = Layout(1, _SCHEDULES[0], 1, 1, 1, 0, 1, "none", False, *own)
        base = changed(config, alone.settings())
        if base is None:
            raise ConfigError("--search: the configuration is refused with all degrees 1")
        self.base = workload_of(base, MeshShape(1))
        self.least = lru_cache(maxsize=None)(self._least)

    def layouts(self) -> Iterator[Layout]:
        """Every layout whose degrees, batch and blocks divide."""
        for family in self.families():
            yield from self.members(family)

    def allows(self, layout: Layout) -> bool:
        """Whether :meth:`layouts` has it."""
        family = replace(layout, weight=1, expert_weight=min(1, layout.expert))
        return family in set(self.families()) and layout in self.members(family)

    def families(self) -> Iterator[Layout]:
        """Layouts with weights, and experts, sharded over one rank: others compute as much."""
        for pipeline in self._pipelines():
            stage = self.ranks // pipeline
            for schedule in _SCHEDULES if pipeline > 1 else _SCHEDULES[:1]:
                if self.config.model.layers < pipeline * schedule[1]:
                    continue
                for sequence, ring in self._sequences(stage):
                    data = stage // sequence
                    for number in self._micro_batches(data, pipeline, schedule[1]):
                        for again, owners in product(_CHECKPOINTS, self._owners(stage)):
                            yield Layout(
                                pipeline, schedule, sequence, ring, 1, 0, number, again, False,
                                owners, min(1, owners),
                            )  # fmt: skip

    def _pipelines(self) -> list[int]:
        if self.config.model.family == "hf":
            return [1]
        return [n for n in divisors(self.ranks) if n <= self.config.model.layers]

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

    def _micro_batches(self, data: int, pipeline: int, chunks: int) -> Iterator[int]:
        batch = self.config.train.global_batch
        if batch % data:
            return
        for number in divisors(batch // data):
            if pipeline == 1 or (number >= pipeline and (chunks == 1 or number % pipeline == 0)):
                yield number

    def _owners(self, stage: int) -> tuple[int, ...]:
        """Over how many ranks experts may be divided; 0: there are none."""
        if not self.config.model.mixtures:
            return (0,)
        return divisors(math.gcd(stage, self.config.model.experts))

    def members(self, family: Layout) -> list[Layout]:
        """The layouts of a family."""
        return [
            replace(family, weight=weight, expert_weight=size)
            for weight, size in product(*self.sizes(family))
        ]

    def sizes(self, family: Layout) -> tuple[Sequence[int], Sequence[int]]:
        """Over how many ranks weights, and each expert, may be sharded in a family."""
        stage = self.ranks // family.pipeline
        return divisors(stage), divisors(stage // family.expert) if family.expert else (0,)

    def variants(self, layout: Layout) -> Iterator[Layout]:
        """The layout, and it with less traffic of the optimizer, or with more in host memory."""
        yield layout
        if self.ranks // layout.pipeline > layout.weight:
            yield replace(layout, optimizer_ranks=1)
        yield replace(layout, offload=True)

    def best(self, layout: Layout, without: Collection[Layout] = ()) -> Found | None:
        """The fastest variant that fits and is not in ``without``; ``None``: there is none."""
        found = None
        for one in self.variants(layout):
            if one in without or (found is not None and one.offload):  # copies never save time
                continue
            load = self.load(one)
            nbytes = step_bytes(load).total
            if nbytes > FREE * self.device.memory:
                continue
            seconds = step_seconds(load, self.device)
            if found is None or seconds.total < 0.999 * found.seconds.total:
                found = Found(one, load, seconds, nbytes)
        return found

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
            recompute=_CHECKPOINTS[layout.checkpoint][1],
            offload=frozenset(away),
        )

    def _least(
        self,
        pipeline: int,
        sequence: int,
        ring: int,
        number: int,
        checkpoint: str,
        expert: int,
    ) -> float:
        layout = Layout(
            pipeline, _SCHEDULES[0], sequence, ring, 1, 0, number, checkpoint, False, expert,
            min(1, expert),
        )  # fmt: skip
        return least_seconds(self.load(layout), self.device)

    def bound(self, layout: Layout) -> float:
        """A lower bound of the layout's seconds."""
        return self.least(
            layout.pipeline, layout.sequence, layout.ring, layout.micro_batches, layout.checkpoint,
            layout.expert,
        )  # fmt: skip


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
    possible = fitting = evaluated = 0
    queue: list[tuple[float, int, Layout]] = []
    for family in space.families():
        queue.append((space.bound(family) if prune else 0.0, possible, family))
        possible += math.prod(map(len, space.sizes(family)))
    queue.sort()
    best: list[tuple[float, int, Found]] = []  # a heap, the worst first
    for bound, before, family in queue:
        if prune and len(best) == ROWS and bound > -best[0][0]:
            break
        for number, layout in enumerate(space.members(family), before):
            evaluated += 1
            found = space.best(layout, without)
            if found is None:
                continue
            fitting += 1
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
    return Searched(tuple(entry[2] for entry in ordered), possible, evaluated, fitting)


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
                moved = replace(moved, schedule=_SCHEDULES[0])
            label = f"{name.replace('_', '-')} {other}"
            plain = replace(moved, optimizer_ranks=0, offload=False)
            yield label, space.best(plain) if space.allows(plain) else None


@lru_cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)
