"""Settings of all tests: one torch thread, hypothesis without deadlines, marks by folder."""

from __future__ import annotations

import gc
import importlib
import pkgutil
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import internsp
from tests.support.few import products
from tests.support.ranks import KEPT, start_server
from tests.support.untraced import untraced

TESTS = Path(__file__).parent

# The parent may ignore signals (nohup, a background job), and the processes that tests start would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)

torch.set_num_threads(1)
# No deadline (two busy cores), and the same examples in every run, so that a failure repeats.
hypothesis.settings.register_profile("internsp", deadline=None, derandomize=True)
hypothesis.settings.load_profile("internsp")


def pytest_sessionfinish() -> None:
    """Ranks that stay end by themselves."""
    KEPT.close()


def pytest_collection_finish() -> None:
    """Torch and thousands of tests are no garbage: a tenth of a worker's time went into looking for
    some in them. While they are made nothing looks, see :func:`pytest_collection`.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Processes that internsp's launcher starts in a test are forked from the tests' server."""
    if item.get_closest_marker("ranks"):
        start_server()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Coverage traces the import of internsp, but not pytest's creation of thousands of tests."""
    gc.disable()
    try:
        return (yield from _collected())
    finally:
        gc.enable()


def _collected() -> Generator[None, object, object]:
    if sys.gettrace() is None:
        return (yield)
    for found in pkgutil.walk_packages(internsp.__path__, "internsp."):
        if not found.name.endswith("__main__"):
            with suppress(ImportError):  # from an optional package: its tests are skipped, too
                importlib.import_module(found.name)
    with untraced():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a long test and its fixtures without coverage's tracer."""
    long = any(item.get_closest_marker(name) for name in ("slow", "thorough", "unmeasured"))
    with untraced() if long else nullcontext():
        return (yield)


def seconds(item: pytest.Item) -> float:
    """Approximate duration of a test: from its mark ``slow(seconds)``; without one, short."""
    mark = item.get_closest_marker("thorough") or item.get_closest_marker("slow")
    return 0.0 if mark is None else float(*mark.args or (10,))


@cache
def shares(path: str) -> bool:
    """Whether a file's tests share a module-scoped fixture: a run, a site, a wheel."""
    return 'scope="module"' in (TESTS.parent / path).read_text()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadgroup``, send the tests of such a file to one worker, others to any.

    Otherwise three workers would each build what the tests share. xdist's own mark for such a group
    writes an attribute that pytest 9 no longer has.
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

    Long ones first, so that no worker is left alone with a long test at the end. Of the cases of a
    test of ranks only the first is measured by coverage: the others run the same lines, and the
    tracer takes a quarter more.
    """
    ranks = [i for i in items if i.path.relative_to(TESTS).parts[0] == "ranks"]
    for item in products([i for i in ranks if not i.get_closest_marker("thorough")]):
        item.add_marker(pytest.mark.thorough)
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
        if folder == "tools":  # they run when a page is made, and no user has them
            item.add_marker(pytest.mark.thorough)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
    items.sort(key=seconds, reverse=True)
