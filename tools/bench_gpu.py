"""One GPU: overhead, an EMULATED link, streams with random delays, whole runs.

One device is enough. On a GPU the defaults are blocks of a 7B model in bf16; without one everything
runs with tiny sizes on the CPU, which tests the code but says nothing about speed:

    python -m tools.bench_gpu --json gpu.json --markdown docs/dev/results/h200.md
    python -m tools.bench_gpu --device cpu

With `--rows FILE` each result is in a file as soon as it is there, and the same command goes on
after a time limit. Losses are compared with those of one plain process before any time is printed.
docs/dev/results/h200.md explains the columns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tools.bench.report import say, write
from tools.gpu import emulation, overhead, report, runs
from tools.gpu.device import choose, name_of
from tools.gpu.kept import Kept
from tools.gpu.options import Options
from tools.gpu.rounds import Differs


def run(options: Options, device: torch.device, kept: Kept) -> dict[str, Any]:
    """Run every requested part, one after another, but for results that are ``kept``."""
    summary: dict[str, Any] = {
        "device": name_of(device),
        "torch": torch.__version__,
        "options": options.to_json(),
    }
    by_case: dict[str, Callable[[Options, torch.device, Kept], Any]] = {
        "overhead": overhead.run, "streams": emulation.run_streams, "runs": runs.run,
    }  # fmt: skip
    whole: dict[str, Callable[[Options, torch.device], Any]] = {
        "link": emulation.run_link, "memory": emulation.run_memory,
    }  # fmt: skip
    wanted = [
        p for part in options.parts for p in ((part, "memory") if part == "link" else (part,))
    ]
    for part in dict.fromkeys(wanted):
        say(f"{part} ...")
        if part in by_case:
            summary[part] = by_case[part](options, device, kept)
        else:
            summary[part] = kept.result(part, "", partial(whole[part], options, device))
    return summary


def wrong(summary: dict[str, Any]) -> list[str]:
    """Why streams did not train the same as one process."""
    return [row["reason"] for row in summary.get("streams", []) if row["reason"] is not None]


def main(arguments: Sequence[str]) -> int:
    """Returns 0; 1 if a training differed; 2 if nothing could run."""
    options = Options.read(arguments, __doc__)
    try:
        device = choose(options.device)
        options = options.resolve(device.type)
        given = options.to_json() | {"parts": None}  # a file may have those of several calls
        kept = Kept(
            options.rows,
            {"device": name_of(device), "torch": torch.__version__, "options": given},
        )
    except ValueError as error:
        say(error)
        return 2
    say(f"device: {name_of(device)}")
    try:
        summary = run(options, device, kept)
    except Differs as error:
        say(f"no time is printed: {error}")
        return 1
    page = report.page(summary)
    print(page.text())
    write(options, summary, page, ["python", "-m", "tools.bench_gpu", *arguments], "gpu")
    return 1 if wrong(summary) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
