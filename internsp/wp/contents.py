"""Whether the contents of slots still equal the shards, also where no version counter shows it.

Between two passes a user's program runs and may write weights in any way (``.data``, foreach
operations, numpy, on one rank only). So a forward reuses nothing from the pass before it, and all
ranks gather the same weights. From the start of a forward to the end of its backward, and within
:meth:`internsp.wp.communicator.ISPCommunicator.unchanged`, contents are reused by their version
(WP-11). Writes that raise no version are found there by comparing this rank's own rows with those
in the slot; in host memory only, since on a device the host would have to wait for the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from internsp.base.host import WEIGHTS
from internsp.errors import StaleWeightError
from internsp.wp.parameter import Member
from internsp.wp.perform import Chunk


class Contents:
    """Decides whether a pass may reuse what is in the slots of one chunk.

    Args:
        members: all parameters of the chunk.
        rank: for errors.
    """

    def __init__(self, chunk: Chunk, members: Sequence[Member], rank: int) -> None:
        self._state, self._members, self._rank = chunk, members, rank
        # Versions of the parameters, which the program has promised not to write; None: no promise.
        self._promised: list[tuple[Member, int]] | None = None
        # Promised by unchanged(); if false, a promise is a prefetch's, until the next pass begins.
        self.promised = False
        # The program has not used parameters or state since the last step, nor will it until all
        # that the next one queues is done: nothing it wrote is looked for, nothing handed to it.
        self.left_alone = False

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """See :meth:`internsp.wp.communicator.ISPCommunicator.unchanged`."""
        if self.promised:  # within another unchanged()
            yield
            return
        self._promise()
        self.promised = True
        try:
            yield
            self._state.wait_for_gathers()  # of weights that nothing used: they may be written now
        finally:
            self._promised, self.promised = None, False

    def hand_over(self, state: bool = False) -> None:
        """The program goes on, and may write weights: wait for gathers that nothing has used, since
        another rank may use them, and would get rows of before and after the write. In host memory
        the host waits until no copy uses it; where the program uses nothing there, the current
        stream waits instead.

        Args:
            state: what an optimizer keeps there has changed, too.
        """
        chunk = self._state
        if chunk.handles and not self.promised:
            chunk.wait_for_gathers()
        if (link := chunk.link) is not None:
            seen = state or any(WEIGHTS in member.offload for member in self._members)
            if seen and not self.left_alone:
                link.synchronize()
            else:
                link.finish_copies_to_host()

    def renew(self) -> None:
        """Note the versions again: the library has raised some without writing values."""
        self._promised = self._versions() if self.promised else None

    def moved(self, versions: Mapping[Member, int]) -> None:
        """Parameters were moved to other memory with the values they had: drop contents, and note
        their versions again.

        Args:
            versions: those before the move.
        """
        self._state.queue.slots.invalidate_contents()
        if self._promised is not None:
            self._promised = [
                (member, member.version() if versions.get(member) == version else version)
                for member, version in self._promised
            ]

    def prefetched(self) -> None:
        """Note that weights are prefetched for the next pass: none may be written before it."""
        if self._promised is None:
            self._promise()

    def _promise(self) -> None:
        """Drop older contents, which may differ from the shards, and note the versions."""
        self._state.queue.slots.invalidate_contents()
        self._promised = self._versions()

    def _versions(self) -> list[tuple[Member, int]]:
        return [(member, member.version()) for member in self._members]

    def begin_pass(self) -> bool:
        """Whether the pass that begins may reuse contents: only if the program has promised not
        to write weights (WP-11).

        Raises:
            StaleWeightError: the program has promised so, and a weight was written.
        """
        promised = self._promised
        if promised is None:
            return False
        if not self.promised:
            self._promised = None
        kept = self._state.queue.slots.contents  # what was prefetched, and not resharded since
        for member, version in promised:
            if (self.promised or member in kept) and member.version() != version:
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
        """Check, before contents are reused, that the shards are those that were gathered.

        Raises:
            StaleWeightError: a shard was written in a way that no version counter shows.
        """
        if self._state.pool.device.type != "cpu":
            return
        state, contents = self._state, self._state.queue.slots.contents
        for weight, dtype in contents.items():
            comparable = (
                dtype == weight.compute_dtype
                and weight.encoding is None
                and weight not in state.handles  # its gather is in flight
                and weight.ready is None  # or an optimizer's all-gather of its new values is
            )
            if comparable and not weight.agrees():
                raise StaleWeightError(
                    f"{weight.name} was written on rank {self._rank} between a forward and its "
                    "backward, or within unchanged(), by a way that no version counter shows "
                    "(torch._foreach_*, numpy): write weights between a backward and the next "
                    "forward"
                )
