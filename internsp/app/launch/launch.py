"""Local processes for a run that no launcher started: one for each rank, on this machine.

They are forked by a fork server, which imports torch and the run's modules once for all of them,
and each sends its messages to the launcher through a pipe. No semaphore is created, so that only a
launcher that was killed leaves something behind, an empty socket; ranks and server end with it
(:mod:`internsp.app.process.lifetime`). A failed run is not restarted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import shlex
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from internsp.app.checkpoint.disk import steps_in
from internsp.app.config import Config
from internsp.app.process.environment import computing_threads
from internsp.app.process.lifetime import LAUNCHER_VARIABLE, end_with_launcher, is_stopped
from internsp.app.process.rank_log import last_seen, log_path
from internsp.app.process.stop import SAVE, StopRequest, status_of
from internsp.errors import ConfigError, InternspError, MachineError
from internsp.failure.detection import is_consequence

_MAX_CHARS = 30_000  # so that a message fits the pipe's buffer, and its sender need not wait
GRACE_SECONDS = 60.0
"""Time for a step and a checkpoint after Ctrl-C; then, or at a second Ctrl-C, ranks are killed."""
SETTLE_SECONDS = 4.0
"""Time for other ranks to fail, too, after the first one: the error comes within five seconds."""
_LOOK_SECONDS = 0.25

Run = Callable[..., None]


class ChildError(InternspError, RuntimeError):
    """A local process failed; the message gives its rank and the cause, once.

    Attributes:
        exit_status: exit status of the command.
        ranks: the ranks that are the cause, as far as is known.
    """

    def __init__(self, message: str, exit_status: int = 1, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.exit_status = exit_status
        self.ranks = tuple(ranks)


@dataclass(frozen=True)
class Failure:
    """An exception that a rank raised, as it is sent to the launcher.

    Attributes:
        text: type and message alone for an error of internsp, which needs no more; else the whole
            traceback.
        consequence: whether it only follows from the failure of another rank.
        at: time in seconds of the machine's monotonic clock, which all processes share.
    """

    text: str
    consequence: bool
    at: float
    exit_status: int = 1

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception that has just been caught."""
        stack = "".join(traceback.format_exception(error)).rstrip()
        text = f"{type(error).__name__}: {error}" if isinstance(error, InternspError) else stack
        status = getattr(error, "exit_status", 1)
        return cls(text[-_MAX_CHARS:], is_consequence(error), time.monotonic(), status)


@dataclass
class RankOutcome:
    """How one rank ended, as far as the launcher knows.

    Attributes:
        exit_status: of the process; negative: the signal that ended it; ``None`` while it lives.
        stopped_by: the signal on whose request the run stopped in order; 0 if none.
        ended_early: it ended with status 0 before it reported the end of its run.
        stopped: it was found stopped (SIGSTOP) after another rank had failed.
        killed: the launcher killed it, because it did not end by itself.
    """

    rank: int
    exit_status: int | None = None
    failure: Failure | None = None
    stopped_by: int = 0
    ended_early: bool = False
    stopped: bool = False
    killed: bool = False

    @property
    def failed(self) -> bool:
        """Whether the rank failed by itself, and was not only killed by the launcher."""
        ended = bool(self.exit_status) or self.ended_early
        return self.failure is not None or (ended and not self.killed)


