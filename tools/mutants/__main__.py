"""Which small faults in the library do its tests catch? Random ones, each against what reaches it.

    python -m tools.mutants record     # once: which tests pass without a fault, and what they reach
    python -m tools.mutants run        # faults, drawn by the seed
    python -m tools.mutants again --tests tests/unit/test_wp_works.py # survivors, against new tests
    python -m tools.mutants report --document docs/dev/mutants.md
    python -m tools.mutants covered  # tests whose every block two others reach, the dearest first

Works in copies of this checkout at nice 19; each command goes on where it was stopped. ``record``
runs the tests in a copy whose blocks note that they ran, file by file. A fault then runs against
the tests that reach its block, until one fails: the first case of each test before other cases,
tests that name the function before others, the fastest of each file before its other tests. The
test that fails must pass without the fault, and must fail twice if it failed by time. A run that
takes over three times its normal time is caught by time. What survived runs again when more is
recorded or ``--seconds`` is larger. A survivor that changes nothing is judged by a line in the
results, by hand: ``{"key": KEY, "fate": "equivalent", "why": "..."}``; ``"removed"`` where the line
itself was of no use.
"""

from __future__ import annotations

import hashlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from tools.bench.report import markdown_rows, put, say
from tools.mutants.campaign import Campaign
from tools.mutants.operators import Mutant, mutants
from tools.mutants.record import ROOT, Record, add, copied, read

ROOMS = ("wp", "modules", "optim", "sp", "values", "pipeline", "app/checkpoint", "schedule")
FAULT = ("key", "file", "scope", "line", "operator", "before", "after")
MARK = "python -m tools.mutants report --document docs/dev/mutants.md"


@dataclass(frozen=True)
class Options:
    """Put random faults into the library and see which of them its tests catch."""

    do: tyro.conf.Positional[Literal["record", "run", "again", "report", "covered"]]
    folder: Path = Path("/tmp/internsp-mutants")
    """Where the copies are, and the record of the unmutated tests."""
    results: Path = ROOT / "docs/dev/mutants.jsonl"
    document: Path | None = None
    """Where `report` writes; default: it prints."""
    number: int = 300
    """How many faults are drawn."""
    seed: int = 0
    rooms: tuple[str, ...] = ROOMS
    """Folders in internsp; faults of the last one run last."""
    tests: tuple[str, ...] = ()
    """Files of tests for `record` (default: all) and `again`."""
    slow: bool = False
    """Record the tests that are marked slow, not the others."""
    by: int = 2
    """How many other tests that stay must reach each block of a test that `covered` names."""
    seconds: float = 300
    """A fault that tests of so many seconds did not catch has survived."""


def drawn(folder: Path, options: Options) -> list[Mutant]:
    """Random faults of the rooms, at most one for each line; each line is equally probable."""

    def rank(*words: str) -> str:
        return hashlib.sha256("\0".join((str(options.seed), *words)).encode()).hexdigest()

    lines: dict[tuple[str, str], list[Mutant]] = {}
    for path in (path for room in ROOMS for path in (folder / "internsp" / room).rglob("*.py")):
        name = str(path.relative_to(folder))
        for mutant in mutants(name, path.read_text()):
            lines.setdefault((name, mutant.where), []).append(mutant)
    chosen = sorted(lines, key=lambda line: rank(*line))[: options.number]
    picked = [min(lines[line], key=lambda one: rank(one.key())) for line in chosen]
    asked = [
        one
        for one in picked
        if room(one.file) in options.rooms and one.changes((folder / one.file).read_text())
    ]
    return sorted(asked, key=lambda one: room(one.file) == options.rooms[-1])


def room(file: str) -> str:
    """The room of a file of the library."""
    return next(name for name in ROOMS if file.startswith(f"internsp/{name}/"))


def latest(results: Path) -> dict[str, dict[str, Any]]:
    """Results by key: a later line replaces fields of earlier ones."""
    found: dict[str, dict[str, Any]] = {}
    for line in read(results):
        found.setdefault(line["key"], {}).update(line)
    return found


