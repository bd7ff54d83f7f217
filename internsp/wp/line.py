"""Pure: the trigger "rolling". Leases per weight, and the line of a pass's gathers (DESIGN 4.1).

All gathers of a pass stand in one line: block after block, in each block in the order of its
weights. The first of the line is launched as soon as its place in its slot is free, which is when
the weight that had it is no longer needed: after its use in forward, after the birth of its
gradient in backward, at the latest when its block is left. So the link is never idle while there is
anything left to gather, whole weights take the same slots as ever (WP-1), and the order is the
line's, on every rank, whatever a rank's data leaves idle (WP-2): only the moment differs.

Places are compared by their bytes. Blocks of equal shapes take each other's places one by one;
where shapes differ, a weight waits until everything under it is free.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from internsp.errors import PoolError


class Named(Protocol):
    """What has a name: a weight."""

    @property
    def name(self) -> str:
        """For errors."""


class Block(Protocol):
    """A block as the line sees it."""

    @property
    def name(self) -> str:
        """For errors."""

    @property
    def slot(self) -> int:
        """Index of its slot."""

    @property
    def block(self) -> int:
        """Index among the chunk's blocks."""


U = TypeVar("U", bound=Block)
W = TypeVar("W", bound=Named)
Extent = tuple[int, int]


class Places(Generic[U, W]):
    """One slot: whose weights lie where in it, and which places are held."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.held: dict[W, tuple[U, str]] = {}
        self._starts: list[int] = []  # sorted; what lies in the slot does not overlap
        self._lying: dict[int, tuple[int, U, W]] = {}
        self._where: dict[W, int] = {}

    def under(self, weight: W, extent: Extent) -> list[tuple[U, W]]:
        """Whose places ``weight`` would take."""
        start, end = extent
        found = []
        at = max(bisect_right(self._starts, start) - 1, 0)
        while at < len(self._starts) and self._starts[at] < end:
            other_end, unit, other = self._lying[self._starts[at]]
            if other_end > start and other is not weight:
                found.append((unit, other))
            at += 1
        return found

    def free(self, weight: W, extent: Extent) -> bool:
        """Whether nobody else holds any of it."""
        return not any(other in self.held for _, other in self.under(weight, extent))

    def take(self, unit: U, weight: W, extent: Extent, purpose: str) -> list[tuple[U, W]]:
        """Hold ``weight``'s place.

        Returns:
            Whose contents are lost by it.

        Raises:
            PoolError: when a part of it is held for another weight, naming both (WP-4).
        """
        gone = self.under(weight, extent)
        for _, other in gone:
            if other in self.held:
                holder, why = self.held[other]
                raise PoolError(
                    f"slot {self.index}: the place of {weight.name} asked for by {unit.name} "
                    f"({purpose}) while it is held by {holder.name} for {other.name} ({why}); "
                    "blocks must run in the declared order and use each weight as often as in "
                    'their first forward, or set weight_parallel.trigger = "out_proj"'
                )
        for _, other in gone:
            at = self._where.pop(other)
            del self._lying[at]
            self._starts.remove(at)
        if weight not in self._where:
            start, end = extent
            insort(self._starts, start)
            self._lying[start], self._where[weight] = (end, unit, weight), start
        self.held[weight] = (unit, purpose)
        return gone

    def let_go(self, unit: U, weight: W) -> None:
        """``weight`` is no longer needed (no effect unless ``unit`` holds it); its values stay."""
        if weight in self.held and self.held[weight][0] is unit:
            del self.held[weight]

    def give_back(self, unit: U) -> None:
        """``unit`` needs none of its weights any more."""
        self.held = {w: (u, why) for w, (u, why) in self.held.items() if u is not unit}


class Rolling(Generic[U, W]):
    """The line of a pass, and the places it waits for.

    Args:
        units: the chunk's blocks in the declared order.
        onward: indices of the blocks from one on, in the order of a pass.
        order: a block's weights in the order of a pass (those that travel), as launches.
        extent: first and last byte (excluded) of a weight in its slot.
        launch: gathers some weights of a block, which takes their places.
        end: called with the phase when the line has come to its end.
    """

    def __init__(
        self,
        units: Sequence[U],
        onward: Callable[[int, str], Sequence[int]],
        order: Callable[[U, str], list[list[W]]],
        extent: Callable[[U, W], Extent],
        launch: Callable[[U, list[W], str], None],
        end: Callable[[str], None],
    ) -> None:
        self._units = units
        self._onward = onward
        self._order = order
        self._extent = extent
        self._launch = launch
        self._end = end
        self._places = {u.slot: Places[U, W](u.slot) for u in units}
        self._line: Iterator[tuple[U, list[W]]] | None = None
        self._first: tuple[U, list[W]] | None = None
        self._phase = ""
        self._at = -1  # the block that was entered last

    def enter(self, unit: U, phase: str) -> None:
        """``unit`` runs next. If the line has not brought it, a new line begins with it."""
        near = self._phase == phase and unit.block in self._onward(self._at, phase)[:2]
        if not (near and all(self.holds(unit, w) for ws in self._order(unit, phase) for w in ws)):
            self.release_all()
            self._phase = phase
            blocks = [self._units[i] for i in self._onward(unit.block, phase)]
            self._line = ((u, weights) for u in blocks for weights in self._order(u, phase))
            self._first = next(self._line, None)
        self._at = unit.block
        self.advance()

    def advance(self) -> None:
        """Launch the first of the line as long as its place is free."""
        while self._line is not None:
            if self._first is None:
                self._line = None
                self._end(self._phase)
                return
            unit, weights = self._first
            places = self._places[unit.slot]
            if not all(places.free(w, self._extent(unit, w)) for w in weights):
                return
            self._first = next(self._line, None)
            self._launch(unit, weights, self._phase)

    def holds(self, unit: U, weight: W) -> bool:
        """Whether ``weight``'s place is held for ``unit``: its gather was launched in this pass."""
        found = self._places[unit.slot].held.get(weight)
        return found is not None and found[0] is unit

    def alone(self, unit: U) -> bool:
        """Whether no other block holds a place in ``unit``'s slot."""
        return all(u is unit for u, _ in self._places[unit.slot].held.values())

    def under(self, unit: U, weight: W) -> list[tuple[U, W]]:
        """See :meth:`Places.under`."""
        return self._places[unit.slot].under(weight, self._extent(unit, weight))

    def take(self, unit: U, weight: W, purpose: str) -> list[tuple[U, W]]:
        """See :meth:`Places.take`."""
        return self._places[unit.slot].take(unit, weight, self._extent(unit, weight), purpose)

    def let_go(self, unit: U, weight: W) -> None:
        """``weight`` is no longer needed in this pass: who waits for its place comes."""
        self._places[unit.slot].let_go(unit, weight)
        self.advance()

    def give_back(self, unit: U) -> None:
        """``unit`` is left: so are all its places."""
        self._places[unit.slot].give_back(unit)
        self.advance()

    def release_all(self) -> None:
        """The pass is over: no place is held and nobody waits."""
        for places in self._places.values():
            places.held.clear()
        self._line = self._first = None
        self._phase, self._at = "", -1


def launches(weights: Sequence[W], small: Callable[[W], bool]) -> list[list[W]]:
    """``weights`` as they are launched: neighbours that are small together, others alone."""
    found: list[list[W]] = []
    last = False
    for weight in weights:
        together = small(weight)
        if together and last:
            found[-1].append(weight)
        else:
            found.append([weight])
        last = together
    return found
