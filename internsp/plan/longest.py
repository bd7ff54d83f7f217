"""``internsp plan --longest``: the longest sequence that fits a memory, and what takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from internsp import terminal
from internsp.config import Config
from internsp.config.kept import size_in_bytes
from internsp.config.sizes import human
from internsp.errors import ConfigError
from internsp.host import ACTIVATIONS
from internsp.plan.activations import ActivationModel
from internsp.plan.classes import table
from internsp.plan.offloaded import HOSTED, STEPPING
from internsp.plan.printed import make_plan

MOST_TOKENS = 1 << 31


@dataclass(frozen=True)
class Longest:
    """The longest sequence of a configuration on one rank's memory.

    Attributes:
        length: tokens, over all ranks of a sequence group; 0: nothing fits.
        memory: (component, bytes) on the device at that length.
        host: the same in host memory.
        bound: the component that grows most with one more token, of the memory that is full.
    """

    length: int
    memory: tuple[tuple[str, int], ...]
    host: tuple[tuple[str, int], ...]
    bound: str


class Budget:
    """The memory of one rank at any length.

    Args:
        process: bytes that a process has before it makes a model (on a machine whose host
            computes); a row of its own.
    """

    def __init__(self, config: Config, world_size: int, process: int = 0) -> None:
        plan = make_plan(config, world_size)
        here = [row for row in plan.memory if row[0] not in HOSTED.values() and row[1]]
        self.fixed = [row for row in here if row[0] != STEPPING]
        self.stepping = [row for row in here if row[0] == STEPPING]
        if process:
            self.fixed.insert(0, ("process before the model", process))
        self.hosted = [row for row in plan.memory if row[0] in HOSTED.values() and row[1]]
        self.activations = ActivationModel(config, plan.shape)
        self.multiple = plan.shape.sequence

    def at(self, length: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """(component, bytes) on the device and on the host with sequences of ``length`` tokens."""
        found = self.activations.at(length)
        host = [(HOSTED[ACTIVATIONS], found.host)] if found.host else []
        # In the optimizer's step there are no activations.
        phases = (found.rows(), self.stepping)
        return [*self.fixed, *max(phases, key=_sum)], [*self.hosted, *host]

    def longest(self, memory: int, host_memory: int | None = None) -> Longest:
        """The longest multiple of the sequence degree that fits."""

        def over(length: int) -> list[bool]:
            here, there = (_sum(rows) for rows in self.at(length))
            return [here > memory, host_memory is not None and there > host_memory]

        low, high = 0, MOST_TOKENS // self.multiple
        while low < high:
            middle = (low + high + 1) // 2
            if any(over(middle * self.multiple)):
                high = middle - 1
            else:
                low = middle
        length = low * self.multiple
        ahead = max(2 * length, self.multiple)
        which = 0 if over(min(length + max(length // 100, self.multiple), MOST_TOKENS))[0] else 1
        now, then = dict(self.at(max(length, self.multiple))[which]), self.at(ahead)[which]
        grown = sorted(((n - now.get(name, 0), name) for name, n in then), reverse=True)
        here, there = self.at(max(length, self.multiple))
        return Longest(length, tuple(here), tuple(there), grown[0][1])


def _sum(rows: Sequence[tuple[str, int]]) -> int:
    return sum(nbytes for _, nbytes in rows)


def print_longest(
    config: Config, world_size: int, memory: str, host: str | None, console: Console | None = None
) -> None:
    """Print the longest sequence for ``memory`` (``"80 GiB"``) a rank, and ``host`` memory beside.

    Raises:
        ConfigError: a size that is none; or nothing fits.
    """
    console = console or terminal.console()
    sizes = [_size("--longest", memory), None if host is None else _size("--host-memory", host)]
    assert sizes[0] is not None
    found = Budget(config, world_size).longest(sizes[0], sizes[1])
    rows = [(name, human(nbytes)) for name, nbytes in found.memory]
    rows.append(("sum", human(_sum(found.memory))))
    rows += [(name, human(nbytes)) for name, nbytes in found.host]
    if not found.length:
        needed = _sum(found.memory)
        raise ConfigError(
            f"--longest {memory}: no sequence fits; one of {config.parallel.sequence} tokens takes "
            f"{human(needed)} a rank (cut weights further, or offload them)"
        )
    console.print(
        f"Longest sequence for {memory} a rank: {found.length:,} tokens over "
        f"{config.parallel.sequence} ranks, bound by: {found.bound}"
    )
    console.print(table("Memory of one rank at that length", ("<component", "bytes"), rows))


def _size(option: str, text: str) -> int:
    found = size_in_bytes(text)
    if found is None:
        raise ConfigError(f'{option}: {text!r} is no size; write a number and a unit, as "80 GiB"')
    return found
