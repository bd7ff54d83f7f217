"""The tasks of a campaign: each depends on the seed and its number only."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.chaos.runs import Runs
from tests.chaos.storage import Storage
from tests.chaos.tally import Found

SAVES = 40  # faults per task of saves
# In turn; a chain has one or two faults in each attempt but the last.
_KINDS = (
    "saves", "one", "two", "one", "saves", "two", "saves", "mesh", "one", "saves", "two", "saves",
    "cut", "one", "two",
)
_MESHES = ((2, 1, 2), (1, 2, 1), (2, 1, 1, 2), (1, 2, 2, 1))


def kinds(network: bool) -> Iterator[tuple[int, str]]:
    """Number and kind of each task, endlessly."""
    for number, kind in enumerate(itertools.cycle(_KINDS)):
        if kind != "cut" or network:
            yield number, kind


class Tasks:
    """Runs tasks in this process.

    Args:
        mistakes: deliberate mistakes in the library (:data:`tests.support.chaos.MISTAKES`).
    """

    def __init__(
        self, seed: int, mistakes: Sequence[str] = (), *, private: bool, network: bool
    ) -> None:
        self._seed = seed
        self._folder = tempfile.TemporaryDirectory(prefix="chaos-")
        home = Path(self._folder.name)
        self._runs = Runs(home, mistakes, private=private, network=network)

    def do(self, number: int, kind: str, saves: int = SAVES) -> Found:
        """Run one task."""
        chance = random.Random(f"{self._seed} {number} {kind}")
        if kind == "saves":
            found = Found(runs=0)
            with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
                for one in Storage(Path(folder)).draw(chance, saves):
                    found.add(one)
            return found
        if kind == "cut":
            return self._runs.cut(chance)
        if kind == "mesh":
            return self._runs.chain(chance, chance.choice(_MESHES))
        ranks = 1 if kind == "one" else 2
        return self._runs.chain(
            chance, [ranks] * chance.randint(4, 6), weight=chance.choice((1, 2))
        )

    def close(self) -> None:
        """Remove its files."""
        self._folder.cleanup()
