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

    def declare(self, order: Iterable[tuple[Unit[W], Group[W]]]) -> None:
        """Declare the order of reductions, in place of what was declared before."""
        trained = [(u, g, [w for w in reversed(g.weights) if w.trained]) for u, g in order]
        self._turns = deque([turn for turn in trained if turn[2]])
        self.due = {weight for _, _, weights in self._turns for weight in weights}
        self._ready.clear()

    def count(self, weights: Sequence[W], last: bool) -> None:
        """One more gradient of each of ``weights`` is ready; ``last``: there will be no other."""
        ready, most = self._ready, self._uses.most
        for weight in weights:
            ready[weight] = ready.get(weight, 0) + (most.get(weight, 1) if last else 1)

    def take(self, unready: bool = False) -> list[Turn[W]]:
        """Take the next turns, as long as all their gradients are ready.

        Args:
            unready: take the others, too.
        """
        ready, most = self._ready, self._uses.most
        taken: list[Turn[W]] = []
        for turn in self._turns:
            for weight in turn[2]:
                if ready.get(weight, 0) < most.get(weight, 1) and not unready:
                    break
            else:
                taken.append(turn)
                continue
            break
        for turn in taken:
            self._turns.popleft()
            self.due.difference_update(turn[2])
        return taken

    def reset(self) -> None:
        """No backward runs."""
        self.declare(())
        self.reduced.clear()
