"""Whether two runs are the same run: losses and gradient norms, step by step.

    python tools/compare_runs.py runs/a runs/b --tolerance 1e-5

Exit status 0 when every common step agrees within the tolerance, 1 when one does not, 2 when the
runs cannot be compared.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from internsp.app.report.metrics import StepMetrics, read_metrics

COMPARED = ("loss", "grad_norm")


@dataclass(frozen=True)
class Arguments:
    """Compare two runs by value."""

    a: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or its metrics.jsonl."""
    b: Annotated[Path, tyro.conf.Positional]
    """Folder of the other run, or its metrics.jsonl."""
    tolerance: float = 1e-5
    """Relative difference allowed at every step."""


def difference(a: float, b: float) -> float:
    """Difference relative to ``b``; 0 for equal values, infinite if only one is a number."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    gap = abs(a - b) / max(abs(b), 1e-300)
    return gap if math.isfinite(gap) else math.inf


def compare(a: Sequence[StepMetrics], b: Sequence[StepMetrics]) -> dict[str, tuple[float, int]]:
    """The largest relative difference of each compared column, and the step where it occurs."""
    other = {row.step: row for row in b}
    common = [(row, other[row.step]) for row in a if row.step in other]
    return {
        name: max(
            ((difference(getattr(x, name), getattr(y, name)), x.step) for x, y in common),
            default=(math.inf, -1),
        )
        for name in COMPARED
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the differences; see the module for the exit status."""
    given = tyro.cli(Arguments, args=argv, description=__doc__)
    rows = []
    for path in (given.a, given.b):
        file = path / "metrics.jsonl" if path.is_dir() else path
        if not file.exists():
            print(f"compare_runs: there is no {file}", file=sys.stderr)
            return 2
        rows.append(read_metrics(file))
    steps = {r.step for r in rows[0]} & {r.step for r in rows[1]}
    if not steps:
        print("compare_runs: the runs have no step in common", file=sys.stderr)
        return 2
    worst = compare(*rows)
    print(f"{len(steps)} common steps of {len(rows[0])} and {len(rows[1])}")
    for name, (gap, step) in worst.items():
        print(f"{name:>10}  largest relative difference {gap:.3g} at step {step}")
    return int(any(gap > given.tolerance for gap, _ in worst.values()))


if __name__ == "__main__":
    sys.exit(main())
