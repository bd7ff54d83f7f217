"""Options that the benchmarks share: sizes, validation that names the flag, output files.

Imports no torch, so that ``--help`` and the process that starts the ranks stay light.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import tyro

OUTPUTS = ("json", "markdown", "mark", "picture", "rows")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and its data: ``ranks`` ranks with ``batch`` sequences per micro-batch each.

    If sequences are sharded (``sequence_ranks``), neighboring ranks share them. ``None`` uses the
    model zoo's default.
    """

    hidden: int
    heads: int
    layers: int
    sequence: int
    intermediate: int | None = None
    batch: int = 1
    ranks: int = 1
    sequence_ranks: int = 1
    micro_batches: int = 1
    seed: int = 0
    lr: float = 1.0


@dataclass(frozen=True)
class Options:
    """Options of every benchmark; a size of ``None`` is set by the benchmark's ``resolve``."""

    rounds: int = 5
    """Rounds; each runs every variant, in a different order."""
    warm_up: int = 1
    """Steps of a variant before the measured ones."""
    json: Path | None = None
    """Write all measurements to this file."""
    markdown: Path | None = None
    """Write the tables to this file, between its marks if it has them."""

    @classmethod
    def read(cls, arguments: Sequence[str] | None, description: str | None) -> Self:
        """Parse a command line; exits on an error."""
        return tyro.cli(cls, args=arguments, description=description)

    def fill(self, defaults: Mapping[str, Any]) -> Self:
        """A copy with ``defaults`` where no value was given."""
        return replace(self, **{k: v for k, v in defaults.items() if getattr(self, k) is None})

    def require_at_least(self, least: int, *names: str, why: str = "") -> None:
        """Raise a ``ValueError`` that names the flag of a value below ``least``."""
        for name in names:
            if getattr(self, name) < least:
                raise ValueError(f"{flag(name)} must be at least {least}{why}")

    def require_multiple(self, name: str, of: str, why: str = "") -> None:
        """Raise a ``ValueError`` that names both flags where one does not divide the other."""
        if self.size(of) < 1 or self.size(name) % self.size(of):
            raise ValueError(
                f"{flag(name)} {self.size(name)} is not a multiple of {flag(of)} "
                f"{self.size(of)}{why}"
            )

    def size(self, name: str) -> int:
        """A size that ``resolve`` has set."""
        value = getattr(self, name)
        assert isinstance(value, int), f"{name} is filled in by resolve"
        return value

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the output files."""
        return {k: v for k, v in asdict(self).items() if k not in OUTPUTS}


@dataclass(frozen=True)
class Trained(Options):
    """Options of a benchmark that trains the model of :mod:`tools.bench.model`."""

    hidden: int | None = None
    """Width of the blocks."""
    heads: int | None = None
    """Query heads."""
    intermediate: int | None = None
    """Width of the feed-forward network; none: 8/3 of hidden, unless a preset sets it."""
    layers: int | None = None
    """Blocks."""
    batch: int = 1
    """Sequences per rank."""
    steps: int = 2
    """Timed steps of a variant per round."""
    lr: float = 1.0
    """Learning rate of plain SGD; large, since gradients of a mean over elements are small."""
    seed: int = 0
    """Seed of weights, data and delays."""

    def sizes(self, **changes: Any) -> Sizes:
        """The model's sizes from these options, with ``changes``."""
        own = {f.name: getattr(self, f.name) for f in fields(Sizes) if hasattr(self, f.name)}
        return Sizes(**{**own, **changes})


def flag(name: str) -> str:
    """The flag of a field on the command line."""
    return f"--{name.replace('_', '-')}"