def first_cause(outcomes: Sequence[RankOutcome]) -> ChildError | None:
    """The first cause of a failed run, as an error to raise; ``None`` if every rank ended well."""
    failures = sorted(
        ((outcome.failure, outcome.rank) for outcome in outcomes if outcome.failure is not None),
        key=lambda pair: (pair[0].consequence, pair[0].at),
    )
    for failure, rank in failures:
        if not failure.consequence:
            text = f"rank {rank} failed: {failure.text}"
            return ChildError(text, failure.exit_status, [rank])
    for outcome in outcomes:
        if outcome.exit_status is not None and outcome.exit_status < 0 and not outcome.killed:
            name = signal.Signals(-outcome.exit_status).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            text = f"rank {outcome.rank} was ended by {name}{hint}"
            return ChildError(text, ranks=[outcome.rank])
    later = ""
    if failures:
        failure, rank = failures[0]
        later = f"\nLater, rank {rank}: {failure.text.strip().splitlines()[-1]}"
    for outcome in outcomes:
        if outcome.stopped:
            return ChildError(
                f"rank {outcome.rank} was stopped (SIGSTOP, SIGTSTP or a debugger) while the "
                f"others waited for it; it has been ended{later}",
                ranks=[outcome.rank],
            )
    for outcome in outcomes:
        if outcome.failed and outcome.failure is None:
            status = f"exit status {outcome.exit_status}"
            before = " before its run had come to an end" if outcome.ended_early else ""
            text = f"rank {outcome.rank} ended with {status}{before}{later}"
            return ChildError(text, ranks=[outcome.rank])
    late = [outcome.rank for outcome in outcomes if outcome.killed and outcome.failure is None]
    if late and failures:
        return ChildError(
            f"{_ranks(late)} did not come where the others waited, and had to be ended; if that is "
            f"slow and not stuck, raise parallel.timeout_seconds{later}",
            ranks=late,
        )
    if late:
        text = f"{_ranks(late)} did not stop in time when asked, and had to be ended"
        return ChildError(text, ranks=late)
    if failures:
        return ChildError(
            f"rank {rank} failed: {failure.text}\nAnother rank went away without a message.",
            ranks=[rank],
        )
    return None


def _ranks(numbers: Sequence[int]) -> str:
    names = ", ".join(str(number) for number in numbers)
    return f"rank {names}" if len(numbers) == 1 else f"ranks {names}"


def start(run: Run, config: Config, output: Path) -> int:
    """Run ``run(config, output, stop=...)`` in ``launch.processes`` local processes; blocks until
    all end.

    SIGUSR1 is forwarded to rank 0: the run saves and continues.

    Args:
        run: a function at the top level of a module, which the fork server imports once.

    Returns:
        0, also after SIGTERM; 130 after Ctrl-C, 129 after SIGHUP; once every rank has stopped.

    Raises:
        ChildError: a rank failed, or did not stop when requested; all ranks have ended.
    """
    modules = ["internsp.app.launch.fork_server", "torch", __name__, run.__module__]
    multiprocessing.set_forkserver_preload(modules)
    with StopRequest() as signals, _environment():
        # The ranks' store is in this process, as under torchrun: it outlives any rank that fails.
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        ranks: list[_Rank] = []
        try:
            for number in range(config.launch.processes):
                ranks.append(_Rank(number, config, run, output, store.port))
            stop_signal = _supervise(ranks, signals)
        except OSError as error:
            if error.errno is not None:
                raise
            folder = tempfile.gettempdir()  # of the fork server's socket
            raise MachineError(f"{folder}: {error}: set TMPDIR to a shorter path") from error
        finally:
            for rank in ranks:
                rank.kill()
    outcomes = [rank.outcome for rank in ranks]
    cause = first_cause(outcomes)
    if cause is not None and not signals.insisted:
        if cause.exit_status != ConfigError.exit_status:  # else the configuration must be corrected
            processes = {rank: ranks[rank].pid for rank in cause.ranks}
            file, folder = shlex.quote(str(output / "config.toml")), shlex.quote(str(output))
            again = f"internsp train {file} --output {folder} --resume auto"
            if note := advice(output, processes, again):
                cause.add_note(note)
        raise cause
    return status_of(
        stop_signal or next((outcome.stopped_by for outcome in outcomes if outcome.stopped_by), 0)
    )


