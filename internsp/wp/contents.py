"""Whether what is in the slots is still what the shards hold, where no version counter says so.

Between two passes a user's program runs and may have written weights by any way (``.data``, foreach
operations, numpy, on one rank only), so a forward takes nothing over from the pass before it, and
all ranks gather the same. Within a pass, from the start of a forward to the end of its backward,
and within :meth:`internsp.wp.communicator.ISPCommunicator.unchanged`, contents are used again by
their version (WP-11). What raises no version is found there by comparing this rank's own rows with
those in the slot, on the host's memory only: on a device the host would have to wait for the
answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from internsp.errors import StaleWeightError
from internsp.wp.parameter import Member

if TYPE_CHECKING:
    from internsp.wp.communicator import ISPCommunicator


class Contents:
    """What is in the slots of one communicator's chunk, from pass to pass."""

    def __init__(self, communicator: ISPCommunicator) -> None:
        self._communicator = communicator
        self._state, self._rank = communicator.state, communicator.mesh.rank
        self._promised: list[tuple[Member, int]] | None = None  # not to be written: versions
        self.promised = False  # within unchanged(); else until the next pass, which was prefetched

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """See :meth:`ISPCommunicator.unchanged`."""
        if self.promised:  # within another
            yield
            return
        self._promise()
        self.promised = True
        try:
            yield
        finally:
            self._promised, self.promised = None, False

    def renew(self) -> None:
        """The library itself has raised versions as a pass begins: no values were written."""
        self._promised = self._versions() if self.promised else None

    def prefetched(self) -> None:
        """Weights are gathered before the next pass, which takes them over: none may be written."""
        if self._promised is None:
            self._promise()

    def _promise(self) -> None:
        self._state.queue.forget_contents()
        self._promised = self._versions()

    def _versions(self) -> list[tuple[Member, int]]:
        return [(member, member.version()) for member in self._communicator.replicated.everyone()]

    def begin_pass(self) -> bool:
        """Whether this pass may use what the slots hold.

        A user's program may have run since the last one: only where it has promised (WP-11).
        """
        promised = self._promised
        if promised is None:
            return False
        if not self.promised:
            self._promised = None
        for member, version in promised:
            if member.version() != version:
                where = "within unchanged()"
                remedy = "step, load or edit outside of it"
                if not self.promised:
                    where = "between a prefetch and the forward"
                    remedy = "call unshard() or prefetch_all() after the last write"
                raise StaleWeightError(
                    f"{member.name} was written on rank {self._rank} {where}, where weights in "
                    f"slots are used again: {remedy}"
                )
        self.check()
        return True

    def check(self) -> None:
        """Before contents are used again: the shards in memory are those that were gathered.

        Raises:
            StaleWeightError: one was written by a way that no version counter shows.
        """
        if self._state.pool.device.type != "cpu":
            return
        state, held = self._state, self._state.queue.contents
        rounded = state.quantizer.weights if state.quantizer is not None else ()
        for weight, dtype in held.items():
            there = (
                dtype == weight.compute_dtype
                and weight not in rounded
                and weight not in state.handles  # on its way to its slot
                and weight.ready is None  # or from an optimizer
            )
            slot = state.pool.slots[weight.unit.slot]
            if there and not weight.agrees_with(slot.flat(weight.unit, weight)):
                raise StaleWeightError(
                    f"{weight.name} was written on rank {self._rank} between a forward and its "
                    "backward, or within unchanged(), by a way that no version counter shows "
                    "(torch._foreach_*, numpy): write weights between a backward and the next "
                    "forward"
                )
