"""How the ranks of a run ended, and which of several failures was the first cause."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from internsp.errors import InternspError

# What a rank sees when another one has gone, or does not come; never the cause.
_CONSEQUENCES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out waiting",
    "timeout caused pair closure",
    "wait timeout",
    "barrier timeout",
    "caught collective operation timeout",
)
_LONGEST = 30_000  # characters: a message fits the pipe, so that no sender waits for its reader


class ChildError(InternspError, RuntimeError):
    """A local process failed; the message gives its rank and the cause, once.

    Attributes:
        exit_status: what the command ends with.
        ranks: those that are the cause, as far as is known.
    """

    def __init__(self, message: str, exit_status: int = 1, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.exit_status = exit_status
        self.ranks = tuple(ranks)


def is_consequence(error: BaseException) -> bool:
    """Whether ``error`` only shows that another rank was gone, or did not come."""
    return _in_consequence("".join(traceback.format_exception(error)))


def _in_consequence(stack: str) -> bool:
    # By the whole traceback: a pipeline stage wraps what it met in an error of its own.
    return any(sign in stack.lower() for sign in _CONSEQUENCES)


@dataclass(frozen=True)
class Failure:
    """An exception that a rank met. Sent to the launcher.

    Attributes:
        text: its kind and message alone for an error of this project, which says all; else the
            whole traceback.
        consequence: another rank was gone, or did not come.
        at: seconds of the machine's monotonic clock, one for all processes.
    """

    text: str
    consequence: bool
    at: float
    exit_status: int = 1

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Read an exception that has just been caught."""
        stack = "".join(traceback.format_exception(error)).rstrip()
        consequence, text = _in_consequence(stack), stack
        if isinstance(error, InternspError):
            text = f"{type(error).__name__}: {error}"
        status = getattr(error, "exit_status", 1)
        return cls(text[-_LONGEST:], consequence, time.monotonic(), status)


@dataclass
class Fate:
    """How one rank has ended, as far as the launcher knows.

    Attributes:
        exit_status: negative: the signal that ended it; ``None`` while it lives.
        stopped_by: the signal that asked the run to stop, and for which it stopped.
        silent: has ended with status 0, and not said that its run has come to an end.
        stopped: was seen stopped (SIGSTOP) after another rank had failed.
        killed: the launcher ended it, as it did not end by itself.
    """

    rank: int
    exit_status: int | None = None
    failure: Failure | None = None
    stopped_by: int = 0
    silent: bool = False
    stopped: bool = False
    killed: bool = False

    @property
    def failed(self) -> bool:
        """Whether it has failed by itself."""
        ended = bool(self.exit_status) or self.silent
        return self.failure is not None or (ended and not self.killed)


def first_cause(fates: Sequence[Fate]) -> ChildError | None:
    """The first cause of a failed run as an error; ``None`` if every rank ended well."""
    failures = sorted(
        ((fate.failure, fate.rank) for fate in fates if fate.failure is not None),
        key=lambda pair: (pair[0].consequence, pair[0].at),
    )
    for failure, rank in failures:
        if not failure.consequence:
            said = f"rank {rank} failed: {failure.text}"
            return ChildError(said, failure.exit_status, [rank])
    for fate in fates:
        if fate.exit_status is not None and fate.exit_status < 0 and not fate.killed:
            name = signal.Signals(-fate.exit_status).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            said = f"rank {fate.rank} was ended by {name}{hint}"
            return ChildError(said, ranks=[fate.rank])
    later = f"\nLater, rank {failures[0][1]}: {_last_line(failures[0][0])}" if failures else ""
    for fate in fates:
        if fate.stopped:
            return ChildError(
                f"rank {fate.rank} was stopped (SIGSTOP, SIGTSTP or a debugger) while the others "
                f"waited for it; it has been ended{later}",
                ranks=[fate.rank],
            )
    for fate in fates:
        if fate.failure is None and (fate.exit_status or fate.silent) and not fate.killed:
            status = f"exit status {fate.exit_status}"
            before = " before its run had come to an end" if fate.silent else ""
            said = f"rank {fate.rank} ended with {status}{before}{later}"
            return ChildError(said, ranks=[fate.rank])
    late = [fate.rank for fate in fates if fate.killed and fate.failure is None]
    if late and failures:
        return ChildError(
            f"{_ranks(late)} did not come where the others waited, and had to be ended; if that is "
            f"slow and not stuck, raise parallel.timeout_seconds{later}",
            ranks=late,
        )
    if late:
        said = f"{_ranks(late)} did not stop in time when asked, and had to be ended"
        return ChildError(said, ranks=late)
    if failures:
        failure, rank = failures[0]
        return ChildError(
            f"rank {rank} failed: {failure.text}\nAnother rank went away without a message.",
            ranks=[rank],
        )
    return None


def _ranks(numbers: Sequence[int]) -> str:
    names = ", ".join(str(number) for number in numbers)
    return f"rank {names}" if len(numbers) == 1 else f"ranks {names}"


def _last_line(failure: Failure) -> str:
    return failure.text.strip().splitlines()[-1]
