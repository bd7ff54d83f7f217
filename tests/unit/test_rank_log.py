"""A rank's log: attempts are appended one after another; the first line names the rank's host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from internsp.app.process.rank_log import LastSeen, RankLog, last_seen, log_path


def test_the_first_line_says_where_the_rank_is_and_the_rest_is_appended(tmp_path: Path) -> None:
    path = log_path(tmp_path, 3)
    assert last_seen(path) is None
    log = RankLog(tmp_path, 3)
    assert last_seen(path) == LastSeen(os.getpid(), 0, "")
    assert str(last_seen(path)) == "before its first step, last collective: none"
    log.record_launch("AG", "embed.weight", "forward")
    log.begin_step(12)
    log.record_launch("RS", "layers.1.wo", "backward")
    log.record_launch("RS", "layers.1." + 300 * "é", "backward")
    seen = last_seen(path)
    assert seen is not None
    assert (seen.process, seen.step) == (os.getpid(), 12)
    assert seen.collective.startswith("reduce-scatter of layers.1.???")
    log.record_launch("EX", "norm.weight", "backward")
    assert str(last_seen(path)) == (
        "at step 12, last collective: sum between replicas of norm.weight (backward)"
    )
    log.write("first attempt")
    log.write_failure(ValueError("spilt"))
    log.close()
    again = RankLog(tmp_path, 3)
    assert last_seen(path) == LastSeen(os.getpid(), 0, ""), "of this attempt"
    again.close()
    first, *rest = path.read_text().splitlines()
    assert len(first) == 239
    assert [line[20:] for line in rest if line[:2] == "20"][1:3] == ["first attempt", "failed"]
    assert "ValueError: spilt" in rest
    path.write_text("something else\n")
    assert last_seen(path) is None


def test_the_place_outlives_a_process_that_is_killed_and_a_crash_leaves_its_stacks(
    tmp_path: Path,
) -> None:
    program = (
        "import os, sys, ctypes; from pathlib import Path\n"
        "from internsp.app.process.rank_log import RankLog\n"
        "log = RankLog(Path(sys.argv[1]), 0); log.begin_step(7)\n"
        "log.record_launch('AG', 'head.weight', 'forward')\n"
    )
    for end in ("os.kill(os.getpid(), 9)", "ctypes.string_at(0)"):
        words = [sys.executable, "-c", program + end, str(tmp_path)]
        assert subprocess.run(words, capture_output=True, check=False).returncode < 0
        seen = last_seen(log_path(tmp_path, 0))
        assert str(seen) == "at step 7, last collective: all-gather of head.weight (forward)"
    assert "Segmentation fault" in log_path(tmp_path, 0).read_text()
