"""Which ranks can never go on, read from what each of them has reported (pure; WP-10).

A rank reports where it is only while it stands still: it failed, or it waits for longer than usual.
Every judgment is certain, whatever has happened since the report was made: launches only grow, and
a rank that waits for a launch of this one cannot have gone on before this one made it. A slow
transfer, a slow rank and ranks that fail alike one after another are therefore never given up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What a rank does that stands still."""

    FAILED = "failed"
    """A pass has raised; the rank launches nothing before all others have failed alike."""
    AGREES = "agrees"
    """Failed, and waits for all others to fail alike."""
    REFUSED = "refused"
    """Something raised at rest: its program may go on, and then withdraws the report."""
    LOST = "lost"
    """Its groups are gone."""
    WAITS = "waits"
    """In a collective."""
    MEETS = "meets"
    """For ranks that come to the same place."""


class Wait(NamedTuple):
    """A collective that a rank waits for.

    Attributes:
        groups: names of the process groups, one of which holds it up; empty: of those that the
            ledger does not count.
        entry, number, tag: of the launch in the ledger; ``entry`` -1: counted by the groups alone.
    """

    groups: tuple[str, ...] = ()
    entry: int = -1
    number: int = 0
    tag: int = 0


@dataclass(frozen=True)
class Report:
    """Where one rank is.

    Attributes:
        epoch: how often the ranks have recovered together; reports of another epoch are void.
        counts: launches of each kind and group of the ledger.
        sequences: collectives launched in each process group of this rank, by the group's name.
        what: the cause, or what is waited for, in words.
        refusals: how often this rank has refused something at rest, so far.
        wait: of ``WAITS``.
        ranks: of ``MEETS``: those that must come.
        recent: the tags of the last launches of each index, the newest last.
        beat: grows while the rank stands: a later one shows that it still did.
    """

    rank: int
    kind: Kind
    epoch: int
    counts: tuple[int, ...] = ()
    sequences: Mapping[str, int] = field(default_factory=dict)
    what: str = ""
    refusals: int = 0
    wait: Wait | None = None
    ranks: tuple[int, ...] = ()
    recent: tuple[tuple[int, ...], ...] = ()
    beat: int = 0

    def dumps(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Report:
        """From :meth:`dumps`."""
        found = json.loads(text)
        if found["wait"] is not None:
            groups, *others = found["wait"]
            found["wait"] = Wait(tuple(groups), *others)
        found["recent"] = tuple(tuple(tags) for tags in found["recent"])
        found |= {"kind": Kind(found["kind"]), "counts": tuple(found["counts"])}
        return cls(**(found | {"ranks": tuple(found["ranks"])}))


def hopeless(mine: Report, others: Iterable[Report]) -> str:
    """Why this rank can never go on, in words; empty while it may.

    Args:
        mine: where this rank is, which has not failed itself.
        others: of ranks that may move on by themselves (``MEETS``, ``REFUSED``) only what has stood
            since this rank stands.
    """
    for other in others:
        if other.rank != mine.rank and other.epoch == mine.epoch:
            why = _why(mine, other)
            if why:
                return why
    return ""


def _why(mine: Report, other: Report) -> str:
    if other.kind in _FAILED:
        in_vain = mine.kind is Kind.MEETS and other.rank in mine.ranks
        if _beyond(mine, other) or (in_vain and other.kind is not Kind.FAILED):
            return _cause(other)
        return ""
    if other.kind is Kind.REFUSED:
        alone = other.refusals > mine.refusals  # else this one has refused it too, and gone on
        return _cause(other) if alone and _beyond(mine, other) else ""
    if _conflict(mine, other):
        return f"{_words(mine)}, {_words(other)}: they have sent different things; {_PATHS}"
    if _needs(mine, other) and _needs(other, mine):
        return f"{_words(mine)}, {_words(other)}: neither can come to the other; {_PATHS}"
    return ""


_FAILED = (Kind.FAILED, Kind.AGREES, Kind.LOST)
_PATHS = "one of them has left a pass, or its program took another path"


def _cause(other: Report) -> str:
    if other.kind is Kind.LOST:
        return other.what  # names the rank that failed
    return f"rank {other.rank} failed first: {other.what}"


def _words(report: Report) -> str:
    does = "has come to" if report.kind is Kind.MEETS else "waits for"
    return f"rank {report.rank} {does} {report.what}"


def _beyond(mine: Report, other: Report) -> bool:
    """Whether this rank has launched what the other had not: then they cannot meet any more."""
    if any(a > b for a, b in zip(mine.counts, other.counts, strict=True)):
        return True
    theirs = other.sequences
    return any(count > theirs[name] for name, count in mine.sequences.items() if name in theirs)


def _needs(one: Report, other: Report) -> bool:
    """Whether ``one`` cannot go on before ``other`` does something that it had not done."""
    if one.kind is Kind.MEETS:
        same = other.kind is Kind.MEETS and other.what == one.what
        return other.rank in one.ranks and not same
    if one.wait is None:
        return False
    shared = [name for name in one.wait.groups if name in other.sequences]
    if one.wait.entry < 0:
        return any(one.sequences[name] > other.sequences[name] for name in shared)
    return bool(shared) and other.counts[one.wait.entry] < one.wait.number


def _conflict(one: Report, other: Report) -> bool:
    """Whether the launch that ``one`` waits for was another one on ``other``."""
    wait = one.wait
    if wait is None or wait.entry < 0 or not any(name in other.sequences for name in wait.groups):
        return False
    back = other.counts[wait.entry] - wait.number  # launches since
    tags = other.recent[wait.entry]
    return 0 <= back < len(tags) and tags[-1 - back] != wait.tag
