"""The processor time of every test, with all the programs that it starts.

    python -m pytest -p tests.support.cost --cost costs.txt ...

appends a line ``seconds test`` for each, of all workers; ``sort -rn costs.txt`` shows the dearest.
Wall time on busy cores says little, and a test of ranks or commands mostly runs in other processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.support.ranks import KEPT

TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The file of the costs."""
    parser.addoption("--cost", metavar="FILE", required=True, help="append each test's seconds")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note what a test and its fixtures have cost."""
    before = spent()
    try:
        return (yield)
    finally:
        with open(item.config.getoption("cost"), "a") as file:
            file.write(f"{spent() - before:.2f} {item.nodeid}\n")


def spent() -> float:
    """Seconds of this process, the fork server, ranks that stay, and what has ended of theirs."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    ticks = sum(sum(ticks_of(pid)) for pid in [server, *KEPT.pids()] if pid)
    return sum(os.times()[:4]) + ticks / TICKS


def ticks_of(pid: int) -> list[int]:
    """Of a process and of its children that have ended."""
    stat = Path(f"/proc/{pid}/stat")
    return (
        [int(n) for n in stat.read_text().rpartition(")")[2].split()[11:15]]
        if stat.exists()
        else []
    )
