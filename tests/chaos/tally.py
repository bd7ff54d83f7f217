"""Counters of a campaign."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class Fault:
    """A fault that happened: its kind and point."""

    kind: str
    where: str


@dataclass
class Found:
    """Results after some faults. All except the first two and the times must be 0 or empty.

    Attributes:
        restarts: of a run, until it finished its last step.
        hangs: runs that had to be killed.
        unusable: checkpoints that are missing, or damaged although no file was damaged on purpose.
        lost, repeated: tokens, or steps of the simulated run, trained on by no step or by two.
        different: runs whose final weights differ from those of the run without faults.
        left: processes, temporary files and shared memory left behind by a run.
        unnamed: failures whose message does not name the rank.
        worst: seconds from a fault that ends a run to the end of all its ranks.
        named: seconds from the death of a rank to the message that names it.
        wrong: each violation, in words.
    """

    faults: list[Fault] = field(default_factory=list)
    restarts: int = 0
    hangs: int = 0
    unusable: int = 0
    lost: int = 0
    repeated: int = 0
    different: int = 0
    left: int = 0
    unnamed: int = 0
    runs: int = 1
    worst: float = 0.0
    named: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Add the counts of ``other``."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            longest = each.name in ("worst", "named")
            setattr(self, each.name, max(mine, theirs) if longest else mine + theirs)

    def by_kind(self) -> dict[Fault, int]:
        """The number of faults of each kind and point."""
        counted = Counter(self.faults)
        return {fault: counted[fault] for fault in sorted(counted, key=lambda f: (f.where, f.kind))}
