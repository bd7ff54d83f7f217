"""Chrome traces: lanes, times and payloads of hand-made events."""

from __future__ import annotations

import json
from pathlib import Path

from internsp.app.report.timeline import LANES
from internsp.app.train.page import write_chrome_trace
from internsp.base.trace import Event

EVENTS = [
    Event("FORWARD", "", "", "", 10.0, 10.5, 0),
    Event("AG", "layers.1", "layers.1.wq.weight", "forward", 10.1, 10.3, 640),
    Event("WAIT", "layers.1", "layers.1.wq.weight", "forward", 10.2, 10.3, 0),
]


def test_bars_lie_in_their_lanes_with_microseconds_since_the_step_began(tmp_path: Path) -> None:
    path = write_chrome_trace(tmp_path / "new" / "rank3.json", EVENTS, 3)
    rows = json.loads(path.read_text())["traceEvents"]
    names = {r["tid"]: r["args"]["name"] for r in rows if r["name"] == "thread_name"}
    assert [names[i] for i in range(len(LANES))] == list(LANES)
    (gather,) = [r for r in rows if r["name"] == "AG layers.1.wq.weight"]
    assert names[gather["tid"]] == "gathers"
    assert (round(gather["ts"]), round(gather["dur"])) == (100_000, 200_000)
    assert gather["args"]["bytes"] == 640
    (wait,) = [r for r in rows if r["name"].startswith("WAIT")]
    assert names[wait["tid"]] == "compute"
    assert {r["pid"] for r in rows} == {3}
