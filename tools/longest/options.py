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
    """Of the whole tool."""

    recipe: tuple[Name, ...] = ALL
    """Recipes to run."""
    table: bool = True
    """Look for the longest sequences."""
    limit: int = 32
    """MiB that a process may take for model, optimizer and steps while these are looked for."""
    precision: float = 0.03
    """Share of a length at which the search ends."""
    timeout: float = 300.0
    """Seconds that a try may take."""
    document: Path | None = None
    """A page, between the marks of which each part is written; none: only printed."""

    @classmethod
    def read(cls, arguments: Sequence[str], description: str | None) -> Self:
        """From a command line; ends the process at a mistake in it."""
        return tyro.cli(cls, args=arguments, description=description)