def judge(options: Options) -> None:
    """Judge the drawn faults that have no result, or survivors again against given tests."""
    again = options.do == "again"
    record = Record(options.folder)
    folder = options.folder / ("again" if again else "plain")
    # The plain copy stays as it is, beside the record of the same sources.
    work = Campaign(copied(folder) if again or not folder.exists() else folder)
    known = latest(options.results)
    # What no test of the record reaches comes last, against the tests of its file.
    for mutant in sorted(drawn(work.folder, options), key=lambda one: not record.notes(one)):
        before = known.get(mutant.key(), {"end": "", "seen": 0, "ran": 0, "reach": 0})
        if before["end"] in ("caught", "time") or (again and not before["end"]):
            continue
        given = dict.fromkeys(options.tests, options.seconds / max(1, len(options.tests)))
        if before["ran"] < before["reach"] and options.seconds > before["most"]:
            before |= {"seen": 0, "ran": 0}
        tests = given if again else record.reaching(mutant, before["seen"])
        if before["end"] and not tests:
            continue  # no test that reaches it was recorded since
        line = work.judge(mutant, tests, options.seconds)
        if line["end"] not in ("caught", "time"):
            line["ran"] += before["ran"]
            line["end"] = "survived" if line["ran"] else "unreached"
        fault = {"key": mutant.key(), **{name: getattr(mutant, name) for name in FAULT[1:]}}
        if not again:
            line |= {"seen": len(read(record.path)), "most": options.seconds}
            add(options.results, {**fault, **line})
        elif line["end"] in ("caught", "time"):
            add(options.results, {**fault, **line, "new": True})
        what = f"{mutant.before!r} -> {mutant.after!r}"
        say(f"{line} {mutant.key()} {mutant.file}:{mutant.line} {what}")


def report(results: Path) -> list[str]:
    """Counts by room; then each fault that no test caught before, and its fate."""
    every = list(latest(results).values())
    head = (
        "room",
        "run",
        "caught",
        "by time",
        "by a new test",
        "equivalent, or removed",
        "open",
        "of those that count",
    )
    rows: list[tuple[str, ...]] = [head]
    for name in (*ROOMS, "all"):
        ours = [line for line in every if name in ("all", room(line["file"]))]
        caught = [line for line in ours if line["end"] in ("caught", "time")]
        equal = sum("fate" in line for line in ours)
        share = f"{len(caught) / (len(ours) - equal):.1%}" if len(ours) > equal else ""
        by_time = sum(line["end"] == "time" for line in ours)
        new = sum("new" in line for line in ours)
        counts = (len(ours), len(caught), by_time, new, equal, len(ours) - equal - len(caught))
        rows.append((name, *map(str, counts), share))
    lines = [*markdown_rows(rows), ""]
    for line in (one for one in every if "new" in one or one["end"] not in ("caught", "time")):
        fate = f"caught by `{line['by']}`" if line["end"] in ("caught", "time") else line["end"]
        fate = f"{line['fate']}: {line['why']}" if "fate" in line else fate
        before, after = (" ".join(line[name].split()) for name in ("before", "after"))
        lines.append(f"- `{line['file']}`, `{line['scope']}`: `{before}` → `{after}`: {fate}.")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Do what the command line says."""
    options = tyro.cli(Options, args=argv, description=__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what is open is closed
    if options.do == "report":
        text = "\n".join(report(options.results)) + "\n"
        if options.document:
            put(options.document, MARK, text)
        else:
            print(text, end="")
    elif options.do == "covered":
        for seconds, test in Record(options.folder).covered(options.by):
            print(f"{seconds:.1f} {test}")
    elif options.do == "record":
        found = (
            p for kind in ("unit", "ranks", "fuzz") for p in (ROOT / "tests" / kind).glob("test_*")
        )
        files = options.tests or sorted(str(path.relative_to(ROOT)) for path in found)
        marks = "slow and not thorough" if options.slow else "not (slow or thorough)"
        Record(options.folder).take(files, marks)
    else:
        judge(options)


if __name__ == "__main__":
    main()
