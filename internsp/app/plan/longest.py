"""``internsp plan --longest``: the longest sequence that fits into memory, by component."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from internsp.app.config import Config
from internsp.app.plan.classes import table
from internsp.app.plan.in_flight import Moving, StepActivations
from internsp.app.plan.observe import Observations
from internsp.app.plan.offloaded import AT_STEP, HOSTED, STEPPING, backward_sums
from internsp.app.plan.rank import SUMS
from internsp.app.plan.step import make_plan
from internsp.app.process import terminal
from internsp.base.host import ACTIVATIONS
from internsp.base.sizes import human, size_in_bytes
from internsp.errors import ConfigError

MOST_TOKENS = 1 << 31


Rows = list[tuple[str, int]]


@dataclass(frozen=True)
class LongestSequence:
    """The longest sequence of a configuration on one rank's memory.

    Attributes:
        length: tokens, over all ranks of a sequence group; 0: nothing fits.
        memory: (component, bytes) on the device at that length, on the rank whose memory is full.
        host: the same in host memory.
        bound: the component that grows most with the length, in the memory that is full.
        rank: pipeline rank whose memory is full.
    """

    length: int
    memory: tuple[tuple[str, int], ...]
    host: tuple[tuple[str, int], ...]
    bound: str
    rank: int = 0


class _RankMemory:
    """A rank's memory without activations.

    Args:
        grow: gradient sums are made while activations are freed: ``fixed`` is without them.
    """

    def __init__(self, memory: Rows, grow: bool) -> None:
        here = [row for row in memory if row[0] not in HOSTED.values() and row[1]]
        moving = (STEPPING, AT_STEP, *([SUMS] if grow else []))
        self.fixed = [row for row in here if row[0] not in moving]
        self.sums = [row for row in here if row[0] == SUMS and grow]
        self.stepping = [row for row in here if row[0] in (STEPPING, AT_STEP)]
        self.hosted = [row for row in memory if row[0] in HOSTED.values() and row[1]]


class MemoryBudget:
    """The memory of every pipeline rank, for any sequence length.

    Args:
        observations: what was measured before, for configurations that differ in their layout.

    Attributes:
        plan: the planned step.
    """

    def __init__(
        self, config: Config, world_size: int, observations: Observations | None = None
    ) -> None:
        plan = self.plan = make_plan(config, world_size)
        self.activations = StepActivations(plan, observations)
        chunk, blocks = plan.chunk, [backward_sums(u.weights) for u in plan.chunk.blocks]
        ends = (u for u in (chunk.head, *chunk.others) if u is not None)
        # Gradient sums with which a backward begins, of the head and of one block, and all of them.
        self.first = max(blocks, default=0) + sum(backward_sums(u.weights) for u in ends)
        self.all = sum(backward_sums(u.weights) for u in chunk.units)
        self.multiple = plan.shape.sequence
        # From a second micro-batch on, and in a pipeline, all sums are there with all activations.
        once = config.train.micro_batches == 1 and not config.train.batch_tokens
        grow = once and len(plan.ranks) == 1
        self.ranks = [_RankMemory(list(rank.memory.items()), grow) for rank in plan.ranks]

    def at(self, length: int, rank: int = 0) -> tuple[Rows, Rows]:
        """(component, bytes) on the device and on the host with sequences of ``length`` tokens."""
        own, moving = self.ranks[rank], self.activations.at(rank, length)
        host = [(HOSTED[ACTIVATIONS], moving.host)] if moving.host else []
        # In the step there are no activations.
        phases = [*self._backward(moving, own), [*own.sums, *own.stepping]]
        return [*own.fixed, *moving.stay, *max(phases, key=_sum)], [*own.hosted, *host]

    def _backward(self, moving: Moving, own: _RankMemory) -> list[Rows]:
        """Where a backward may have its peak: at its first block, or at its last one."""
        if not own.sums:
            return [moving.rows]
        first = [(SUMS, min(self.first, self.all)), *moving.rows]
        (name, _), *work = moving.rows
        return [first, [(SUMS, self.all), (name, moving.left), *work]]

    def most(self, length: int, limit: float = math.inf) -> int:
        """Bytes that the fullest rank's device needs with sequences of ``length`` tokens; or those
        of a rank that needs more than ``limit``."""
        most = 0
        order = sorted(range(len(self.ranks)), key=lambda rank: -_sum(self.ranks[rank].fixed))
        for rank in order:  # the first one tells most, and each kind of chunk has to be measured
            most = max(most, _sum(self.at(length, rank)[0]))
            if most > limit:
                break
        return most

    def longest(self, memory: int, host_memory: int | None = None) -> LongestSequence:
        """The longest multiple of the sequence degree that fits on every rank."""

        def excess(length: int, rank: int) -> list[int]:
            """Bytes beyond the limit on the device and on the host."""
            here, there = (_sum(rows) for rows in self.at(length, rank))
            return [here - memory, 0 if host_memory is None else there - host_memory]

        def fits(length: int) -> bool:
            return all(max(excess(length, rank)) <= 0 for rank in range(len(self.ranks)))

        low, high = 0, 1
        while high * self.multiple < MOST_TOKENS and fits(high * self.multiple):
            low, high = high, 2 * high  # from below: longer sequences take longer to evaluate
        high = min(high, MOST_TOKENS // self.multiple)
        within = range(low + 1, high + 1)
        low += bisect_left(within, True, key=lambda n: not fits(n * self.multiple))
        length = low * self.multiple
        more = min(length + max(length // 100, self.multiple), MOST_TOKENS)
        full = max(range(len(self.ranks)), key=lambda rank: max(excess(more, rank)))
        which = 0 if excess(more, full)[0] > 0 else 1
        here, there = self.at(max(length, self.multiple), full)
        now = dict((here, there)[which])
        then = self.at(max(2 * length, self.multiple), full)[which]
        grown = sorted(((n - now.get(name, 0), name) for name, n in then), reverse=True)
        return LongestSequence(length, tuple(here), tuple(there), grown[0][1], full)


def _sum(rows: Sequence[tuple[str, int]]) -> int:
    return sum(nbytes for _, nbytes in rows)


def print_longest(
    config: Config, world_size: int, memory: str, host: str | None, console: Console | None = None
) -> None:
    """Print the longest sequence for ``memory`` (``"80 GiB"``) and ``host`` memory of a rank.

    Raises:
        ConfigError: ``memory`` or ``host`` is not a size; or nothing fits.
    """
    console = console or terminal.console()
    limit = _size("--longest", memory)
    host_limit = None if host is None else _size("--host-memory", host)
    found = MemoryBudget(config, world_size).longest(limit, host_limit)
    rows = [(name, human(nbytes)) for name, nbytes in found.memory]
    rows.append(("sum", human(_sum(found.memory))))
    rows += [(name, human(nbytes)) for name, nbytes in found.host]
    if not found.length:
        needed = _sum(found.memory)
        raise ConfigError(
            f"--longest {memory}: no sequence fits; one of {config.parallel.sequence} tokens takes "
            f"{human(needed)} a rank (shard weights further, or offload them)"
        )
    of = "one rank" if config.parallel.pipeline == 1 else f"pipeline rank {found.rank}"
    where = "" if config.parallel.pipeline == 1 else f", on {of}"
    console.print(
        f"Longest sequence for {memory} a rank: {found.length:,} tokens over "
        f"{config.parallel.sequence} ranks, bound by: {found.bound}{where}"
    )
    console.print(table(f"Memory of {of} at that length", ("<component", "bytes"), rows))


def _size(option: str, text: str) -> int:
    found = size_in_bytes(text)
    if found is None:
        raise ConfigError(f'{option}: {text!r} is no size; write a number and a unit, as "80 GiB"')
    return found
