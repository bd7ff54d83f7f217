"""Local processes for a run that no launcher started: one a rank, on this machine.

They come from a fork server, which has torch and the run's modules loaded once for all of them, and
talk to the launcher through a pipe each. Nothing is written to a disk and no semaphore is made, so
that nothing can stay behind, however the run ends; ranks and server end with the launcher
(:mod:`internsp.cli.lifetime`). A failed run is not started again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import multiprocessing.util
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from internsp.cli.lifetime import FOLDER_VARIABLE, LAUNCHER_VARIABLE, end_with_launcher, is_stopped
from internsp.config import Config
from internsp.errors import ConfigError
from internsp.failure.outcome import Failure, Fate, first_cause
from internsp.failure.rank_log import last_seen, path_of
from internsp.train.disk import steps_in
from internsp.train.stop import SAVE, StopRequest, catch, restore, status_of

GRACE_SECONDS = 60.0
"""Time for a step and a checkpoint after Ctrl-C; then, or at a second Ctrl-C, ranks are killed."""
SETTLE_SECONDS = 4.0
"""Time for the other ranks to fail in their turn once one has: a rank is named within five."""
_LOOK_SECONDS = 0.25

Run = Callable[[Config, Path], None]


def start(run: Run, config: Config, output: Path, preload: Sequence[str] = ()) -> int:
    """Run ``run(config, output)`` in ``launch.processes`` local processes; blocks until all end.

    Args:
        run: a function at the top of a module (it is pickled by name).
        preload: modules that ``run`` imports late: loaded once for all processes.

    A SIGUSR1 is handed on to rank 0: the run saves and goes on.

    Returns:
        0, also after SIGTERM; 130 after Ctrl-C, 129 after SIGHUP; once every rank has stopped.

    Raises:
        ChildError: a rank failed, or did not stop when asked; all have ended.
    """
    modules = ["internsp.cli.fork_server", "torch", __name__, run.__module__, *preload]
    multiprocessing.set_forkserver_preload(modules)
    with _Signals() as signals, _environment(config):
        # The ranks' store lives here, as under torchrun: it outlives any rank that fails.
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        ranks: list[_Rank] = []
        try:
            for number in range(config.launch.processes):
                ranks.append(_Rank(number, config, run, output, store.port))
            asked = _supervise(ranks, signals)
        finally:
            for rank in ranks:
                rank.kill()
    fates = [rank.fate for rank in ranks]
    cause = first_cause(fates)
    if cause is not None and not signals.insisted:
        if cause.exit_status != ConfigError.exit_status:  # what was given is to be mended first
            processes = {rank: ranks[rank].pid for rank in cause.ranks}
            again = f"internsp train {output / 'config.toml'} --output {output} --resume auto"
            cause.add_note(advice(output, processes, again))
        raise cause
    return status_of(asked or next((fate.stopped_by for fate in fates if fate.stopped_by), 0))


class _Rank:
    """One local process, as the launcher sees it."""

    def __init__(self, number: int, config: Config, run: Run, output: Path, port: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe: Connection | None
        self.pipe, ours = context.Pipe(duplex=False)
        environment = {
            "RANK": number,
            "LOCAL_RANK": number,
            "WORLD_SIZE": config.launch.processes,
            "LOCAL_WORLD_SIZE": config.launch.processes,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
            # The store of MASTER_PORT is there already: rank 0 starts none.
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        self.process = context.Process(
            target=_live,
            args=({k: str(v) for k, v in environment.items()}, ours, run, config, output),
            name=f"rank {number}",
        )
        self.process.start()
        self.pid = self.process.pid or 0
        ours.close()
        self.fate = Fate(number)
        self.ready = self.told = self.finished = False

    @property
    def alive(self) -> bool:
        return self.fate.exit_status is None

    def look(self) -> None:
        """Take in what the rank has sent, and whether it has ended."""
        ended = self.process.exitcode  # before reading: what it sent is then all in the pipe
        with contextlib.suppress(EOFError, OSError):
            while self.pipe is not None and self.pipe.poll():
                self._take(self.pipe.recv())
        if ended is not None and self.pipe is not None:
            self.fate.exit_status = ended
            self.fate.silent = not ended and not self.finished
            self.pipe.close()
            self.pipe = None

    def _take(self, message: Failure | int | None) -> None:
        if message is None:
            self.ready = True
        elif isinstance(message, Failure):
            self.fate.failure = message
        else:
            self.finished, self.fate.stopped_by = True, message

    def tell(self, number: int) -> None:
        """Ask the rank to stop, once it can hear it; more than once is fine."""
        self.told = self.told or self.hear(number)

    def hear(self, number: int) -> bool:
        """Send the rank a signal, if it can hear it."""
        if not self.ready or not self.alive or self.process.pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)
        return True

    def kill(self) -> None:
        """End the process, if it has not ended, and wait until it has."""
        if self.alive:
            self.fate.killed = True
            self.process.kill()
            self.process.join()
            self.look()
        self.process.close()


def advice(output: Path, processes: Mapping[int, int], again: str) -> str:
    """Where the ranks that are the cause were last, where to look, and how to go on.

    Args:
        processes: by rank; of another process a log says nothing of this run's end.
        again: what goes on.
    """
    lines = []
    for rank, process in processes.items():
        path = path_of(output, rank)
        seen = last_seen(path)
        if seen is None or seen.process != process:
            lines.append(f"rank {rank} had not begun to train: it has no log yet")
        else:
            lines.append(f"rank {rank} was at {seen}; its log: {path}")
    steps = steps_in(output / "checkpoints")
    if steps:
        lines.append(f"to go on after step {steps[0][0]}: {again}")
    else:
        lines.append("there is no checkpoint to go on from (checkpoint.every saves between)")
    return "\n".join(f"  {line}" for line in lines)


def _supervise(ranks: list[_Rank], signals: _Signals) -> int:
    """Wait until all ranks have ended, or must be ended; the signal that asked for that, or 0."""
    failed_at = asked_at = math.inf
    saves = 0  # requests that were handed on
    while alive := [rank for rank in ranks if rank.alive]:
        connection.wait([rank.process.sentinel for rank in alive], timeout=_LOOK_SECONDS)
        for rank in alive:
            rank.look()
        now = time.monotonic()
        if saves < signals.saves and ranks[0].hear(SAVE):
            saves = signals.saves
        if signals.number:
            asked_at = min(asked_at, now)
            for rank in alive:
                rank.tell(signals.number)
        if any(rank.fate.failed for rank in ranks):
            failed_at = min(failed_at, now)
            for rank in alive:
                rank.fate.stopped |= rank.alive and is_stopped(rank.process.pid or 0)
            if all(rank.fate.stopped for rank in alive if rank.alive):
                break  # nothing more will come from them
        if signals.insisted or now > min(failed_at + SETTLE_SECONDS, asked_at + GRACE_SECONDS):
            break
    return signals.number


def _live(
    environment: dict[str, str], pipe: Connection, run: Run, config: Config, output: Path
) -> None:
    """The life of one local process: says when it can hear a signal, and at the end how it went."""
    with StopRequest() as stop:
        end_with_launcher()
        pipe.send(None)
        os.environ.update(environment)
        torch.set_num_threads(config.launch.threads)
        # After any error every rank of a pipeline would log its whole schedule, line by line.
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL + 1)
        try:
            run(config, output)
        except BaseException as error:  # noqa: BLE001 - told by the launcher, once for all ranks
            pipe.send(Failure.of(error))
            raise SystemExit(1) from None
    pipe.send(stop.number)


class _Signals:
    """What the launcher has been asked: the first signal stops the run politely, the second kills.

    Attributes:
        number: the first signal; 0 while there is none.
        insisted: there was a second one.
        saves: how often it was asked for a checkpoint.
    """

    def __init__(self) -> None:
        self.number = 0
        self.insisted = False
        self.saves = 0

    def __enter__(self) -> _Signals:
        main = threading.current_thread() is threading.main_thread()
        self._before = catch(self._hear) if main else {}
        return self

    def __exit__(self, *_: object) -> None:
        restore(self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == SAVE:
            self.saves += 1
            return
        self.insisted = bool(self.number)
        self.number = self.number or number


@contextmanager
def _environment(config: Config) -> Iterator[None]:
    """For the server and its ranks: what is read before any Python of theirs runs.

    OpenMP reads its threads once. The folder is where multiprocessing puts the server's socket; it
    goes with this process, or, if that is killed, with the server.
    """
    values = {
        "OMP_NUM_THREADS": str(config.launch.threads),
        LAUNCHER_VARIABLE: str(os.getpid()),
        FOLDER_VARIABLE: multiprocessing.util.get_temp_dir(),
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
