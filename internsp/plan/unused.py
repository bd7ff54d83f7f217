"""Pure: what a rank's data leave idle in a pass, for the simulator (WP-2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from internsp.plan.chunk import WeightPlan


@dataclass(frozen=True)
class Data:
    """What a rank's data decide in a pass, where they decide anything; the default is nothing.

    Attributes:
        uses: how often a weight is used, by name; once where it is not named, 0 where it is idle.
        most: how often it was used in an earlier forward, where that was more.
        silent: blocks in whose passes the prefetch trigger does not run.
        skipped: blocks through which no gradient comes.
        top: whether one comes through the head.
        exchanges: in every block, positions of weights before which ranks exchange sequences or
            tokens (``A2A``): all ranks have the same.
    """

    uses: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    silent: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()
    top: bool = True
    exchanges: tuple[int, ...] = ()

    def used(self, weight: WeightPlan) -> int:
        """How often in this pass."""
        return self.uses.get(weight.name, 1)

    def most_used(self, weight: WeightPlan) -> int:
        """How often in any."""
        return max(self.used(weight), self.most.get(weight.name, 1), 1)
