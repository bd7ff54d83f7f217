"""What the collectives of one model share: counts, and the first failure (WP-2, WP-10)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from internsp.errors import CollectiveError
from internsp.failure.standstill import Wait
from internsp.trace import Work

UNCOUNTED = Wait()  # for a launch that the ledger does not count
_RECENT = 32  # launches whose tags are kept: more than a rank ever has in flight beyond another


@dataclass
class Counters:
    """Payload bytes this rank received from others, and collectives it launched."""

    gathered_bytes: int = 0
    reduced_bytes: int = 0
    gathers: int = 0
    reductions: int = 0

    def reset(self) -> None:
        """Start counting anew (a step's metrics)."""
        self.gathered_bytes = self.reduced_bytes = self.gathers = self.reductions = 0


@dataclass
class Ledger:
    """What all collectives of a model's weights and gradients have in common.

    Gathers and reductions each keep one order on all ranks, but how they interleave may depend on
    what a rank's data leave unused: launches are counted for each kind and group by itself.

    Attributes:
        model: the model's number among those of its mesh, the same on all ranks.
        counts: launches, ever, of each kind and group in the order in which they were registered.
        failure: the message of the first that failed; afterwards the groups are lost.
        first_cause: which rank failed first and why, as far as the ranks have said; else empty.
        lost: called with the message of the first that failed.
        waiting: the collective that this rank waits for: unit, weight and phase. Another object
            each time.
        groups: names of those whose launches are counted.
        recent: tags of the last launches of each kind and group.
        launched: called before each launch: kind, weight or unit, phase; ``None``: no log is kept.
    """

    model: int = 0
    counts: list[int] = field(default_factory=list)
    failure: str = ""
    first_cause: Callable[[], str] = lambda: ""
    lost: Callable[[str], None] = lambda message: None
    waiting: tuple[Wait, str, str, str] | None = None
    groups: set[str] = field(default_factory=set)
    recent: list[deque[int]] = field(default_factory=list)
    launched: Callable[[str, str, str], None] | None = None

    def register(self, group: str = "") -> int:
        """The index in ``counts`` of one more kind and group."""
        self.groups.add(group)
        self.recent.append(deque(maxlen=_RECENT))
        self.counts.append(0)
        return len(self.counts) - 1

    def place(self) -> str:
        """Where a rank is: those that failed with equal places are at the same point (WP-10)."""
        return " ".join(map(str, self.counts))

    def wait(self, work: Work, what: str) -> None:
        """Wait for one that is not counted.

        Raises:
            CollectiveError: it failed.
        """
        self.waiting = UNCOUNTED, what, "", ""
        try:
            work.wait()
        except RuntimeError as error:
            raise self.failed(what, error) from error
        finally:
            self.waiting = None

    def failed(self, what: str, error: RuntimeError) -> CollectiveError:
        """Note a failure and make the error to raise."""
        cause = self.first_cause()
        message = f"a collective for {what} failed on rank {dist.get_rank()}: {error}. " + (
            cause or "Another rank has stopped or taken another path; its log has the cause"
        )
        if not self.failure:
            self.failure = message
            self.lost(message)
        return CollectiveError(message)
