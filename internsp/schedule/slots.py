"""Pure: which bytes of the slots are taken, by whom, and what lies there (WP-1, WP-4, WP-11).

Units share slots. A gather *holds* the bytes of its group until the pass needs them no more;
while they are held, no other group may take them. *Contents* outlive holds: what is still in a
slot, in the dtype that is wanted, is not gathered again. A gather overwrites the contents of the
groups whose bytes it takes; if one of these is still on its way, it is waited for first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic

from internsp.errors import PoolError
from internsp.schedule.terms import (
    ALL_GATHER,
    BACKWARD,
    FORWARD,
    NEAR_GATHER,
    USE,
    WAIT,
    Action,
    Group,
    Policy,
    Unit,
    W,
)

_ABSENT = object()


class SlotContents(Generic[W]):
    """The bytes of all slots of one chunk.

    Args:
        overlap: false for the synchronous path, which waits at each launch (WP-12).

    Attributes:
        contents: for each weight that is in its slot, or on its way there, the dtype there.
        sliced: as ``contents``, for this rank's slices within near groups.
        flying: weights whose gather was launched and not waited for, each with all weights of
            that launch.
        held: groups whose bytes the pass needs, with their unit and the phase.
        group_of: the group of each weight.
        strict: bytes that are held are not taken: blocks run in their order. Otherwise what was
            prefetched for other blocks is given up.
        remedy: the setting that an error advises.
    """

    def __init__(self, overlap: bool) -> None:
        self.contents: dict[W, Hashable] = {}
        self.sliced: dict[W, Hashable] = {}
        self.flying: dict[W, Sequence[W]] = {}
        self.held: dict[Group[W], tuple[Unit[W], str]] = {}
        self.group_of: dict[W, Group[W]] = {}
        self.overlap, self.strict, self.remedy = overlap, True, ""
        self._units: list[Unit[W]] = []
        self._lying: dict[int, dict[Group[W], None]] = {}  # the groups that lie in each slot
        self._rivals: dict[Group[W], set[Group[W]]] = {}  # other groups that have some of its bytes

    def add(self, unit: Unit[W]) -> None:
        """Register the groups of a unit."""
        self._units.append(unit)
        for group in unit.groups:
            self.group_of.update(dict.fromkeys(group.weights, group))

    def begin_order(self, strict: bool, remedy: str) -> None:
        """Blocks run in another order from here on, and may have other slots."""
        self.strict, self.remedy = strict, remedy
        self._lying.clear()
        self._rivals.clear()

    def is_gathered(self, weight: W) -> bool:
        """Whether a weight is in its slot, or on its way there, in the dtype that is wanted now."""
        return not weight.needs_gather or self.contents.get(weight, _ABSENT) == weight.compute_dtype

    # gathers

    def use(self, unit: Unit[W], weight: W, phase: str, out: list[Action[W]]) -> None:
        """A weight is about to be used: gather it if it is not there, and wait for that alone."""
        if weight.needs_gather:
            if self.contents.get(weight, _ABSENT) != weight.compute_dtype:
                self._gather_alone(unit, self.group_of[weight], weight, phase, out)
            if weight in self.flying:
                self._wait(weight, unit, phase, out)

    def use_all(self, unit: Unit[W], phase: str, record: bool, out: list[Action[W]]) -> None:
        """:meth:`use` of all weights of a unit; ``record``: return a ``USE`` of each, too."""
        contents, flying, last_first = self.contents, self.flying, phase == BACKWARD
        for group in reversed(unit.groups) if last_first else unit.groups:
            for weight in reversed(group.weights) if last_first else group.weights:
                if weight.needs_gather and contents.get(weight, _ABSENT) != weight.compute_dtype:
                    self._gather_alone(unit, group, weight, phase, out)
                if weight in flying:
                    self._wait(weight, unit, phase, out)
                if record:
                    out.append(Action(USE, phase, unit, (weight,)))

    def gather_unit(self, unit: Unit[W], phase: str, out: list[Action[W]]) -> None:
        """Gather now those weights of a unit that are not in its slot."""
        for group in Policy.order(unit.groups, phase, unit.recomputed):
            self.gather_group(unit, group, phase, out)

    def take_unit(self, unit: Unit[W], phase: str, out: list[Action[W]]) -> None:
        """:meth:`gather_unit`, taking bytes that are held for another unit."""
        for group in Policy.order(unit.groups, phase, unit.recomputed):
            for found in self.overlapping(unit, group):
                self.held.pop(found, None)
            self.gather_group(unit, group, phase, out)

    def gather_again(self, unit: Unit[W]) -> list[Action[W]]:
        """Gather again what is in the slot in another dtype than autocast now asks for."""
        out: list[Action[W]] = []
        for group in unit.groups:
            # Groups that are not gathered yet come in their order.
            if any(weight in self.contents for weight in group.weights):
                self.gather_group(unit, group, FORWARD, out)
        return out

    def gather_group(
        self,
        unit: Unit[W],
        group: Group[W],
        phase: str,
        out: list[Action[W]],
        if_free: bool = False,
    ) -> bool:
        """Gather those weights of ``group`` that are not in the slot; hold its bytes.

        Args:
            if_free: do nothing while some of the bytes are held by other groups.

        Returns:
            Whether it was done.
        """
        under = self.overlapping(unit, group)
        if if_free and not self.held.keys().isdisjoint(under):
            return False
        missing = [
            w
            for w in group.weights
            if w.needs_gather and self.contents.get(w, _ABSENT) != w.compute_dtype
        ]
        if missing:
            if phase == BACKWARD and not unit.recomputed:
                missing.reverse()
            self._launch(unit, missing, self._hold(unit, group, under, phase), phase, out)
        elif any(w.needs_gather for w in group.weights):
            self._hold(unit, group, under, phase)
        return True

    def overlapping(self, unit: Unit[W], group: Group[W]) -> list[Group[W]]:
        """Other groups that lie in bytes that ``group`` needs."""
        rivals = self._rivals.get(group)
        if rivals is None:  # once for each group: it has the same bytes in every pass
            rivals = self._rivals[group] = {
                found
                for other in self._units
                if other.slot == unit.slot
                for found in other.groups
                if found.start < group.end and group.start < found.end and found is not group
            }
        lying = self._lying.get(unit.slot, {})
        under = rivals & lying.keys()
        return [*under] if len(under) < 2 else [found for found in lying if found in under]

    # waits

    def wait_for(self, unit: Unit[W], weight: W, phase: str) -> list[Action[W]]:
        """Wait for the gather of a weight, if it is in flight."""
        out: list[Action[W]] = []
        if weight in self.flying:
            self._wait(weight, unit, phase, out)
        return out

    def wait_for_gathers(self) -> list[Action[W]]:
        """Wait for all gathers in flight: the shards that they read are about to be written."""
        out: list[Action[W]] = []
        while self.flying:
            self._wait(next(iter(self.flying)), None, "settle", out)
        return out

    # releases

    def release(self, unit: Unit[W]) -> None:
        """The pass needs the unit's bytes no more."""
        for group in unit.groups:
            self.held.pop(group, None)

    def drop(self, unit: Unit[W]) -> list[Action[W]]:
        """Drop the contents of ``unit``'s slot: its next use gathers it again."""
        out: list[Action[W]] = []
        for group in unit.groups:
            for weight in group.weights:
                if weight in self.flying:
                    self._wait(weight, None, "settle", out)
            self.invalidate(group.weights)
            self.held.pop(group, None)
        return out

    def invalidate(self, weights: Iterable[W]) -> None:
        """Drop the contents of slots and slices for ``weights``."""
        for weight in weights:
            self.contents.pop(weight, None)
            self.sliced.pop(weight, None)

    def invalidate_contents(self) -> None:
        """Drop the contents of all slots and slices."""
        self.contents.clear()
        self.sliced.clear()

    def reset(self) -> None:
        """After a failure, once everything in flight has arrived: nothing lies anywhere."""
        self.invalidate_contents()
        self.flying.clear()
        self.held.clear()
        self._lying.clear()

    # inside

    def _gather_alone(
        self, unit: Unit[W], group: Group[W], weight: W, phase: str, out: list[Action[W]]
    ) -> None:
        """Gather one weight of ``group``, at its use."""
        evicted = self._hold(unit, group, self.overlapping(unit, group), phase)
        self._launch(unit, (weight,), evicted, phase, out)

    def _launch(
        self,
        unit: Unit[W],
        weights: Sequence[W],
        evicted: Sequence[W],
        phase: str,
        out: list[Action[W]],
    ) -> None:
        """Launch a gather into held bytes, which ``evicted`` have left."""
        contents, flying = self.contents, self.flying
        for weight in (*evicted, *weights) if flying else ():
            if weight in flying:  # an earlier gather still writes these bytes
                self._wait(weight, unit, "settle", out)
        for weight in evicted:
            contents.pop(weight, None)
        for weight in weights:
            contents[weight] = weight.compute_dtype
        messages: list[tuple[str, Sequence[W]]] = [(ALL_GATHER, weights)]
        if weights[0].slices:
            near = [w for w in weights if self.sliced.get(w, _ABSENT) == w.compute_dtype]
            far = [w for w in weights if w not in near]
            self.sliced.update((w, w.compute_dtype) for w in far)
            messages = [(NEAR_GATHER, near), (ALL_GATHER, far)]
        for kind, part in messages:
            if not part:
                continue
            out.append(Action(kind, phase, unit, part, evicted))
            evicted = ()
            if part[0].needs_wait:
                for weight in part:
                    flying[weight] = part
                if not self.overlap:
                    self._wait(part[0], unit, phase, out)

    def _hold(
        self, unit: Unit[W], group: Group[W], under: Sequence[Group[W]], purpose: str
    ) -> list[W]:
        """Hold the bytes of a group (WP-4).

        Args:
            under: the groups that lie there (:meth:`overlapping`).

        Returns:
            The weights whose contents are overwritten.

        Raises:
            PoolError: some of the bytes are held by another group; names both.
        """
        lying = self._lying.setdefault(unit.slot, {})
        for found in under:
            if found in self.held:
                holder, why = self.held[found]
                if self.strict or holder is unit:
                    raise PoolError(
                        f"slot {unit.slot}: the bytes of {group.name} asked for by {unit.name} "
                        f"({purpose}) while they are held by {holder.name} for {found.name} "
                        f"({why}); blocks must run in the declared order and use a weight no more "
                        f"often than in a forward before, or set weight_parallel.{self.remedy}"
                    )
                del self.held[found]
            del lying[found]
        lying[group] = None
        if unit.block >= 0:  # the slots of units outside of the blocks are not held
            self.held[group] = unit, purpose
        return [w for found in under for w in found.weights]

    def _wait(self, weight: W, unit: Unit[W] | None, phase: str, out: list[Action[W]]) -> None:
        launched = self.flying[weight]
        for other in launched:
            self.flying.pop(other, None)
        out.append(Action(WAIT, phase, unit, (weight,), launched))
