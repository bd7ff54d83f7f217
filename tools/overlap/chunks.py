"""``--probe chunks``: would weights sent in pieces be faster on the benchmark's link?

The collectives of one step, in the order of the printed schedule, without compute: the library's
messages, gloo's own collectives of unsharded weights, halves and quarters, with few and many in
flight. If this shows no gain, an option of the library could not have one either.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from tools.bench.bounds import MBIT
from tools.bench.ranks import Session
from tools.bench.report import Page, Table
from tools.bench.rounds import Spread, order
from tools.overlap.campaign import Outcome, Say, machine, prepare
from tools.overlap.network import Link
from tools.overlap.options import Options
from tools.overlap.pieces import MESSAGES

Times = dict[tuple[int, int], list[float]]
PIECES = (MESSAGES, 1, 2, 4)
FLYING = (4, 8, 16)  # unsharded weights in flight; a block of the model has seven
NAMES = {MESSAGES: "messages", 1: "whole", 2: "halves", 4: "quarters"}
HEAD = (
    "weights travel", "in flight", "seconds", "quartiles", "of the rate", "against whole", "cpu s"
)  # fmt: skip


def run(options: Options, link: Link, session: Session, say: Say) -> dict[str, Any]:
    """Measure every combination, interleaved, ``options.rounds`` times."""
    outcome = prepare(options, link, session, say)
    payload = session.ask("pieces_ready", pieces=PIECES)[0]
    say(f"pieces arrive as one collective does; {payload} bytes a step")
    cases = [(pieces, flying) for flying in FLYING for pieces in PIECES]
    seconds: Times = {case: [] for case in cases}
    busy: Times = {case: [] for case in cases}
    for index in range(options.rounds):
        for case in order(cases, index):
            answers = session.ask("pieces", pieces=case[0], flying=case[1], steps=options.steps)
            for ranks in zip(*answers, strict=True):
                seconds[case].append(max(wall for wall, _ in ranks))
                busy[case].append(statistics.mean(cpu for _, cpu in ranks))
        say(f"round {index + 1} of {options.rounds}")
    return summarize(outcome, payload, seconds, busy)


def summarize(outcome: Outcome, payload: int, seconds: Times, busy: Times) -> dict[str, Any]:
    """Medians, relative to the rate and to unsharded weights with as many in flight."""
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
                **asdict(spread),
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


def page(summary: dict[str, Any]) -> Page:
    """The conditions of the measurement, and a row for every combination."""
    m, o, rate = summary["machine"], summary["options"], summary["rate_mbit"]
    limit = "NO RATE LIMIT" if rate is None else f"rate {rate:.0f} Mbit/s"
    rows = [HEAD]
    for r in summary["rows"]:
        share = "-" if r["of_rate"] is None else f"{r['of_rate']:.3f}"
        spread = f"{r['low']:.3f} .. {r['high']:.3f}"
        rows.append(
            (NAMES[r["pieces"]], str(r["flying"]), f"{r['median']:.3f}", spread, share,
             f"{r['against_whole']:.3f}", f"{r['cpu']:.3f}")
        )  # fmt: skip
    facts = [
        f"{m['processor']}, {m['cores']} cores, Linux {m['kernel']}, torch {m['torch']}",
        f"{o['ranks']} ranks; {summary['link']}; {limit}",
        f"the {summary['payload'] / 1e6:.1f} MB that one step sends, no compute; {o['rounds']} "
        f"rounds of {o['steps']}",
    ]
    return Page(facts, [Table(rows)])
