"""``--probe chunks``: would weights cut into pieces travel faster over the benchmark's link?

The collectives of one step, in the order of the printed schedule, nothing computed: the library's
messages, gloo's own collectives of unsharded weights, halves and quarters, with few and many in
flight. What this cannot win, an option of the library could not either.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from tools.bench import report
from tools.bench.bounds import MBIT, Spread
from tools.bench.campaign import Outcome, Say, machine, prepare
from tools.bench.network import Link
from tools.bench.options import Options
from tools.bench.pieces import MESSAGES
from tools.bench.session import Session

Times = dict[tuple[int, int], list[float]]
PIECES = (MESSAGES, 1, 2, 4)
FLYING = (4, 8, 16)  # unsharded weights; a block of the model has seven
NAMES = {MESSAGES: "messages", 1: "whole", 2: "halves", 4: "quarters"}
HEAD = (
    "weights travel", "in flight", "seconds", "quartiles", "of the rate", "against whole", "cpu s"
)  # fmt: skip


def run(options: Options, link: Link, session: Session, say: Say) -> dict[str, Any]:
    """Measure every combination, interleaved, ``options.rounds`` times."""
    outcome = prepare(options, link, session, say)
    payload = session.ask("pieces_ready", pieces=PIECES)[0]
    say(f"pieces arrive as the whole does; {payload} bytes a step")
    cases = [(pieces, flying) for flying in FLYING for pieces in PIECES]
    seconds: Times = {case: [] for case in cases}
    busy: Times = {case: [] for case in cases}
    for index in range(options.rounds):
        turn = index % len(cases)
        for case in cases[turn:] + cases[:turn]:
            answers = session.ask("pieces", pieces=case[0], flying=case[1], steps=options.steps)
            for ranks in zip(*answers, strict=True):
                seconds[case].append(max(wall for wall, _ in ranks))
                busy[case].append(statistics.mean(cpu for _, cpu in ranks))
        say(f"round {index + 1} of {options.rounds}")
    return summarize(outcome, payload, seconds, busy)


def summarize(outcome: Outcome, payload: int, seconds: Times, busy: Times) -> dict[str, Any]:
    """Medians, and what they are of the rate and of unsharded weights with as many in flight."""
    rows: list[dict[str, Any]] = []
    for (pieces, flying), values in seconds.items():
        spread = Spread.of(values)
        whole = statistics.median(seconds[(1, flying)])
        reached = payload / spread.median / MBIT
        rows.append(
            {
                "pieces": pieces,
                "flying": flying,
                "seconds": values,
                "median": spread.median,
                "low": spread.low,
                "high": spread.high,
                "of_rate": None if outcome.rate_mbit is None else reached / outcome.rate_mbit,
                "against_whole": spread.median / whole,
                "cpu": statistics.median(busy[(pieces, flying)]),
            }
        )
    return {
        "options": outcome.options.to_json(),
        "machine": machine(outcome.hello),
        "link": outcome.label,
        "rate_mbit": outcome.rate_mbit,
        "payload": payload,
        "rows": rows,
    }


def table(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows of text, the head first."""
    rows: list[tuple[str, ...]] = [HEAD]
    for r in summary["rows"]:
        share = "-" if r["of_rate"] is None else f"{r['of_rate']:.3f}"
        spread = f"{r['low']:.3f} .. {r['high']:.3f}"
        rows.append(
            (NAMES[r["pieces"]], str(r["flying"]), f"{r['median']:.3f}", spread, share,
             f"{r['against_whole']:.3f}", f"{r['cpu']:.3f}")
        )  # fmt: skip
    return rows


def facts(summary: dict[str, Any]) -> list[str]:
    """What the figures rest on."""
    m, o, rate = summary["machine"], summary["options"], summary["rate_mbit"]
    limit = "NO RATE LIMIT" if rate is None else f"rate {rate:.0f} Mbit/s"
    return [
        f"{m['processor']}, {m['cores']} cores, Linux {m['kernel']}, torch {m['torch']}",
        f"{o['ranks']} ranks; {summary['link']}; {limit}",
        f"the {summary['payload'] / 1e6:.1f} MB that one step sends, no compute; {o['rounds']} "
        f"rounds of {o['steps']}",
    ]


def text(summary: dict[str, Any]) -> str:
    """For the terminal."""
    lines = ["  ".join(cell.rjust(17) for cell in row) for row in table(summary)]
    return "\n".join([*facts(summary), "", *lines])


def markdown(summary: dict[str, Any], command: Sequence[str]) -> str:
    """For a page."""
    rows = table(summary)
    out = ["```", shlex.join(command), "```", "", *(f"- {line}" for line in facts(summary)), ""]
    return "\n".join([*out, *report.lines_of(rows)]) + "\n"
