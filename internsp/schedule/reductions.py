"""Pure: the order of reductions in flight, and of exchanges between replicas (WP-2, WP-6)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Generic

from internsp.schedule.terms import (
    ACCUMULATE,
    BACKWARD,
    EXCHANGE,
    FINISH,
    FINISH_EXCHANGE,
    FINISH_OLDEST,
    FREE,
    REDUCE_SCATTER,
    WAIT,
    Action,
    Parcel,
    Unit,
    W,
)

_BYTES = attrgetter("gradient_bytes")


class Reductions(Generic[W]):
    """The reductions of a chunk that are in flight; the gather queue decides what is reduced next.

    Args:
        limit: bytes of unsharded gradients in flight (one reduction may exceed it); the oldest are
            finished first.
        overlap: false for the synchronous path, which waits at each launch (WP-12).

    Attributes:
        accumulating: unsharded gradients are summed instead of being reduced.
        exchanges: exchanges of reduced gradients between replicas.
    """

    def __init__(self, limit: int = 0, overlap: bool = True) -> None:
        self.accumulating = False
        self.exchanges: Exchanges[W] = Exchanges()
        self._limit, self._overlap = limit, overlap
        self._flying: deque[tuple[Unit[W], Sequence[W], int]] = deque()
        self._flying_bytes = 0
        self._unit: Unit[W] | None = None  # of the reduction that was launched last

    def launch(
        self,
        unit: Unit[W],
        weights: Sequence[W],
        out: list[Action[W]],
        last: bool = False,
        sums: bool = False,
    ) -> None:
        """Launch one reduction; first finish the oldest while too many bytes would be in flight.

        It finishes only as many as needed: finishing a whole unit's at once would leave the link
        idle.

        Args:
            last: ``weights`` have no other reduction in this backward.
            sums: reduce accumulated sums, also where this backward accumulates.
        """
        if self.accumulating and not sums:
            out.append(Action(ACCUMULATE, BACKWARD, unit, weights))
        else:
            if unit is not self._unit:
                self._next_unit(unit, out)
            nbytes = sum(map(_BYTES, weights))
            while self._flying and self._flying_bytes + nbytes > self._limit:
                self._finish_oldest(out)
            self._flying.append((unit, weights, nbytes))
            self._flying_bytes += nbytes
            if self.exchanges.active:
                self.exchanges.reduced(weights, last)
            out.append(Action(REDUCE_SCATTER, BACKWARD, unit, weights))
            if weights[0].needs_wait and not self._overlap:
                out.append(Action(WAIT, BACKWARD, unit, weights[:1]))
        out.append(Action(FREE, BACKWARD, unit, weights))

    def finish(self, last: bool = False) -> list[Action[W]]:
        """Wait for every reduction in flight, in launch order.

        Args:
            last: no more gradients come before replicas exchange: start the exchanges, too.
        """
        out: list[Action[W]] = []
        while self._flying:
            self._finish_oldest(out)
            if last:
                self.exchanges.advance(out, over=True)
        return out

    def complete(self) -> list[Action[W]]:
        """:meth:`finish`, then exchange everything between replicas and wait for it."""
        out = self.finish(last=True)
        self.exchanges.complete(out)
        return out

    def reset(self) -> None:
        """After a failure: nothing is in flight."""
        self._flying.clear()
        self._flying_bytes, self._unit = 0, None
        self.exchanges.reset()

    def _finish_oldest(self, out: list[Action[W]]) -> None:
        _, weights, nbytes = self._flying.popleft()
        self._flying_bytes -= nbytes
        if self.exchanges.active:
            self.exchanges.finished(weights)
        out.append(Action(FINISH_OLDEST, FINISH, None, weights))

    def _next_unit(self, unit: Unit[W], out: list[Action[W]]) -> None:
        """Before the first reduction of another unit: where replicas exchange early, finish older
        reductions.

        Reductions launched before the previous unit's had that unit's backward to arrive in. On all
        ranks this is the same point of the order, between the same two reductions (WP-2).
        """
        before, self._unit = self._unit, unit
        if self.exchanges.early:
            while self._flying and self._flying[0][0] is not before:
                self._finish_oldest(out)
            self.exchanges.advance(out)


class Exchanges(Generic[W]):
    """The exchanges of a chunk's reduced gradients between replicas, once between two steps.

    All ranks exchange the parcels in one declared order, that in which a backward completes them.
    When a rank exchanges a parcel may differ between ranks. In an ``early`` backward, a parcel is
    exchanged as soon as the last reduction of each of its weights is finished; the other parcels,
    and those that got a gradient after their exchange, are exchanged at the end (:meth:`complete`).
    A backward is early if it is known or expected to be the last one before the sums are needed. If
    another one follows all the same, its gradients need a second exchange, and the sums are right.

    Attributes:
        parcels: the parcels in the declared order.
        active: whether anything is exchanged at all.
        early: whether the backward that runs, or ran last, exchanges while it runs.
    """

    def __init__(self) -> None:
        self.declare((), 0)

    def declare(self, parcels: Sequence[Parcel[W]], limit: int) -> None:
        """Set the parcels and their order.

        Args:
            limit: bytes in flight (one parcel may exceed it); the oldest are finished first.
        """
        self.parcels, self._limit = list(parcels), limit
        self.active = bool(parcels)
        self._parcel_of = {w: i for i, parcel in enumerate(parcels) for w in parcel.weights}
        self.reset()

    def reorder(self, parcels: Sequence[Parcel[W]]) -> None:
        """Set another order of the same parcels, between two steps."""
        self.declare(parcels, self._limit)

    def reset(self) -> None:
        """Begin anew: nothing is reduced, complete, exchanged or in flight."""
        self.early = False
        # Reductions in flight, by number of the parcel; the last are those of weights of no parcel.
        self._reducing = [0] * (len(self.parcels) + 1)
        self._at = 0  # the next parcel
        self._again: set[int] = set()  # parcels with a reduction after their exchange
        self._settled: set[W] = set()  # weights whose last reduction of this backward was launched
        self._flying: deque[int] = deque()

    def begin(self, early: bool) -> None:
        """A backward begins."""
        self.early = early and self.active
        self._settled.clear()

    def reduced(self, weights: Sequence[W], last: bool) -> None:
        """A reduction was launched.

        Args:
            last: ``weights`` have no other reduction in this backward.
        """
        if last:
            self._settled.update(weights)
        for weight in weights:
            number = self._parcel_of.get(weight, -1)
            self._reducing[number] += 1
            if 0 <= number < self._at:
                self._again.add(number)

    def finished(self, weights: Sequence[W]) -> None:
        """A reduction was finished."""
        for weight in weights:
            self._reducing[self._parcel_of.get(weight, -1)] -= 1

    def advance(self, out: list[Action[W]], over: bool = False) -> None:
        """Exchange the next parcels, as long as they are complete.

        Args:
            over: no more gradients come before the sums are needed.
        """
        while (self.early or over) and self._at < len(self.parcels):
            weights = self.parcels[self._at].weights
            if self._reducing[self._at]:
                return
            if not over and any(w.trained and w not in self._settled for w in weights):
                return
            self._at += 1
            self._start(self._at - 1, out)

    def complete(self, out: list[Action[W]]) -> None:
        """Exchange what is left and wait for it; called once every reduction is finished."""
        self.advance(out, over=True)
        for index in sorted(self._again):
            self._start(index, out)
        while self._flying:
            self._finish_oldest(out)
        self.reset()

    def _start(self, index: int, out: list[Action[W]]) -> None:
        parcel = self.parcels[index]
        while self._flying and sum(self._flying) + parcel.nbytes > self._limit:
            self._finish_oldest(out)
        self._flying.append(parcel.nbytes)
        out.append(Action(EXCHANGE, BACKWARD, None, parcel.weights, (), parcel))

    def _finish_oldest(self, out: list[Action[W]]) -> None:
        self._flying.popleft()
        out.append(Action(FINISH_EXCHANGE, FINISH, None, ()))
