"""How far the planner's predictions are from steps that others measured and published.

    python -m tools.planner                        every table of docs/dev/results/planner.md
    python -m tools.planner --document PAGE.md     the same, into the page
    python -m tools.planner fit                    the constants of each device, fitted again
    python -m tools.planner score FILE.csv [...]   each row of tables with the same columns
    python -m tools.planner score FILE.csv --json
    sudo python -m tools.planner own --rounds 5    our own steps over a slow link, from one preset's
    python -m tools.planner trained --rounds 3     steps of internsp train here, from one run's

The last two run on this machine, the others run nothing. A row that cannot be predicted says why.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tools.planner.accuracy import accuracy, regret
from tools.planner.rows import published, read
from tools.planner.score import Prediction, predictions

BEGIN, END = "<!-- planner -->", "<!-- /planner -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what the arguments ask for."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.planner", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--document", type=Path, help="write the tables into this page")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("fit", help="fit the constants of each device again")
    score = commands.add_parser("score", help="predict each row of tables")
    score.add_argument("files", nargs="+", type=Path)
    score.add_argument("--json", action="store_true", help="one object instead of lines")
    own = commands.add_parser("own", help="our own steps over a slow link, predicted from one's")
    own.add_argument("--presets", nargs="+", help="of tools.bench_overlap; the first is fitted on")
    own.add_argument("--rounds", type=int, default=3, help="each runs every preset once")
    own.add_argument("--network", default="namespaces", choices=("namespaces", "loopback"))
    trained = commands.add_parser("trained", help="steps of internsp train, predicted from a run's")
    trained.add_argument("--runs", nargs="+", help="the first is fitted on; default: all")
    trained.add_argument("--rounds", type=int, default=3, help="each trains every run once")
    options = parser.parse_args(arguments)
    if getattr(options, "rounds", 1) < 1:
        parser.error(f"--rounds {options.rounds}: give a number from 1 on")
    if options.command == "own":
        from tools.planner.own import CASES, run

        names = options.presets or [name for name in CASES if name != "tiny"]
        if unknown := [name for name in names if name not in CASES]:
            own.error(f"--presets: no {', '.join(unknown)}; there are {', '.join(CASES)}")
        for line in run(names, options.rounds, options.network):
            print(line)
        return 0
    if options.command == "trained":
        from tools.planner import trained as runs

        chosen = options.runs or list(runs.CASES)
        if unknown := [name for name in chosen if name not in runs.CASES]:
            trained.error(f"--runs: no {', '.join(unknown)}; there are {', '.join(runs.CASES)}")
        for line in runs.run(chosen, options.rounds):
            print(line)
        return 0
    if options.command == "score":
        return _score(options.files, options.json)
    if options.command == "fit":
        from tools.planner.fit import fits

        for device, one in fits(published()):
            print(f"{device}: products {one.products}, links {one.links}, slowdown "
                  f"{one.slowdown}, on {', '.join(one.rows)}")  # fmt: skip
        return 0
    from tools.planner.tables import all_tables

    tables = "\n\n".join(all_tables(published()))
    if options.document is None:
        print(tables)
    else:
        page = options.document.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        after = rest.partition(END)[2]
        options.document.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}", encoding="utf-8")
    return 0


def _score(files: Sequence[Path], as_json: bool) -> int:
    rows = []
    for path in files:
        try:
            rows += read(path)
        except (OSError, UnicodeDecodeError) as error:
            print(f"{path}: {error}")
            return 2
    found = predictions(rows)
    if as_json:
        print(json.dumps({"rows": [_entry(each) for each in found], "sum": _sums(found)}, indent=1))
        return 0
    for each in found:
        print(_line(each))
    print("\nIn sum, without rows that are excluded or that a constant was fitted on:")
    for name, value in _sums(found).items():
        print(f"  {name}: {value}")
    return 0


def _entry(each: Prediction) -> dict[str, Any]:
    return {
        "id": each.row.id,
        "group": each.row.group,
        "excluded": not each.row.usable,
        "fitted_on": each.fitted_on,
        "measured_seconds": each.row.seconds,
        "predicted_seconds": each.seconds,
        "error": each.error,
        "measured_gib": each.row.gib,
        "predicted_gib": each.gib,
        "memory_error": each.memory_error,
        "parts": dict(each.parts),
        "assumed": list(each.assumed),
        "flags": list(each.flags),
        "not_predicted": each.why or None,
    }


def _sums(found: Sequence[Prediction]) -> dict[str, Any]:
    own = [each for each in found if each.row.usable and not each.fitted_on]
    sums: dict[str, Any] = {"rows": len(found), "judged": len(own)}
    sums["not predicted"] = sum(bool(each.why) for each in found)
    sums["flagged"] = sum(bool(each.flags) for each in found)
    one = accuracy(own)
    if one is not None:
        sums["with measured seconds"] = one.rows
        for name in ("mean", "median", "p90", "worst"):
            sums[f"error of seconds, {name}"] = round(getattr(one, name), 4)
        if one.tau is not None:
            sums["Kendall's tau of tokens/s inside groups"] = round(one.tau, 3)
    lost = regret(own)
    if lost is not None:
        sums["regret"] = round(lost.mean, 4)
    memory = [abs(each.memory_error) for each in own if each.memory_error is not None]
    if memory:
        sums["error of memory, mean"] = round(mean(memory), 4)
    return sums


def _line(each: Prediction) -> str:
    name = each.row.id or "(no id)"
    if each.seconds is None or each.gib is None:
        return f"{name}: not predicted: {each.why}"
    cells = [f"{name}: {each.seconds:.4g} s"]
    if each.error is not None:
        cells.append(f"measured {each.row.seconds:.4g} s, error {100 * each.error:+.1f} %")
    cells.append(f"{each.gib:.1f} GiB")
    if each.memory_error is not None:
        kind = each.row.text("memory_kind") or "measured"
        cells.append(
            f"{kind} {each.row.gib:.1f} GiB, error {100 * each.memory_error:+.1f} %"
        )
    if each.fitted_on:
        cells.append("a constant was fitted on it")
    if not each.row.usable:
        cells.append(f"excluded: {each.row.text('excluded')}")
    cells += [f"assumed: {text}" for text in each.assumed]
    cells += [f"FLAG: {text}" for text in each.flags]
    return "; ".join(cells)


if __name__ == "__main__":
    raise SystemExit(main())
