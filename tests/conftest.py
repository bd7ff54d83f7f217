"""What every test shares: one torch thread, hypothesis without clocks, marks by folder."""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import internsp
from tests.support.ranks import start_server
from tests.support.untraced import untraced
from tools.longest.environment import GIVES_BACK

TESTS = Path(__file__).parent

# What starts the tests may ignore signals (nohup, a background job), and what they start would
# keep that: an inherited ignore stays.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)

torch.set_num_threads(1)
# The memory of some ranks is measured (tools/longest), and MKL reads this when the server that they
# are forked from loads it, which another test may have started.
os.environ |= GIVES_BACK
# No deadline (two busy cores), and the same examples at every run: a failure repeats.
hypothesis.settings.register_profile("internsp", deadline=None, derandomize=True)
hypothesis.settings.load_profile("internsp")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Processes that a test starts by internsp's own launcher come from the tests' server, too."""
    if item.get_closest_marker("ranks"):
        start_server()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Coverage's tracer sees internsp imported, and not how pytest makes thousands of tests."""
    if sys.gettrace() is None:
        return (yield)
    for found in pkgutil.walk_packages(internsp.__path__, "internsp."):
        if not found.name.endswith("__main__"):
            with suppress(ImportError):  # of an optional package: its tests are skipped, too
                importlib.import_module(found.name)
    with untraced():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A long test and its fixtures run without coverage's tracer."""
    long = any(item.get_closest_marker(name) for name in ("slow", "thorough", "unmeasured"))
    with untraced() if long else nullcontext():
        return (yield)


def seconds(item: pytest.Item) -> float:
    """About how long a test takes: what its mark says, ``slow(seconds)``; without one, little."""
    mark = item.get_closest_marker("thorough") or item.get_closest_marker("slow")
    return 0.0 if mark is None else float(*mark.args or (10,))


@cache
def shares(path: str) -> bool:
    """Whether a file's tests share what is made once a module: a run, a site, a wheel."""
    return 'scope="module"' in (TESTS.parent / path).read_text()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadgroup``, tests of a file that shares go to one worker, others to any.

    Three workers would make what is shared three times. xdist's own mark for such a group writes
    into what pytest 9 has no more.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::")[0]
            return path if shares(path) else nodeid

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by folder; GPU tests say why they are skipped where there is no GPU; long ones first.

    So that at the end no worker is left alone with a long test. Of a test of ranks with several
    cases the first is measured: the others run the same lines, and a tracer takes a quarter more.
    """
    measured: set[str] = set()
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and torch finds none")
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder == "ranks":
            item.add_marker(pytest.mark.ranks)
            test = item.nodeid.split("[")[0]
            if test in measured:
                item.add_marker(pytest.mark.unmeasured)
            elif not item.get_closest_marker("slow"):
                measured.add(test)
        if folder == "gpu":
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
    items.sort(key=seconds, reverse=True)
