"""Runs chosen tests in a copy of the project, each time in a process forked with torch loaded.

``python -m tests.support.forked`` reads a line of JSON for each run and answers with one;
``tools/mutants/worker.py`` starts it in the copy's folder, with a folder for its own files.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

import pytest

from tests.support import command, ranks
from tools.mutants.hits import HITS, SIZE

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl


class Notes:
    """Keeps the chosen tests in their order; writes how each ended and which blocks ran."""

    def __init__(self, tests: Sequence[str], path: Path) -> None:
        self._order = {test: i for i, test in enumerate(tests) if "::" in test}
        self._file = path.open("w")
        self._now: dict[str, Any] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._order:
            items[:] = [item for item in items if item.nodeid in self._order]
            items.sort(key=lambda item: self._order[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[object]:
        self._now = {"test": item.nodeid, "failed": "", "seconds": 0.0, "hits": []}
        HITS[:] = bytes(SIZE)
        try:
            return (yield)
        finally:
            seen = HITS[:]
            self._now["hits"] = [i for i in range(SIZE) if seen[i]] if any(seen) else []
            print(json.dumps(self._now), file=self._file, flush=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._now["seconds"] += report.duration
        if report.failed:
            self._now["failed"] = report.longreprtext[-3000:] or "failed"


def end_of_run(child: int, limit: float) -> int | None:
    """Exit status of ``child``; None: it was killed at the limit. Kills all that it started."""
    end, status = time.monotonic() + limit, None
    while status is None and time.monotonic() < end:
        done, word = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(word) if done else None
        time.sleep(0.02)
    if status is None:
        os.killpg(child, signal.SIGKILL)
    # Whatever lost its parent has become a child of this process, the subreaper.
    while left := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for one in map(int, left):
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(one, 0)
    return status


def live(asked: dict[str, Any], notes: Path, log: Path) -> int:
    """A forked process: from here to pytest's exit status."""
    os.setsid()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    util.spawnv_passfds = command._server  # type: ignore[attr-defined]
    # The server is forked in a call that holds this lock, which its processes need for their own.
    lock = partial(setattr, forkserver._forkserver, "_lock")  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=lambda: lock(threading.Lock()))
    tests = asked["tests"]
    if any(test.startswith(("tests/ranks", "tests/fuzz")) for test in tests):
        ranks.start_server()  # forked from here, with torch loaded
    files = dict.fromkeys(test.split("::")[0] for test in tests)
    words = ["-q", "-p", "no:cacheprovider", "--tb=short", "-m", asked["marks"], *files]
    stop = ["-x"] if asked["stop"] else []
    return int(pytest.main([*stop, *words], plugins=[Notes(tests, notes)]))


def main() -> None:
    """Answer until the standard input ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    for name in ranks.PRELOAD:
        if not name.startswith(("internsp", "tools", "tests")):
            with suppress(ImportError):
                importlib.import_module(name)
    assert "internsp" not in sys.modules, "each run imports it anew"
    notes, log = (Path(sys.argv[1], name) for name in ("notes", "output"))
    for line in sys.stdin:
        asked, start = json.loads(line), time.monotonic()
        notes.write_text("")
        child = os.fork()
        if not child:
            status = 70
            try:
                status = live(asked, notes, log)
            finally:
                os._exit(status)
        try:
            code = end_of_run(child, asked["limit"])
        except SystemExit:
            end_of_run(child, 0)
            raise
        tests = [json.loads(one) for one in notes.read_text().splitlines()]
        seconds = time.monotonic() - start
        print(json.dumps({"code": code, "seconds": seconds, "tests": tests}), flush=True)


if __name__ == "__main__":
    main()
