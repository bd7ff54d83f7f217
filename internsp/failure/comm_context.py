"""State that all collectives of one model share: launch counts, the first failure (WP-2, WP-10)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from internsp.errors import CollectiveError

if TYPE_CHECKING:
    from internsp.base.in_flight import Reporter

Launch = tuple[tuple[str, ...], int, int, int] | tuple[()]
"""The fields of a :class:`internsp.failure.rank_report.WaitedCollective`, which only a rank that
waits for long makes of it; empty for a collective that the :class:`CommContext` does not count."""
_RECENT_TAGS = 32  # launches with tags kept: more than one rank is ever ahead of another


@dataclass
class Counters:
    """Payload bytes that this rank received from other ranks, and collectives that it launched."""

    gathered_bytes: int = 0
    reduced_bytes: int = 0
    gathers: int = 0
    reductions: int = 0

    def reset(self) -> None:
        """Set all counters to zero (for a step's metrics)."""
        self.gathered_bytes = self.reduced_bytes = self.gathers = self.reductions = 0


@dataclass
class CommContext:
    """State that all collectives of a model's weights and gradients share.

    All-gathers run in one order on all ranks, and reductions in another; how the two interleave may
    differ between ranks, since it depends on the parameters that a rank's data leave unused.
    Launches are therefore counted separately for each pair of kind and process group.

    Attributes:
        model: the model's number on its mesh, the same on all ranks.
        counts: launches since the start by kind and group, in the order of :meth:`register`.
        failure: the message of the first collective that failed, else empty; once a collective has
            failed, the groups cannot be used any more.
        first_cause: returns which rank failed first and why, as far as any rank has reported it;
            else an empty text.
        on_failure: called with the message of the first collective that failed.
        waiting: the launch that this rank waits for, with unit, weight and phase; a new object for
            each wait.
        groups: names of the process groups for which launches are counted.
        recent_tags: tags of the last launches by kind and group, as ``counts``.
        on_launch: called before each launch with kind, weight or unit, and phase; ``None`` without
            a log.
    """

    model: int = 0
    counts: list[int] = field(default_factory=list)
    failure: str = ""
    first_cause: Callable[[], str] = lambda: ""
    on_failure: Callable[[str], None] = lambda message: None
    waiting: tuple[Launch, str, str, str] | None = None
    groups: set[str] = field(default_factory=set)
    recent_tags: list[deque[int]] = field(default_factory=list)
    on_launch: Callable[[str, str, str], None] | None = None

    def register(self, group: str = "") -> int:
        """Add a count for one kind of collective in ``group``; returns its index in ``counts``."""
        self.groups.add(group)
        self.recent_tags.append(deque(maxlen=_RECENT_TAGS))
        self.counts.append(0)
        return len(self.counts) - 1

    def reporter(self, of: str, waits: bool = False) -> Reporter:
        """Add a count for messages ``of`` something else than weights and gradients.

        Args:
            waits: other ranks are told what this one waits for.
        """
        from internsp.base.in_flight import Reporter  # few models send any

        entry = self.register(of)

        def launched(kind: str, what: str, phase: str) -> None:
            self.counts[entry] += 1
            if self.on_launch is not None:
                self.on_launch(kind, what, phase)

        return Reporter(launched, self.awaiting if waits else self.naming)

    def position(self) -> str:
        """The launch counts as text: ranks with equal texts failed at the same point (WP-10)."""
        return " ".join(map(str, self.counts))

    @contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """Context in which a collective that is not counted is waited for; ``what`` names it.

        Raises:
            CollectiveError: it failed; names the first cause.
        """
        self.waiting = (), what, "", ""
        try:
            with self.naming(what):
                yield
        finally:
            self.waiting = None

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """The same, without a word of it to other ranks."""
        try:
            yield
        except RuntimeError as error:
            raise self.record_failure(what, error) from error

    def record_failure(self, what: str, error: RuntimeError) -> CollectiveError:
        """Record that a collective for ``what`` failed; returns the error to raise."""
        cause = self.first_cause()
        message = f"a collective for {what} failed on rank {dist.get_rank()}: {error}. " + (
            cause or "Another rank has stopped or taken another path; its log has the cause"
        )
        if not self.failure:
            self.failure = message
            self.on_failure(message)
        return CollectiveError(message)
