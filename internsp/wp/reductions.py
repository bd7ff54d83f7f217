"""Pure: which gradient is reduced when, one order on all ranks, bounded in flight (WP-2, WP-6)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic

from internsp.wp.exchanges import Exchanges
from internsp.wp.schedule import (
    ACCUMULATE,
    BACKWARD,
    FINISH,
    FINISH_OLDEST,
    FREE,
    REDUCE_SCATTER,
    WAIT,
    Action,
    Group,
    W,
)

Turn = tuple[Any, Group[W], list[W]]
"""A unit, one of its groups, and those of the group's weights that are trained."""


class Reductions(Generic[W]):
    """The reductions of a chunk's backwards.

    How often a weight is used may differ between ranks, for data decide: not at all where an expert
    is idle, twice where it serves two modules. Each has exactly one reduction all the same, in its
    turn: when those before it have had theirs and all its gradients are ready, as many as this rank
    has ever seen it used in one forward. What is left when the unit's backward is over takes its
    turn then, with the sum that there is, or with zeros.

    Args:
        limit: bytes of unsharded gradients in flight; the oldest are finished first.
        overlap: false for the synchronous path, which waits at each launch (WP-12).

    Attributes:
        accumulating: unsharded gradients are summed instead of being reduced.
        due: weights whose turn is still to come.
        exchanges: of what was reduced, between replicas.
    """

    def __init__(self, limit: int = 0, overlap: bool = True) -> None:
        self.accumulating = False
        self.exchanges: Exchanges[W] = Exchanges()
        self._limit, self._overlap = limit, overlap
        self._flying: deque[tuple[Any, Sequence[W], int]] = deque()
        self._flying_bytes = 0
        self._unit: Any = None  # whose reduction was launched last
        self.declare()

    def declare(self, order: Iterable[Turn[W]] = (), at_close: bool = False) -> None:
        """The turns of the backward, or the block, that begins.

        Args:
            at_close: no turn comes before :meth:`close`, because the unit's passes hold exchanges
                of other groups, whose place among the reductions must be the same on every rank.
        """
        self._waiting = deque(order)
        self.due = {weight for _, _, weights in self._waiting for weight in weights}
        self._at_close = at_close
        self._ready: dict[W, int] = {}

    def grads_ready(
        self, weights: Sequence[W], most: Mapping[W, int], last: bool
    ) -> list[Turn[W]]:
        """One more gradient of each of ``weights`` is ready: whose turn has come by it.

        Args:
            most: uses of a weight in one forward, where above one.
            last: the weights have no other in this backward, however often they were used.
        """
        ready = self._ready
        for weight in weights:
            ready[weight] = ready.get(weight, 0) + (most.get(weight, 1) if last else 1)
        turns: list[Turn[W]] = []
        while self._waiting and not self._at_close:
            for weight in self._waiting[0][2]:
                if ready.get(weight, 0) < most.get(weight, 1):
                    return turns
            turns.append(self._take())
        return turns

    def close(self) -> Turn[W] | None:
        """The next of what is left, when the unit's backward is over."""
        return self._take() if self._waiting else None

    def _take(self) -> Turn[W]:
        turn = self._waiting.popleft()
        self.due.difference_update(turn[2])
        return turn

    def launch(
        self,
        unit: Any,
        weights: Sequence[W],
        out: list[Action],
        last: bool = False,
        sums: bool = False,
    ) -> None:
        """Launch one reduction; the oldest are finished where too many bytes would be in flight.

        No more of them than that: a whole unit finished at once would leave the link idle.

        Args:
            last: ``weights`` have no other in this backward.
            sums: of what was accumulated, also while more is.
        """
        if self.accumulating and not sums:
            out.append(Action(ACCUMULATE, BACKWARD, unit, weights))
        else:
            self._next_unit(unit, out)
            nbytes = sum([weight.gradient_bytes for weight in weights])
            while self._flying and self._flying_bytes + nbytes > self._limit:
                self._finish_oldest(out)
            self._flying.append((unit, weights, nbytes))
            self._flying_bytes += nbytes
            if self.exchanges.active:
                self.exchanges.reduced(weights, last)
            out.append(Action(REDUCE_SCATTER, BACKWARD, unit, weights))
            if weights[0].travels and not self._overlap:
                out.append(Action(WAIT, BACKWARD, unit, weights[:1]))
        out.append(Action(FREE, BACKWARD, unit, weights))

    def finish(self, last: bool = False) -> list[Action]:
        """Wait for every reduction in flight, in launch order.

        Args:
            last: no gradient comes before replicas exchange: start that, too.
        """
        out: list[Action] = []
        while self._flying:
            self._finish_oldest(out)
            if last:
                self.exchanges.advance(out, over=True)
        return out

    def complete(self) -> list[Action]:
        """:meth:`finish`, and the exchange between replicas of all that is reduced by then."""
        out = self.finish(last=True)
        self.exchanges.complete(out)
        return out

    def reset(self) -> None:
        """After a failure: nothing is due, nothing in flight."""
        self._flying.clear()
        self._flying_bytes, self._unit = 0, None
        self.exchanges.forget()
        self.declare()

    def _finish_oldest(self, out: list[Action]) -> None:
        _, weights, nbytes = self._flying.popleft()
        self._flying_bytes -= nbytes
        self.exchanges.finished(weights)
        out.append(Action(FINISH_OLDEST, FINISH, None, weights))

    def _next_unit(self, unit: Any, out: list[Action]) -> None:
        """Where replicas exchange early: finish what was launched before the unit before.

        That unit's backward has left it time to arrive, and on all ranks this is one point of the
        order, between the same two reductions (WP-2).
        """
        if unit is self._unit:
            return
        before, self._unit = self._unit, unit
        if self.exchanges.early:
            while self._flying and self._flying[0][0] is not before:
                self._finish_oldest(out)
            self.exchanges.advance(out)
