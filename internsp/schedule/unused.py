"""How a rank's batch uses the weights in a pass, for the simulator (WP-2). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from internsp.schedule.chunk import WeightLayout


@dataclass(frozen=True)
class BatchUsage:
    """Which weights and blocks a rank's batch uses in a pass; by default each weight once.

    Attributes:
        uses: how often a weight is used, by name; 0: unused; a missing name: once.
        earlier_uses: how often it was used in an earlier forward, if more often.
        without_trigger: blocks in which the prefetch trigger does not run.
        without_gradient: blocks through which no gradient flows.
        head_gradient: whether a gradient flows through the head.
        exchanges: in every block, positions of weights before which ranks exchange sequences or
            tokens (``A2A``); the same on all ranks.
    """

    uses: Mapping[str, int] = field(default_factory=dict)
    earlier_uses: Mapping[str, int] = field(default_factory=dict)
    without_trigger: frozenset[int] = frozenset()
    without_gradient: frozenset[int] = frozenset()
    head_gradient: bool = True
    exchanges: tuple[int, ...] = ()

    def used(self, weight: WeightLayout) -> int:
        """How often ``weight`` is used in this pass."""
        return self.uses.get(weight.name, 1)

    def most_used(self, weight: WeightLayout) -> int:
        """How often ``weight`` is used in this pass or an earlier forward; at least once."""
        return max(self.used(weight), self.earlier_uses.get(weight.name, 1), 1)
