"""Measures overlap: a training step over a real slow link, compared with alternatives.

Each rank runs with one thread in a separate network namespace; tbf limits its sending rate. The
rate follows from the compute time, measured first, so that ideal communication takes the preset's
multiple of it. Every variant trains the same weights on the same data in every round; if its losses
differ from those of one process, no time is reported. As root, with iproute2:

    python -m tools.bench_overlap --preset even --json even.json --picture even.png

docs/dev/results/method.md explains the columns and their limits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tools.bench.ranks import RankError, Refused, Session, Setup
from tools.bench.report import Page, say, write
from tools.bench.signals import terminate_as_interrupt
from tools.overlap import campaign, report
from tools.overlap.network import Link, Namespaces, NetworkError, missing, remove_stale
from tools.overlap.options import Options

OFFER = (
    "Run as root with iproute2 for a rate-limited link, or take --network loopback: plain "
    "loopback, no rate limit, and the tables say so"
)


def make_link(options: Options) -> Link:
    """The link between the ranks, not created yet.

    Raises:
        NetworkError: namespaces were requested but cannot be created.
    """
    if options.network == "loopback":
        return Link()
    reason = missing()
    if reason is not None:
        raise NetworkError(reason)
    for name in remove_stale():
        say(f"removed {name}, left by a run that was killed")
    return Namespaces(options.size("ranks"), options.send_buffer_kib)


def session_on(link: Link, options: Options) -> Session:
    """The ranks, not started yet."""
    return Session(
        Setup(
            "tools.overlap.rank:Worker", (options, link.interface), options.size("ranks"),
            options.timeout, link.interface, link.namespaces,
        )
    )  # fmt: skip


def measure(options: Options) -> tuple[dict[str, Any], Page, Page]:
    """The summary, the text to print, and the text for the page."""
    with make_link(options) as link, session_on(link, options) as session:
        outcome = campaign.run(options, link, session, say)
    summary = campaign.summarize(outcome)
    return summary, report.page(summary, legend=True), report.page(summary)


def main(arguments: Sequence[str]) -> int:
    """Returns 0; 1 if a variant failed or trained something else; 2 if nothing could run."""
    options = Options.read(arguments, __doc__)
    terminate_as_interrupt()
    try:
        options = options.resolve()
        summary, printed, page = measure(options)
    except (NetworkError, ValueError) as error:
        say(f"{error}\n{OFFER}" if isinstance(error, NetworkError) else error)
        return 2
    except (RankError, Refused) as error:
        say(error)
        return 2
    except KeyboardInterrupt as error:
        say(f"stopped ({error or 'SIGINT'}); everything is removed")
        return 130
    print(printed.text())
    command = ["python", "-m", "tools.bench_overlap", *arguments]
    write(options, summary, page, command, f"overlap:{options.mark or options.preset}")
    if options.picture is not None and "variants" in summary:
        from tools.overlap.picture import draw

        draw(summary, options.picture)
    return 1 if summary.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
