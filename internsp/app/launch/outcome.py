"""How the ranks of a run ended, and which of several failures was the first cause."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from internsp.errors import InternspError
from internsp.failure.detection import is_consequence

_MAX_CHARS = 30_000  # so that a message fits the pipe's buffer, and its sender need not wait


class ChildError(InternspError, RuntimeError):
    """A local process failed; the message gives its rank and the cause, once.

    Attributes:
        exit_status: exit status of the command.
        ranks: the ranks that are the cause, as far as is known.
    """

    def __init__(self, message: str, exit_status: int = 1, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.exit_status = exit_status
        self.ranks = tuple(ranks)


@dataclass(frozen=True)
class Failure:
    """An exception that a rank raised, as it is sent to the launcher.

    Attributes:
        text: type and message alone for an error of internsp, which needs no more; else the whole
            traceback.
        consequence: whether it only follows from the failure of another rank.
        at: time in seconds of the machine's monotonic clock, which all processes share.
    """

    text: str
    consequence: bool
    at: float
    exit_status: int = 1

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception that has just been caught."""
        stack = "".join(traceback.format_exception(error)).rstrip()
        text = f"{type(error).__name__}: {error}" if isinstance(error, InternspError) else stack
        status = getattr(error, "exit_status", 1)
        return cls(text[-_MAX_CHARS:], is_consequence(error), time.monotonic(), status)


@dataclass
class RankOutcome:
    """How one rank ended, as far as the launcher knows.

    Attributes:
        exit_status: of the process; negative: the signal that ended it; ``None`` while it lives.
        stopped_by: the signal on whose request the run stopped in order; 0 if none.
        ended_early: it ended with status 0 before it reported the end of its run.
        stopped: it was found stopped (SIGSTOP) after another rank had failed.
        killed: the launcher killed it, because it did not end by itself.
    """

    rank: int
    exit_status: int | None = None
    failure: Failure | None = None
    stopped_by: int = 0
    ended_early: bool = False
    stopped: bool = False
    killed: bool = False

    @property
    def failed(self) -> bool:
        """Whether the rank failed by itself, and was not only killed by the launcher."""
        ended = bool(self.exit_status) or self.ended_early
        return self.failure is not None or (ended and not self.killed)


def first_cause(outcomes: Sequence[RankOutcome]) -> ChildError | None:
    """The first cause of a failed run, as an error to raise; ``None`` if every rank ended well."""
    failures = sorted(
        ((outcome.failure, outcome.rank) for outcome in outcomes if outcome.failure is not None),
        key=lambda pair: (pair[0].consequence, pair[0].at),
    )
    for failure, rank in failures:
        if not failure.consequence:
            text = f"rank {rank} failed: {failure.text}"
            return ChildError(text, failure.exit_status, [rank])
    for outcome in outcomes:
        if outcome.exit_status is not None and outcome.exit_status < 0 and not outcome.killed:
            name = signal.Signals(-outcome.exit_status).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            text = f"rank {outcome.rank} was ended by {name}{hint}"
            return ChildError(text, ranks=[outcome.rank])
    later = ""
    if failures:
        failure, rank = failures[0]
        later = f"\nLater, rank {rank}: {failure.text.strip().splitlines()[-1]}"
    for outcome in outcomes:
        if outcome.stopped:
            return ChildError(
                f"rank {outcome.rank} was stopped (SIGSTOP, SIGTSTP or a debugger) while the "
                f"others waited for it; it has been ended{later}",
                ranks=[outcome.rank],
            )
    for outcome in outcomes:
        if outcome.failed and outcome.failure is None:
            status = f"exit status {outcome.exit_status}"
            before = " before its run had come to an end" if outcome.ended_early else ""
            text = f"rank {outcome.rank} ended with {status}{before}{later}"
            return ChildError(text, ranks=[outcome.rank])
    late = [outcome.rank for outcome in outcomes if outcome.killed and outcome.failure is None]
    if late and failures:
        return ChildError(
            f"{_ranks(late)} did not come where the others waited, and had to be ended; if that is "
            f"slow and not stuck, raise parallel.timeout_seconds{later}",
            ranks=late,
        )
    if late:
        text = f"{_ranks(late)} did not stop in time when asked, and had to be ended"
        return ChildError(text, ranks=late)
    if failures:
        return ChildError(
            f"rank {rank} failed: {failure.text}\nAnother rank went away without a message.",
            ranks=[rank],
        )
    return None


def _ranks(numbers: Sequence[int]) -> str:
    names = ", ".join(str(number) for number in numbers)
    return f"rank {names}" if len(numbers) == 1 else f"ranks {names}"
