"""Local processes for a run that no launcher started: torch's elastic launcher, on one machine.

The library never restarts a failed run by itself, so the launcher is used for what it does well:
a rendezvous on a free port of its own choice, the environment of each rank, forwarding of signals,
and the error file of each rank.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from internsp import errors
from internsp.config import Config
from internsp.stop import SIGNALS, StopRequest

INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C."""
GRACE_SECONDS = 60
"""Time for a step and a checkpoint after Ctrl-C; then, or at a second Ctrl-C, ranks are killed."""

Run = Callable[[Config, Path], None]

# What a rank sees when another one has gone; never the cause.
_CONSEQUENCES = ("connection closed by peer", "connection reset by peer", "broken pipe")
_CAUSE_SECONDS = 2.0  # in which the launcher finds the rank that has gone


class ChildError(errors.InternspError, RuntimeError):
    """A local process failed; the message gives its rank and the cause, once.

    Attributes:
        exit_status: what the command ends with.
    """

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


@dataclass(frozen=True)
class _Cause:
    """The error file of one rank."""

    rank: int
    message: str
    traceback: str
    written: int

    @property
    def order(self) -> tuple[bool, int]:
        """Real causes before consequences, early ones first."""
        return _is_consequence(self.traceback), self.written

    def error(self) -> ChildError:
        """As what the launcher raises."""
        known = getattr(errors, self.message.partition(":")[0], None)
        said = self.message if isinstance(known, type) else self.traceback.rstrip()
        return ChildError(f"rank {self.rank} failed: {said}", getattr(known, "exit_status", 1))


def start(run: Run, config: Config, output: Path, preload: Sequence[str] = ()) -> int:
    """Run ``run(config, output)`` in ``launch.processes`` local processes; blocks until all end.

    Args:
        run: a function at the top of a module (it is pickled by name).
        preload: modules that ``run`` imports late: loaded once for all processes.

    Returns:
        0, or 130 after Ctrl-C (143 after SIGTERM), once every rank has stopped.

    Raises:
        ChildError: a rank failed; the others have been stopped.
    """
    folder = tempfile.TemporaryDirectory(prefix="internsp-")
    with folder as logs, _quiet(), _threads(config), _interrupts():
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=config.launch.processes,
            run_id="internsp",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            # The server of this method has torch and the run's module loaded once for all ranks,
            # and ignores Ctrl-C while they start.
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            shutdown_timeout=GRACE_SECONDS,
            signals_to_handle="SIGHUP,SIGQUIT",  # the others are ours, see _interrupts
        )
        multiprocessing.set_forkserver_preload(["torch", __name__, run.__module__, *preload])
        try:
            elastic_launch(settings, _rank)(run, config, output)
        except SignalException as error:
            return 128 + error.sigval
        except ChildFailedError as error:
            if all(failure.exitcode == INTERRUPTED for failure in error.failures.values()):
                return INTERRUPTED
            raise _explain(Path(logs), error) from None
    return 0


def _rank(run: Run, config: Config, output: Path) -> None:
    """The life of one local process."""
    torch.set_num_threads(config.launch.threads)
    # After any error every rank of a pipeline would log its whole schedule, line by line.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL + 1)
    parent = os.getppid()
    with StopRequest() as stop:
        try:
            run(config, output)
        except Exception:
            if _is_consequence(traceback.format_exc()):
                time.sleep(_CAUSE_SECONDS)  # or the launcher might find this rank's end first
            raise
    # After a signal the launcher no longer collects results, and would let this process wait.
    if stop.requested or os.getppid() != parent:
        raise SystemExit(INTERRUPTED)


def _is_consequence(stack: str) -> bool:
    """By the whole traceback: a pipeline stage wraps what it met in an error of its own."""
    return any(sign in stack.lower() for sign in _CONSEQUENCES)


def _explain(logs: Path, error: ChildFailedError) -> ChildError:
    """The first cause of a failed run, from the error files of all ranks."""
    causes = []
    for file in logs.rglob("error.json"):
        message = json.loads(file.read_text())["message"]
        rank = int(file.parent.name)
        written = file.stat().st_mtime_ns
        stack = message["extraInfo"]["py_callstack"]
        causes.append(_Cause(rank, message["message"], stack, written))
    real = sorted((c for c in causes if not c.order[0]), key=lambda c: c.order)
    if real:
        return real[0].error()
    for rank, failure in error.failures.items():
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return ChildError(f"rank {rank} was ended by {name}{hint}")
    if causes:
        first = min(causes, key=lambda c: c.order).error()
        return ChildError(f"{first}\nAnother rank went away without a message.")
    rank, failure = error.get_first_failure()
    return ChildError(f"rank {rank} ended with exit status {failure.exitcode}")


@contextmanager
def _interrupts() -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) stops the run politely, the second one kills it.

    The launcher's own handler would give the ranks another ``GRACE_SECONDS`` for each signal.
    """
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            for child in multiprocessing.active_children():
                child.kill()
            return
        asked = True
        raise SignalException(f"received signal {number}", signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the launcher's own log: causes are reported once, by :class:`ChildError`."""
    loggers = [logging.getLogger(f"torch.distributed.{name}") for name in ("elastic", "launcher")]
    children = [
        logging.getLogger(name)
        for name in list(logging.root.manager.loggerDict)
        if name.startswith("torch.distributed.elastic.")
    ]
    before = [(logger, logger.level) for logger in loggers + children]
    for logger, _ in before:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


@contextmanager
def _threads(config: Config) -> Iterator[None]:
    """OMP_NUM_THREADS for the children: OpenMP reads it once, before any Python of theirs."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(config.launch.threads)
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
