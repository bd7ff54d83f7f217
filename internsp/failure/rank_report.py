"""Decides from the reports of all ranks whether a rank can never go on (pure; WP-10).

A rank reports its state only while it makes no progress: it failed, or it waits for longer than
usual. A decision holds whatever has happened since the reports were made: launch counts only grow,
and a rank that waits for a launch of this rank cannot have gone on before this rank made it.
Therefore no rank gives up because of a slow transfer, a slow rank, or ranks that fail at the same
point one after another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import NamedTuple

from pydantic import TypeAdapter


class RankState(StrEnum):
    """Why a rank makes no progress."""

    FAILED = "failed"
    """A pass has raised; the rank launches nothing until all other ranks have failed as well."""
    RECOVERING = "recovering"
    """A pass has raised, and the rank waits until all ranks have failed at the same point."""
    REFUSED = "refused"
    """A call between passes has raised; if the program goes on, the report is withdrawn."""
    LOST = "lost"
    """The rank's process groups are aborted."""
    IN_COLLECTIVE = "in collective"
    """The rank waits for a collective."""
    IN_STORE = "in store"
    """The rank waits, by the store, for other ranks that must make the same call."""


class WaitedCollective(NamedTuple):
    """A collective that a rank waits for.

    Attributes:
        groups: names of the process groups, one of which runs the collective; empty: one of the
            groups that the ``CommContext`` does not count.
        entry: index of its kind and group in ``CommContext.counts``; -1: not counted there, only
            by torch's sequence number of the group.
        number: value of that count after the launch.
        tag: identifies what is sent; equal on all ranks that run the same collective.
    """

    groups: tuple[str, ...] = ()
    entry: int = -1
    number: int = 0
    tag: int = 0


@dataclass(frozen=True)
class RankReport:
    """The state of one rank that makes no progress, as it publishes it in the store.

    Attributes:
        epoch: number of times that the ranks have recovered together; reports of another epoch are
            ignored.
        counts: ``CommContext.counts`` of the rank.
        sequence_numbers: collectives launched in each process group of the rank, by group name.
        what: text: the cause of the failure, or what the rank waits for.
        refusals: number of calls between passes that have raised on this rank so far.
        wait: the collective that an ``IN_COLLECTIVE`` rank waits for.
        ranks: the ranks that an ``IN_STORE`` rank waits for, itself included.
        call, number: of an ``IN_STORE`` rank: the kind of call, and how many of it came before.
        recent_tags: ``CommContext.recent_tags`` of the rank, the newest last.
        beat: grows with each report: a later report shows that the rank still waits.
        tensor_rank: of the rank; of another one only the groups that both are in count alike.
    """

    rank: int
    state: RankState
    epoch: int
    counts: tuple[int, ...] = ()
    sequence_numbers: Mapping[str, int] = field(default_factory=dict)
    what: str = ""
    refusals: int = 0
    wait: WaitedCollective | None = None
    ranks: tuple[int, ...] = ()
    call: str = ""
    number: int = 0
    recent_tags: tuple[tuple[int, ...], ...] = ()
    beat: int = 0
    tensor_rank: int = 0

    def dumps(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> RankReport:
        """The report that :meth:`dumps` returned as ``text``."""
        # Not pydantic's own JSON: a cause may hold half a character, as a file's name does.
        return _REPORT.validate_python(json.loads(text))


_REPORT = TypeAdapter(RankReport)


def find_fatal_cause(mine: RankReport, others: Iterable[RankReport]) -> str:
    """Returns text that says why this rank can never go on; empty while it may go on.

    Args:
        mine: the report of this rank, which has not failed itself.
        others: reports of the other ranks. Ranks in ``IN_STORE`` or ``REFUSED`` may go on by
            themselves: give only those of their reports that are still true (see
            :meth:`FailureGuard.check`).
    """
    for other in others:
        if other.rank != mine.rank and other.epoch == mine.epoch:
            why = _fatal_cause(mine, other)
            if why:
                return why
    return ""


def _fatal_cause(mine: RankReport, other: RankReport) -> str:
    if other.state in _FAILED:
        in_vain = mine.state is RankState.IN_STORE and other.rank in mine.ranks
        if _launched_more(mine, other) or (in_vain and other.state is not RankState.FAILED):
            return _cause(other)
        return ""
    if other.tensor_rank != mine.tensor_rank:
        return ""
    if other.state is RankState.REFUSED:
        alone = other.refusals > mine.refusals  # otherwise this rank refused the same, and went on
        return _cause(other) if alone and _launched_more(mine, other) else ""
    if _differs(mine, other):
        return f"{_describe(mine)}, {_describe(other)}: they run different collectives; {_PATHS}"
    if _waits_for(mine, other) and _waits_for(other, mine):
        return f"{_describe(mine)}, {_describe(other)}: each waits for the other; {_PATHS}"
    return ""


_FAILED = (RankState.FAILED, RankState.RECOVERING, RankState.LOST)
_PATHS = "one of them has left a pass, or its program took another path"


def _cause(other: RankReport) -> str:
    if other.state is RankState.LOST:
        return other.what  # names the rank that failed
    return f"rank {other.rank} failed first: {other.what}"


def _describe(report: RankReport) -> str:
    does = "has reached" if report.state is RankState.IN_STORE else "waits for"
    return f"rank {report.rank} {does} {report.what}"


def _launched_more(mine: RankReport, other: RankReport) -> bool:
    """Whether ``mine`` counts a launch that ``other`` lacks: they cannot recover together then."""
    alike = mine.tensor_rank == other.tensor_rank
    if alike and any(a > b for a, b in zip(mine.counts, other.counts, strict=True)):
        return True
    ours, theirs = mine.sequence_numbers, other.sequence_numbers
    return any(count > theirs[name] for name, count in ours.items() if name in theirs)


def _waits_for(one: RankReport, other: RankReport) -> bool:
    """Whether ``one`` cannot go on before ``other`` makes a call that it had not made yet."""
    if one.state is RankState.IN_STORE:
        same = other.state is RankState.IN_STORE and other.what == one.what
        return other.rank in one.ranks and not same
    if one.wait is None:
        return False
    shared = [name for name in one.wait.groups if name in other.sequence_numbers]
    if one.wait.entry < 0:
        return any(one.sequence_numbers[name] > other.sequence_numbers[name] for name in shared)
    return bool(shared) and other.counts[one.wait.entry] < one.wait.number


def _differs(one: RankReport, other: RankReport) -> bool:
    """Whether ``other`` launched another collective where ``one`` launched the one it waits for."""
    wait, theirs = one.wait, other.sequence_numbers
    if wait is None or wait.entry < 0 or not any(name in theirs for name in wait.groups):
        return False
    back = other.counts[wait.entry] - wait.number  # launches of ``other`` after that one
    tags = other.recent_tags[wait.entry]
    return 0 <= back < len(tags) and tags[-1 - back] != wait.tag
