"""Persistent ranks that serve requests: processes from a fork server that has loaded torch once.

:class:`Session` is the parent's side, :func:`_serve` a rank's. This module imports no torch, so
that the parent does not need it either.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pkgutil
import signal
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

from internsp.app.process.lifetime import signal_at_parents_end
from tools.bench.signals import Deaf

ROOT = Path(__file__).resolve().parents[2]
TRACE_LINES = 8
CLONE_NEWNET = 0x40000000


class RankError(RuntimeError):
    """A rank ended, hung, or failed alone; the message contains its output."""


class Refused(RuntimeError):
    """All ranks failed in the same request; only that request is lost.

    Attributes:
        reason: rank 0's error, one line.
        trace: the end of rank 0's traceback.
    """

    def __init__(self, call: str, reply: dict[str, Any]) -> None:
        self.reason: str = reply["error"].splitlines()[0]
        self.trace = "\n".join(reply["trace"].splitlines()[-TRACE_LINES:])
        super().__init__(f"every rank failed at {call}: {self.reason}\n{self.trace}")


@dataclass(frozen=True)
class Setup:
    """How to start a rank.

    Attributes:
        worker: ``"module:name"``, which a rank calls with ``arguments`` after it has joined the
            gloo group; requests call methods of the result.
        timeout: seconds allowed for a collective and for a reply.
        interface: network interface of the group.
        namespaces: network namespace of each rank, as a file; empty: the parent's.
    """

    worker: str
    arguments: tuple[Any, ...]
    world: int
    timeout: float
    interface: str = "lo"
    namespaces: Sequence[Path] = ()


class _Rank:
    def __init__(self, rank: int, setup: Setup, home: Path) -> None:
        self.log = home / f"rank{rank}.log"
        self.log.touch()
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(rank, setup, home, self.log, theirs), daemon=True
        )
        self.process.start()
        theirs.close()  # so that the pipe closes when the rank ends

    def printed(self, lines: int = 25) -> str:
        """The last part of a rank's output."""
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in text[-lines:])


class Session(AbstractContextManager["Session"]):
    """The processes of all ranks. ``ask`` sends a request to all and returns their replies."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._ranks: list[_Rank] = []
        self._home = tempfile.TemporaryDirectory(prefix="ispbench-")

    def __enter__(self) -> Session:
        try:
            start_server(self._setup.worker.partition(":")[0])
            for rank in range(self._setup.world):
                self._ranks.append(_Rank(rank, self._setup, Path(self._home.name)))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with Deaf():
            self._end()

    def ask(self, call: str, **arguments: Any) -> list[Any]:
        """Send a request to every rank and wait for all replies.

        Returns:
            The replies by rank.

        Raises:
            RankError: when a rank ended, did not answer in time, or failed alone.
            Refused: when all ranks failed.
        """
        for rank in self._ranks:
            try:
                rank.pipe.send((call, arguments))
            except OSError:
                raise self._lost(rank) from None
        replies = self._collect(call)
        failed = {i: r for i, r in enumerate(replies) if "error" in r}
        if len(failed) == len(replies):
            raise Refused(f"{call} {arguments}", failed[0])
        if failed:
            index, reply = next(iter(failed.items()))
            raise RankError(f"rank {index} failed alone at {call} {arguments}\n{reply['trace']}")
        return [reply["value"] for reply in replies]

    def _collect(self, call: str) -> list[dict[str, Any]]:
        waiting: dict[Any, _Rank] = {rank.pipe: rank for rank in self._ranks}
        replies: dict[Any, dict[str, Any]] = {}
        deadline = time.monotonic() + self._setup.timeout
        while waiting:
            left = deadline - time.monotonic()
            ready = connection.wait(list(waiting), timeout=max(0.0, left))
            if not ready:
                late = [i for i, r in enumerate(self._ranks) if r.pipe in waiting]
                failed = [r["trace"] for r in replies.values() if "error" in r]
                raise RankError(
                    f"rank(s) {late} did not answer {call} in time"
                    + "".join(f"\nanother rank had failed:\n{trace}" for trace in failed[:1])
                )
            for pipe in ready:
                try:
                    replies[pipe] = waiting[pipe].pipe.recv()
                except (EOFError, ConnectionError):
                    raise self._lost(waiting[pipe]) from None
                del waiting[pipe]
                if "error" in replies[pipe]:  # the others fail soon, or hang because of it
                    deadline = min(deadline, time.monotonic() + 20.0)
        return [replies[rank.pipe] for rank in self._ranks]

    def _lost(self, rank: _Rank) -> RankError:
        rank.process.join(timeout=10)
        index, status = self._ranks.index(rank), rank.process.exitcode
        return RankError(f"rank {index} ended with status {status}; it printed:\n{rank.printed()}")

    def _end(self) -> None:
        for rank in self._ranks:
            rank.pipe.close()
        until = time.monotonic() + 3.0
        for rank in self._ranks:
            rank.process.join(timeout=max(0.0, until - time.monotonic()))
            rank.process.kill()  # no effect on a process that has ended
            rank.process.join()
        self._ranks.clear()
        self._home.cleanup()


def start_server(*modules: str) -> None:
    """Start the fork server, once per process, with ``modules`` preloaded."""
    multiprocessing.set_forkserver_preload(list(modules))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # The numbers of threads are read when torch is loaded; the path is needed for the imports.
    with patch.dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONPATH=path):
        forkserver.ensure_running()


def _serve(rank: int, setup: Setup, home: Path, log: Path, requests: Any) -> None:
    """Join the group and serve requests until the parent closes the pipe. An error is sent as a
    reply; the parent decides what it means."""
    os.setsid()  # only the parent handles Ctrl-C
    signal_at_parents_end(signal.SIGKILL)  # with the parent the fork server ends, and then this one
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    if setup.namespaces:  # before any thread starts: a thread has the namespace of its creator
        namespace = os.open(setup.namespaces[rank], os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", str(setup.namespaces[rank]))
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(setup.world)}
    os.environ["GLOO_SOCKET_IFNAME"] = setup.interface

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{home / 'store'}",
        rank=rank,
        world_size=setup.world,
        timeout=timedelta(seconds=setup.timeout),
    )
    worker = pkgutil.resolve_name(setup.worker)(*setup.arguments)
    while True:
        try:
            call, arguments = requests.recv()
        except EOFError:
            os._exit(0)  # no synchronization at exit: a peer may have ended already
        reply: dict[str, Any]
        try:
            reply = {"value": getattr(worker, call)(**arguments)}
        except Exception as error:  # noqa: BLE001 - sent as a reply, whatever it is
            reply = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        requests.send(reply)
