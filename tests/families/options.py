"""The options, and the settings to compare that follow from them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import tyro

from internsp.app.config.errors import nearest
from tests.families.configs import FAMILIES

CHECKPOINTING = ("none", "full", "half", "reentrant", "own", "own-reentrant")
MESHES = ("1x1", "2x1", "1x2", "2x2", "4x2", "1x2r")


@dataclass(frozen=True)
class Setting:
    """One comparison of one family.

    Attributes:
        checkpointing: one of ``CHECKPOINTING``; ``own`` and ``own-reentrant`` use the model's
            ``gradient_checkpointing_enable``.
        tied: head and embedding share a weight.
        ring: ranks of a sequence's ring; its other ranks share heads.
    """

    weight: int
    sequence: int
    checkpointing: str
    tied: bool
    ring: int = 1

    @property
    def mesh(self) -> str:
        """The setting as text, with the names of the command line."""
        return f"{self.weight}x{self.sequence}{'r' if self.ring > 1 else ''}"

    @property
    def ranks(self) -> int:
        """Ranks to start: two data groups with different sequences, if four ranks suffice."""
        return 2 if self.weight * self.sequence <= 2 else 4

    def __str__(self) -> str:
        return f"{self.mesh}, {self.checkpointing}, {'tied' if self.tied else 'untied'}"


@dataclass(frozen=True)
class Kind:
    """What a family supports.

    Attributes:
        ties: whether its head can be untied, tied, or both.
        own: whether it has ``gradient_checkpointing_enable``.
    """

    ties: tuple[bool, ...]
    own: bool


@dataclass(frozen=True)
class Options:
    """Which comparisons to run."""

    family: tuple[str, ...] = ()
    """Families; none: all of the table (tests/families/configs.py)."""
    mesh: tuple[str, ...] = MESHES
    """Ranks over which weights are sharded, x, ranks over which a sequence is sharded: by heads, or
    with the suffix r as a ring."""
    checkpointing: tuple[str, ...] = CHECKPOINTING
    """No recomputation, all blocks or half of them by internsp, all in torch's reentrant form, all
    by the model's own gradient_checkpointing_enable (in either form)."""
    thorough: bool = False
    """Compare every mesh with every form of checkpointing and either head; otherwise each of these
    at least once in each family, and every pair in some family."""
    timeout: float = 120.0
    """Seconds allowed for one comparison."""
    parts: tuple[Path, ...] = ()
    """Run no comparison: print the results that earlier runs wrote with --json to these files."""
    json: Path | None = None
    """Write all results to this file."""
    markdown: Path | None = None
    """Write the table to this file, between its marks if it has them."""

    @classmethod
    def read(cls, arguments: Sequence[str], description: str | None) -> Self:
        """Parse a command line.

        Raises:
            ValueError: an unknown family, mesh or form of checkpointing; names it.
        """
        given = tyro.cli(cls, args=arguments, description=description)
        for option, values, known in (
            ("--family", given.family, tuple(FAMILIES)),
            ("--mesh", given.mesh, None),
            ("--checkpointing", given.checkpointing, CHECKPOINTING),
        ):
            for value in values:
                if known is None:
                    degrees(value)
                elif value not in known:
                    near = nearest(value, list(known))
                    meant = f": did you mean {near}?" if near else f": {', '.join(known)}"
                    raise ValueError(f"{option} {value} is not known{meant}")
        return given

    def families(self) -> tuple[str, ...]:
        """The selected families, in the table's order."""
        return tuple(name for name in FAMILIES if name in self.family or not self.family)

    def settings(self, kind: Kind, turn: int = 0) -> list[Setting]:
        """The settings of one family: each mesh, form and head at least once, or all combinations.

        Args:
            turn: changes which of them are paired.
        """
        forms = [f for f in self.checkpointing if kind.own or not f.startswith("own")]
        if self.thorough:
            every = [(m, f, t) for m in self.mesh for f in forms for t in kind.ties]
        else:
            count = max(len(self.mesh), len(forms), len(kind.ties)) if forms else 0
            every = [
                (
                    self.mesh[i % len(self.mesh)],
                    forms[(i + turn) % len(forms)],
                    kind.ties[(i + turn // len(forms)) % len(kind.ties)],
                )
                for i in range(count)
            ]
        found = []
        for mesh, form, tied in every:
            weight, sequence, ring = degrees(mesh)
            found.append(Setting(weight, sequence, form, tied, ring))
        return found


def degrees(mesh: str) -> tuple[int, int, int]:
    """Weight and sequence degree of ``"2x1"``, and the ring degree: ``"1x2r"`` is a ring of all.

    Raises:
        ValueError: invalid syntax, or more than four ranks.
    """
    weight, _, sequence = mesh.removesuffix("r").partition("x")
    if weight not in ("1", "2", "4") or sequence not in ("1", "2", "4"):
        raise ValueError(
            f"--mesh {mesh} is not known: write two of 1, 2 and 4 (weight x sequence), as in 4x2, "
            "and an r behind them for a ring"
        )
    return int(weight), int(sequence), int(sequence) if mesh.endswith("r") else 1
