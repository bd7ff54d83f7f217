"""Ranks that stay: processes with a group, in which one body after another runs.

A new process spends a third of a second on what the next body of the same process finds done: the
sharding rules of torch's DTensor for each operation of an optimizer step (0.25 s), the first
collective, the first backward. A body starts with the same seeds, environment and settings in any
process, and with names of its own in the store. One that leaves something behind (a function that
it has replaced, a thread, a compiled block, broken connections) is the last one of its
processes: :meth:`Start.left` finds it. Tests that break their group on purpose, or measure their
process, say ``fresh=True``.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim import optimizer

SIZES = (1, 2, 4)  # of the groups whose ranks stay
BODIES = 80  # that a process runs, one after another: each leaves some memory and groups
HOOKS = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
MODELS = 12  # of earlier bodies that may still be there
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Whose functions a test may replace.
OURS = ("internsp", "model_zoo", "tools", "tests.support")
THEIRS = (  # of them no constants, since torch counts groups and others
    "torch", "torch.distributed", "torch.distributed.distributed_c10d", "torch.nn.functional",
    "torch.utils.checkpoint", "torch.distributed.checkpoint", "torch.distributed.fsdp", "os",
    "time", "random", "threading",
)  # fmt: skip


@dataclass
class Member:
    """One of these processes, seen from the test's process."""

    process: BaseProcess
    connection: Connection
    bodies: list[str] = field(default_factory=list)

    def end(self) -> None:
        """Let it end by itself: coverage writes what it has measured."""
        with suppress(OSError):
            self.connection.send(None)


@dataclass
class Kept:
    """The ranks that stay, by their number, and the stores of their groups."""

    members: dict[int, list[Member]] = field(default_factory=dict)
    stores: dict[int, dist.Store] = field(default_factory=dict)

    def pids(self) -> list[int]:
        """Of the processes that live."""
        return [m.process.pid for each in self.members.values() for m in each if m.process.pid]

    def drop(self, size: int) -> None:
        """End the ranks of groups of ``size``."""
        ended = self.members.pop(size, [])
        for member in ended:
            member.end()
        for member in ended:
            member.process.join(10)
            member.process.kill()
            member.process.join()
        self.stores.pop(size, None)

    def close(self) -> None:
        """End all."""
        for size in list(self.members):
            self.drop(size)


class _Unmeasured(ForkServerProcess):
    """A rank without coverage: rank 0 runs the same code, and tracing doubles the time.

    Coverage measures processes by replacing ``_bootstrap`` of their base class; this class keeps
    the original, as it was when the fork server loaded this module without coverage.
    """

    _bootstrap = BaseProcess._bootstrap  # type: ignore[attr-defined]


def started(world_size: int, target: Any, port: int) -> list[Member]:
    """New ranks, which run ``target(rank, world_size, port, connection)``."""
    context = multiprocessing.get_context("forkserver")
    members = []
    for rank in range(world_size):
        here, there = multiprocessing.Pipe()
        process = (_Unmeasured if rank else context.Process)(
            target=target, args=(rank, world_size, port, there), name=f"rank{rank}", daemon=True
        )
        process.start()
        there.close()
        members.append(Member(process, here))
    return members


