"""Where the pass that runs stands among the micro-batches of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from internsp.schedule.reductions import Reductions
from internsp.wp.parameter import ShardedParameter


class Accumulation:
    """Which backwards of a chunk only sum their gradients, and what comes after the pass that runs.

    Args:
        reductions: those of the chunk; ``accumulating`` of them is set here alone.

    Attributes:
        more_to_come: replicas exchange sums after a later backward, not after this one; ``None``:
            the program has not said which.
        at_next_pass: called when a pass gathers nothing more, so that a pipeline can prefetch.
    """

    def __init__(self, reductions: Reductions[ShardedParameter]) -> None:
        self._reductions = reductions
        self.more_to_come: bool | None = None
        self.at_next_pass: Callable[[], None] = _nothing

    @property
    def goes_on(self) -> bool:
        """Whether a later backward is known to complete the sums of this one."""
        return self._reductions.accumulating or bool(self.more_to_come)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See :meth:`internsp.wp.communicator.ISPCommunicator.no_sync`."""
        before, self._reductions.accumulating = self._reductions.accumulating, True
        try:
            yield
        finally:
            self._reductions.accumulating = before

    @contextmanager
    def replica_sync(self, now: bool) -> Iterator[None]:
        """See :meth:`internsp.wp.communicator.ISPCommunicator.replica_sync`."""
        before, self.more_to_come = self.more_to_come, not now
        try:
            yield
        finally:
            self.more_to_come = before

    def begin_action(self, whole: bool, more: bool, prefetch: Callable[[], None]) -> None:
        """A forward or backward of a pipeline's step begins.

        Args:
            whole: the step accumulates unsharded sums.
            more: the chunk has later backwards in this step.
            prefetch: see ``at_next_pass``.
        """
        self._reductions.accumulating = whole and more
        self.more_to_come, self.at_next_pass = more, prefetch

    def end_action(self) -> None:
        """It has ended, or failed: outside of a pipeline's step nothing is known of what comes."""
        self._reductions.accumulating = False
        self.more_to_come, self.at_next_pass = None, _nothing


def _nothing() -> None:
    """No next pass is known."""
