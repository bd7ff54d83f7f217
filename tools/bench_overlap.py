"""Proves the overlap: one training step over a real slow link, beside what else one could pick.

Each rank runs with one thread in a network namespace of its own; tbf limits what it sends. The
rate follows from compute, measured first, so that ideal communication takes the preset's multiple
of it. Every variant trains the same weights on the same data in every round, and its losses must
be those of one process, or it gets no time. As root, with iproute2:

    python -m tools.bench_overlap --preset even --json even.json --picture even.png

docs/performance.md says what the columns mean and what they do not prove.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.bench import campaign, chunks, report
from tools.bench.network import (
    Link,
    Namespaces,
    NetworkError,
    missing,
    remove_stale,
    terminate_as_interrupt,
)
from tools.bench.options import Options
from tools.bench.session import RankError, Refused, Session

OFFER = (
    "Run as root with iproute2 for a rate-limited link, or take --network loopback: plain "
    "loopback, no rate limit, and the tables say so"
)


def say(message: str) -> None:
    """Progress, without times."""
    print(message, file=sys.stderr, flush=True)


def make_link(options: Options) -> Link:
    """What the ranks will talk over, not made yet.

    Raises:
        NetworkError: when namespaces are asked for and cannot be had.
    """
    if options.network == "loopback":
        return Link()
    reason = missing()
    if reason is not None:
        raise NetworkError(reason)
    for name in remove_stale():
        say(f"removed {name}, left by a run that was killed")
    return Namespaces(options.size("ranks"), options.mtu, options.burst_kib)


def write(
    options: Options,
    summary: dict[str, object],
    arguments: Sequence[str],
    page: Callable[[dict[str, Any], Sequence[str]], str] = report.markdown,
) -> None:
    """The files asked for; ``page`` makes what goes into the one that people read."""
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(summary, indent=1) + "\n")
    if options.markdown is not None:
        command = ["python", "-m", "tools.bench_overlap", *arguments]
        body = page(summary, command)
        report.put(options.markdown, options.mark or options.preset, body)
    if options.picture is not None and "variants" in summary:
        from tools.bench.picture import draw

        draw(summary, options.picture)


def main(arguments: Sequence[str]) -> int:
    """Returns 0; 1 when a variant failed or trained something else; 2 when nothing could run."""
    options = tyro.cli(Options, args=list(arguments), description=__doc__)
    terminate_as_interrupt()
    try:
        options = options.resolve()
        with make_link(options) as link, Session(options, link) as session:
            if options.probe == "chunks":
                probed = chunks.run(options, link, session, say)
                print(chunks.text(probed))
                write(options, probed, arguments, chunks.markdown)
                return 0
            outcome = campaign.run(options, link, session, say)
    except (NetworkError, ValueError) as error:
        say(f"{error}\n{OFFER}" if isinstance(error, NetworkError) else str(error))
        return 2
    except (RankError, Refused) as error:
        say(str(error))
        return 2
    except KeyboardInterrupt as error:
        say(f"stopped ({error or 'SIGINT'}); everything is removed")
        return 130
    summary = campaign.summarize(outcome)
    print(report.text(summary))
    write(options, summary, arguments)
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
