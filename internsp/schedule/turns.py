"""Pure: whose reduction is next (WP-2).

Each trained weight has exactly one reduction in the backward of its block, at its turn in the
declared order: last used first. A turn comes once the turns before it are over and as many
gradients are ready as some forward has had uses (:class:`internsp.schedule.uses.Uses`), or when
the block is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic

from internsp.schedule.terms import Group, Unit, W
from internsp.schedule.uses import Uses

Turn = tuple[Unit[W], Group[W], list[W]]
"""One reduction: the unit, the group, and which of its weights are trained."""


class Turns(Generic[W]):
    """Turns of the open block, or of all units in the weight backward of a split backward.

    Attributes:
        due: the weights whose turn is still to come.
        reduced: weights of the open block whose reduction was launched.
    """

    def __init__(self, uses: Uses[W]) -> None:
        self.due: set[W] = set()
        self.reduced: set[W] = set()
        self._uses = uses
        self._turns: deque[Turn[W]] = deque()  # in order
        self._ready: dict[W, int] = {}  # number of ready gradients of each weight that is due

    def declare(self, units: Iterable[Unit[W]]) -> None:
        """Declare the units whose weights are reduced, in order, in place of those before."""
        self.due = set()
        self._turns.clear()
        self._ready.clear()
        for unit in units:
            for group in reversed(unit.groups):
                trained = [weight for weight in reversed(group.weights) if weight.trained]
                if trained:
                    self._turns.append((unit, group, trained))
                    self.due.update(trained)

    def take(self, weights: Sequence[W] | None = None, last: bool = False) -> list[Turn[W]]:
        """Take the next turns, as long as all their gradients are ready.

        Args:
            weights: one more gradient of each of them is ready; ``None``: take all turns.
            last: there will be no other of these.
        """
        turns, ready, most = self._turns, self._ready, self._uses.most
        if weights is None:
            left = [*turns]
            turns.clear()
            self.due.clear()
            return left
        for weight in weights:
            ready[weight] = ready.get(weight, 0) + (most.get(weight, 1) if last else 1)
        taken: list[Turn[W]] = []
        while turns:
            for weight in turns[0][2]:
                if ready.get(weight, 0) < most.get(weight, 1):
                    return taken
            taken.append(turns.popleft())
            self.due.difference_update(taken[-1][2])
        return taken

    def reset(self) -> None:
        """No backward runs."""
        self.declare(())
        self.reduced.clear()
