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
        # In order; of each group the trained weights.
        self._turns: deque[tuple[Unit[W], Group[W], list[W]]] = deque()
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

    def next_is_ready(self) -> bool:
        """Whether all gradients of the next turn are ready."""
        ready, most = self._ready, self._uses.most
        for weight in self._turns[0][2] if self._turns else ():
            if ready.get(weight, 0) < most.get(weight, 1):
                return False
        return bool(self._turns)

    def take(self) -> tuple[Unit[W], Group[W], list[W]]:
        """The next turn: the unit, the group, and which of its weights are reduced."""
        turn = self._turns.popleft()
        self.due.difference_update(turn[2])
        return turn

    def reset(self) -> None:
        """No backward runs."""
        self.declare(())
        self.reduced.clear()
