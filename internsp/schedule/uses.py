"""Pure: how often a rank uses each weight in a forward (WP-2).

Data decide it: not at all where an expert is unused, twice where two modules share a weight.
Forward counts, to release bytes after the last use; backward compares, to reduce a gradient once
all uses have given theirs. The most uses in any forward decide both, since autograd does not say
through which forward's graph a backward goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic

from internsp.schedule.terms import Group, Unit, W


class Uses(Generic[W]):
    """Uses of weights in the forward that runs, and the most in any.

    Attributes:
        now: the uses in the forward that runs; the queue counts them.
        most: the most uses in any forward, of each weight with more than one.
        runs: the most runs in a row in any forward, of each block with more than one whose weights
            are used at its entry.
        head_between: some forward has used the head between two blocks.
    """

    def __init__(self) -> None:
        self.most: dict[W, int] = {}
        self.runs: dict[Unit[W], int] = {}
        self.head_between = False
        self._row: tuple[Unit[W] | None, int] = None, 0  # the block that ran last, and how often
        self.now: dict[W, int] = {}
        self._seen: set[W] = set()  # weights used in a forward that has left their block

    def begin_forward(self) -> None:
        """Count anew."""
        self.now.clear()
        self._row = None, 0

    def begin_order(self) -> None:
        """Blocks run in another order from here on: forget earlier forwards."""
        self.most.clear()
        self.runs.clear()
        self._seen.clear()
        self.head_between = False

    def begin_run(self, unit: Unit[W]) -> None:
        """A recurring block runs once more in this forward: count its uses anew."""
        for group in unit.groups:
            for weight in group.weights:
                self.now.pop(weight, None)

    def again(self, weight: W, uses: int) -> None:
        """A weight is used again in the forward that runs: at once the most, so that the next
        forward is right even if this one fails."""
        self.most[weight] = max(uses, self.most.get(weight, 1))

    def count_once(self, unit: Unit[W]) -> None:
        """Each weight of a block is used once, at the block's entry."""
        before, runs = self._row
        runs = runs + 1 if unit is before else 1
        self._row = unit, runs
        if runs > 1:
            self.runs[unit] = max(runs, self.runs.get(unit, 1))
        for group in unit.groups:
            self.now.update(dict.fromkeys(group.weights, 1))
            self._seen.update(group.weights)

    def leave(self, unit: Unit[W]) -> None:
        """The forward leaves a block."""
        for group in unit.groups:
            self._seen.update(self.now.keys() & group.weights)

    def are_over(self, group: Group[W]) -> bool:
        """Whether each weight of the group has had its last use in the forward that runs."""
        now, most, seen = self.now, self.most, self._seen
        return all(w in seen and now.get(w, 0) == most.get(w, 1) for w in group.weights)

    def set(self, uses: Mapping[W, int]) -> None:
        """Count ``uses`` of each weight, as if a forward with them had run here."""
        self._seen.update(uses)
        self.most.clear()
        self.most.update((weight, count) for weight, count in uses.items() if count > 1)
