"""What a campaign counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class Fault:
    """One that has happened: its kind, and where."""

    kind: str
    where: str


@dataclass
class Found:
    """What was seen after some faults. All but the first two and the times are to be 0 or empty.

    Attributes:
        restarts: of a run, to come to its last step.
        hangs: runs that had to be ended.
        unusable: checkpoints that are damaged though no file of theirs was, or that are missing.
        lost, repeated: tokens, or steps of the stand-in, that no step or two steps trained on.
        different: runs whose last weights are not those of the undisturbed run.
        left: processes, temporary files and shared memory that outlived their run.
        unnamed: failures whose message does not name the rank.
        worst: seconds from a fault that ends a run to the end of all its ranks.
        named: seconds from the death of a rank to the message that names it.
        wrong: each of these, in words.
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
        """Together."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            longest = each.name in ("worst", "named")
            setattr(self, each.name, max(mine, theirs) if longest else mine + theirs)

    def by_kind(self) -> dict[Fault, int]:
        """How many faults of each kind and place."""
        counted = Counter(self.faults)
        return {fault: counted[fault] for fault in sorted(counted, key=lambda f: (f.where, f.kind))}
