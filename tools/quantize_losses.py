"""Effect of quantized all-gathers on the loss: the same training with each kind, in columns.

    python tools/quantize_losses.py --text tests/data --steps 50

The text is small, so that a run of minutes shows whether quantized weights can still fit it. Seed,
data order and initial values are the same in all runs; only the all-gathers differ.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from internsp.app.cli import main as internsp
from internsp.app.report.metrics import StepMetrics, read_metrics
from tools.bench.report import markdown_rows, say

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Arguments:
    """Train with each kind and print the losses."""

    config: Path = ROOT / "configs" / "demo.toml"
    """Configuration of the run; model, data and steps are overridden below."""
    text: Path = ROOT / "tests" / "data"
    """A file or folder of text."""
    steps: int = 50
    """Optimizer steps per run."""
    every: int = 10
    """Steps between printed rows."""
    kinds: tuple[str, ...] = ("none", "int8", "fp8")
    """Kinds; the others are compared with the first."""
    options: tuple[str, ...] = ()
    """More settings of the runs, as SECTION.KEY=VALUE."""


def words(given: Arguments, kind: str, output: Path) -> list[str]:
    """The command line arguments of one run."""
    changes = {
        "data.source": "text",
        "data.paths": str(given.text),
        "data.sequence_length": "128",
        "train.steps": str(given.steps),
        "train.eval_batches": "4",
        "train.sample_tokens": "0",
        "train.log_every": str(given.steps),
        "checkpoint.save": "false",
        "weight_parallel.quantize": kind,
        **dict(option.split("=", 1) for option in given.options),
    }
    options = [word for key, value in changes.items() for word in (f"--{key}", value)]
    return ["train", str(given.config), "--output", str(output), *options]


def table(runs: Mapping[str, Sequence[StepMetrics]], every: int) -> list[str]:
    """Losses by step, and bytes of a step's all-gathers, as lines of Markdown."""
    each = list(runs.values())
    rows = [("step", *runs)]
    for index, first in enumerate(each[0]):
        if index == 0 or (index + 1) % every == 0 or index == len(each[0]) - 1:
            rows.append((str(first.step), *(f"{run[index].loss:.4f}" for run in each)))
    held_out = [next(r.eval_loss for r in reversed(run) if r.eval_loss is not None) for run in each]
    rows.append(("held out", *(f"{loss:.4f}" for loss in held_out)))
    rows.append(("gathered a step", *(f"{run[-1].gathered_bytes / 2**20:.2f} MiB" for run in each)))
    return markdown_rows(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or the exit status of the first run that failed."""
    given = tyro.cli(Arguments, args=argv, description=__doc__)
    runs: dict[str, list[StepMetrics]] = {}
    with tempfile.TemporaryDirectory(prefix="quantize-losses-") as home:
        for kind in given.kinds:
            output = Path(home) / kind
            # In this process: what the ranks of the runs share is loaded once.
            status = internsp(words(given, kind, output))
            if status:
                say(f"{kind}: exit status {status}")
                return status
            runs[kind] = read_metrics(output / "metrics.jsonl")
            say(f"{kind}: {len(runs[kind])} steps")
    print("\n".join(table(runs, given.every)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