class _Rank:
    """A local process, and what the launcher knows about it."""

    def __init__(self, number: int, config: Config, run: Run, output: Path, port: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe: Connection | None
        self.pipe, ours = context.Pipe(duplex=False)
        environment = {
            "RANK": number,
            "LOCAL_RANK": number,
            "WORLD_SIZE": config.launch.processes,
            "LOCAL_WORLD_SIZE": config.launch.processes,
            "OMP_NUM_THREADS": computing_threads(),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
            # The store of MASTER_PORT exists already: rank 0 must not create it.
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        self.process = context.Process(
            target=_rank_main,
            args=({k: str(v) for k, v in environment.items()}, ours, run, config, output),
            name=f"rank {number}",
        )
        self.process.start()
        self.pid = self.process.pid or 0
        ours.close()
        self.outcome = RankOutcome(number)
        self.ready = self.stop_sent = self.finished = False

    @property
    def alive(self) -> bool:
        return self.outcome.exit_status is None

    def poll(self) -> None:
        """Receive the rank's messages, and note whether it has ended."""
        ended = self.process.exitcode  # read first: the pipe then has all messages of an ended rank
        with contextlib.suppress(EOFError, OSError):
            while self.pipe is not None and self.pipe.poll():
                self._receive(self.pipe.recv())
        if ended is not None and self.pipe is not None:
            self.outcome.exit_status = ended
            self.outcome.ended_early = not ended and not self.finished
            self.pipe.close()
            self.pipe = None

    def _receive(self, message: Failure | int | None) -> None:
        if message is None:
            self.ready = True
        elif isinstance(message, Failure):
            self.outcome.failure = message
        else:
            self.finished, self.outcome.stopped_by = True, message

    def send_signal(self, number: int) -> bool:
        """Send the rank a signal, if it is ready and runs; returns whether it did."""
        if not self.ready or not self.alive or self.process.pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)
        return True

    def kill(self) -> None:
        """Kill the process if it has not ended, and wait for its end."""
        if self.alive:
            self.outcome.killed = True
            self.process.kill()
            self.process.join()
            self.poll()
        self.process.close()


def advice(output: Path, processes: Mapping[int, int], again: str) -> str:
    """For the ranks that caused a failure: where they were, their logs, and how to resume.

    Empty if there is neither: the run had not begun.

    Args:
        processes: process id by rank; the log of another process is not of this run.
        again: the command to resume with.
    """
    lines = []
    begun = False
    for rank, process in processes.items():
        path = log_path(output, rank)
        seen = last_seen(path)
        if seen is None or seen.process != process:
            lines.append(f"rank {rank} had not begun to train: it has no log yet")
        else:
            lines.append(f"rank {rank} was {seen}; its log: {path}")
            begun = True
    steps = steps_in(output / "checkpoints")
    if not begun and not steps:
        return ""
    if steps:
        lines.append(f"to go on after step {steps[0][0]}: {again}")
    else:
        lines.append("there is no checkpoint to go on from (checkpoint.every saves between)")
    return "\n".join(f"  {line}" for line in lines)


def _supervise(ranks: list[_Rank], signals: StopRequest) -> int:
    """Wait until all ranks have ended or must be killed; returns the stop signal, or 0."""
    failed_at = asked_at = math.inf
    saves = 0  # save requests sent to rank 0
    while alive := [rank for rank in ranks if rank.alive]:
        connection.wait([rank.process.sentinel for rank in alive], timeout=_LOOK_SECONDS)
        for rank in alive:
            rank.poll()
        now = time.monotonic()
        if saves < signals.saves and ranks[0].send_signal(SAVE):
            saves = signals.saves
        if signals.number:
            asked_at = min(asked_at, now)
            for rank in alive:
                rank.stop_sent = rank.stop_sent or rank.send_signal(signals.number)
        if any(rank.outcome.failed for rank in ranks):
            failed_at = min(failed_at, now)
            for rank in alive:
                rank.outcome.stopped |= rank.alive and is_stopped(rank.process.pid or 0)
            if all(rank.outcome.stopped for rank in alive if rank.alive):
                break  # stopped processes send nothing more
        if signals.insisted or now > min(failed_at + SETTLE_SECONDS, asked_at + GRACE_SECONDS):
            break
    return signals.number


def _rank_main(
    environment: dict[str, str], pipe: Connection, run: Run, config: Config, output: Path
) -> None:
    """Main function of a local rank: reports when it is ready for signals, and how it ended."""
    with StopRequest() as stop:
        end_with_launcher()
        pipe.send(None)
        os.environ.update(environment)
        torch.set_num_threads(computing_threads())
        # Else every rank of a pipeline would log its whole schedule after any error, line by line.
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL + 1)
        try:
            run(config, output, stop=stop)
        except BaseException as error:  # noqa: BLE001 - the launcher reports it once for all ranks
            pipe.send(Failure.of(error))
            raise SystemExit(1) from None
    pipe.send(stop.number)


@contextmanager
def _environment() -> Iterator[None]:
    """Set environment variables for the server and its ranks, which are read before their code.

    OpenMP reads its number of threads once.
    """
    values = {
        "OMP_NUM_THREADS": str(computing_threads()),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
