"""The options. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import tyro

Name = Literal["ring", "offload", "tiling", "weight", "sequence"]
ALL: tuple[Name, ...] = ("ring", "offload", "tiling", "weight", "sequence")


@dataclass(frozen=True)
class Options:
    """Options of the tool."""

    recipe: tuple[Name, ...] = ALL
    """Recipes to run."""
    table: bool = True
    """Search for the longest sequences."""
    limit: int = 32
    """MiB per process for model, optimizer and steps in this search."""
    precision: float = 0.03
    """Precision at which the search ends, as a share of the length."""
    timeout: float = 300.0
    """Seconds allowed for one attempt."""
    document: Path | None = None
    """A page, between the marks of which each part is written; none: only print."""

    @classmethod
    def read(cls, arguments: Sequence[str], description: str | None) -> Self:
        """Parse a command line; exits on an error."""
        return tyro.cli(cls, args=arguments, description=description)
