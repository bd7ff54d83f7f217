"""A step's timeline as a Chrome trace, for ``chrome://tracing`` and ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from internsp.app.report.timeline import LANES, build_timeline, window_of
from internsp.base.trace import Event


def write_chrome_trace(path: Path, events: Sequence[Event], rank: int) -> Path:
    """Write one rank's events of one step: a process for the rank, a thread for each lane.

    Times are microseconds since the step began; payloads are in ``args.bytes``. The folder of
    ``path`` is created if missing.
    """
    lanes, begin = build_timeline(events), window_of(events)[0]
    rows: list[dict[str, object]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    ]
    for lane, name in enumerate(LANES):
        thread = {"pid": rank, "tid": lane}
        rows.append({"ph": "M", **thread, "name": "thread_name", "args": {"name": name}})
        for bar in lanes[name]:
            rows.append(
                {
                    "ph": "X",
                    **thread,
                    "name": f"{bar.kind} {bar.weight or bar.unit}".rstrip(),
                    "cat": bar.phase or bar.kind,
                    "ts": 1e6 * (bar.start - begin),
                    "dur": 1e6 * (bar.end - bar.start),
                    "args": {"unit": bar.unit, "phase": bar.phase, "bytes": bar.nbytes},
                }
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))
    return path
