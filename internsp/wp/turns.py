"""Pure: the reductions of one unit's backward, in their declared order (WP-2).

How often a weight is used may differ between ranks, for data decide: not at all where an expert is
idle, twice where it serves two modules. Each has exactly one reduction all the same, in its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

W = TypeVar("W")
G = TypeVar("G")


class Turns(Generic[W, G]):
    """Which gradients of a unit may be reduced now.

    A weight's turn comes when those before it have had theirs and all its gradients are there: as
    many as this rank has ever seen it used in one forward. What is left when the unit's backward
    is over takes its turn then, with the sum that there is, or without one: zeros.

    Args:
        order: weights in the declared order of their reductions.
        uses: how often a forward of this rank uses a weight, at most.
        add: the sum of two gradients of a weight.
        at_close: no turn comes before :meth:`close`, because the unit's passes hold exchanges of
            other groups, whose place among the reductions must be the same on every rank.
    """

    def __init__(
        self,
        order: Iterable[W],
        uses: Callable[[W], int],
        add: Callable[[G, G], G],
        at_close: bool = False,
    ) -> None:
        self._waiting = deque(order)
        self._open = set(self._waiting)
        self._uses, self._add, self._at_close = uses, add, at_close
        self._sums: dict[W, tuple[int, G]] = {}

    def __contains__(self, weight: W) -> bool:
        return weight in self._open

    def ready(self, weight: W, gradient: G, last: bool = False) -> Iterator[tuple[W, G]]:
        """Take a gradient of ``weight``, which is among these; yields those whose turn has come.

        Args:
            last: it has no other in this backward, however often it was used.
        """
        count, total = self._sums.get(weight, (0, None))
        total = gradient if total is None else self._add(total, gradient)
        self._sums[weight] = (count + 1 if not last else max(self._uses(weight), 1), total)
        while not self._at_close and self._waiting:
            first = self._waiting[0]
            count, total = self._sums.get(first, (0, None))
            if total is None or count < self._uses(first):
                return
            self._pass()
            yield first, total

    def close(self) -> Iterator[tuple[W, G | None]]:
        """The unit's backward is over: yields the rest in order, ``None`` for no gradient."""
        while self._waiting:
            first = self._waiting[0]
            total = self._sums.get(first, (0, None))[1]
            self._pass()
            yield first, total

    def all_at_once(self, weights: Iterable[W]) -> bool:
        """Whether ``weights`` are those that wait, in order, and may all go: then none waits."""
        if self._at_close or self._sums or list(self._waiting) != list(weights):
            return False
        self._waiting.clear()
        self._open.clear()
        return True

    def _pass(self) -> None:
        weight = self._waiting.popleft()
        self._open.discard(weight)
        self._sums.pop(weight, None)