class Start:
    """What a rank's process is like before its first body."""

    def __init__(self) -> None:
        self._store = distributed_c10d._get_default_store()
        self._group = dist.group.WORLD
        self._environment, self._folder = dict(os.environ), Path.cwd()
        self._path, self._filters = list(sys.path), list(warnings.filters)
        self._numpy = numpy.random.get_state()  # noqa: NPY002
        self._threads = set(threading.enumerate())
        self._signals = [signal.getsignal(number) for number in SIGNALS]
        self._hooks = [dict(each) for each in HOOKS]
        self._level = logging.getLogger().level, list(logging.getLogger().handlers)
        self._broken: list[str] = []
        self._note_broken_groups()
        self._known: dict[str, tuple[Mapping[str, Any], dict[str, Any]]] = {}
        self._sizes: dict[str, int] = {}
        self._found: dict[str, list[int]] = {}  # what was compared last, by identity
        self._modules = len(sys.modules)
        self._changed_names()
        gc.freeze()  # these tables are as long as everything else that a body's end looks through

    def set(self, number: int) -> None:
        """Before body ``number``: the same state in any process."""
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(0)
        random.seed(0)  # as it starts, no two processes draw the same
        numpy.random.set_state(self._numpy)  # noqa: NPY002
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        sys.path[:] = self._path
        warnings.filters[:] = self._filters  # type: ignore[index]
        for hooks, first in zip(HOOKS, self._hooks, strict=True):  # of communicators that are gone
            hooks.clear()
            hooks.update(first)
        world = distributed_c10d._world
        backend, _ = world.pg_map[self._group]
        world.pg_map[self._group] = backend, dist.PrefixStore(f"body{number}", self._store)
        world.group_count = 10_000 * number  # no name of a group occurs twice

    def left(self) -> str:
        """What a body has left behind that another one might see; empty: nothing."""
        gc.collect()
        if len(sys.modules) > self._modules:  # those of torch._dynamo took 50 ms after each body
            self._modules = len(sys.modules)
            gc.freeze()
        torch.set_default_dtype(torch.float32)  # which sets torch.Storage, too
        if self._broken:
            return f"broken groups: {self._broken[0]}"
        if dist.group.WORLD is not self._group:
            return "another default group"
        threads = self._alive()
        if threads:
            return f"threads: {threads}"
        if [signal.getsignal(number) for number in SIGNALS] != self._signals:
            return "a handler of a signal"
        root = logging.getLogger()
        if (root.level, root.handlers) != self._level:
            return "a setting of logging"
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is not None and dynamo.counters["frames"]:
            return "compiled code"
        return self._changed_names()

    def _note_broken_groups(self) -> None:
        """A failure that is not on all ranks ends connections, of groups that tests share."""
        # Here, since ``tests/support/forked.py`` loads this module once and internsp in each run.
        from internsp import errors
        from internsp.failure import guard
        from internsp.pipeline import failure, messages

        made, closing = errors.CollectiveError.__init__, guard.close_connections

        def make(error: errors.CollectiveError, *args: object) -> None:
            self._broken.append("a CollectiveError")
            made(error, *args)

        def close(*args: Any, **options: Any) -> None:
            self._broken.append("closed connections")
            closing(*args, **options)

        errors.CollectiveError.__init__ = make  # type: ignore[method-assign, assignment]
        for module in (guard, messages, failure):
            module.close_connections = close  # type: ignore[attr-defined]

    def _alive(self) -> list[str]:
        """Names of threads that a body has started and that do not end.

        Not those of the library of a few models: they end with their model, which a graph or an
        error may hold a little longer, and meet no other model.
        """
        for _ in range(10):
            alive = set(threading.enumerate()) - self._threads
            if not alive:
                break
            time.sleep(0.005)
        names = sorted(thread.name for thread in alive)
        models = [name for name in names if name.startswith("internsp-")]
        return names if len(models) > MODELS else [n for n in names if n not in models]

    def _changed_names(self) -> str:
        """A function, class or constant that a body has replaced, in a module or a class."""
        for name, module in list(sys.modules.items()):
            if name in THEIRS or name.startswith(OURS):
                names = vars(module)
                if self._sizes.get(name) != len(names):  # else nothing is new in it
                    self._sizes[name] = len(names)
                    self._note(name, names)
                    for key, value in list(names.items()):
                        if issubclass(type(value), type) and value.__module__.startswith(OURS):
                            self._note(f"{value.__module__}.{key}", vars(value))
                if self._known[name][0] is not names:
                    return f"{name}, loaded again"
        for where, (names, before) in self._known.items():
            now = [*map(id, names.values())]
            if now == self._found.get(where):
                continue
            for key, value in before.items():
                found = names.get(key, self)
                # torch wraps ``step`` when the first optimizer of a class is made.
                if found is not value and getattr(found, "__wrapped__", self) is not value:
                    return f"{where}.{key}"
            self._found[where] = now
        return ""

    def _note(self, where: str, names: Mapping[str, Any]) -> None:
        """What the names of a module or a class stand for when they are first seen."""
        kinds = types.ModuleType if where.startswith(OURS) else (types.ModuleType, int, float, str)
        if where not in self._known:
            held = {k: v for k, v in names.items() if not issubclass(type(v), kinds)}
            self._known[where] = names, held
