"""The training run on one rank, from configuration to report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from internsp.app.checkpoint import checkpoint
from internsp.app.checkpoint.disk import steps_in
from internsp.app.checkpoint.saver import Saver
from internsp.app.config import Config
from internsp.app.launch.preflight import errors_in_words
from internsp.app.process.modes import deterministic
from internsp.app.process.rank_log import RankLog
from internsp.app.process.stop import StopRequest
from internsp.app.session.session import Session
from internsp.app.train.alerts import Alerts
from internsp.app.train.loop import Loop
from internsp.app.train.output import Output
from internsp.app.train.run_folder import claimed
from internsp.failure.objects import Objects
from internsp.pipeline import SchedulerHook


def train(
    config: Config,
    output: Path,
    hooks: Iterable[SchedulerHook] = (),
    stop: StopRequest | None = None,
) -> None:
    """Run a training on this rank. Collective: every rank calls it with the same config.

    Rank 0 writes ``config.toml``, ``metrics.jsonl`` and ``report.html`` into ``output``; all ranks
    write ``checkpoints/``. A stop request (Ctrl-C, SIGTERM, SIGHUP) ends the loop after the current
    step; the checkpoint and the report are still written. SIGUSR1 requests a checkpoint, and the
    run continues. Only one run at a time can use ``output``.

    Args:
        hooks: called at every forward, criterion and backward, with or without a pipeline.
        stop: gets this process's signals, also those before the run begins; ``None``: one is made.

    Raises:
        ConfigError: on every rank: another process uses ``output``, or the checkpoint to resume
            from is damaged or has other settings.
        MachineError: the machine lacks memory, or room for a file.
    """
    ours = not dist.is_initialized()
    try:
        with errors_in_words(), nullcontext(stop) if stop else StopRequest() as heard:
            run_session(Session.create(config, hooks), output, heard)
    finally:
        if ours and dist.is_initialized():
            dist.destroy_process_group()


def run_session(
    session: Session,
    output: Path,
    stop: StopRequest,
    program: Callable[..., Any] | None = None,
) -> None:
    """As :func:`train`, with an existing session; does not destroy the process group.

    Args:
        program: see :class:`Output`; also told ``"resumed"`` with the step of the checkpoint.
    """
    config, main = session.config, session.mesh.rank == 0
    with claimed(output, main) as folder, _alerts(config, main) as alerts:
        source = _source(config, folder.path)
        resumed = None if source is None else checkpoint.load(session, source)
        if resumed is None and session.custom.model is None:  # for a model's own dropout
            checkpoint.seed_random(config.train.seed, 0, session.mesh.rank)
        folder.begin(resumed)
        if program is not None and resumed is not None:
            program("resumed", resumed.content.step)
        with _log(session, folder.path) as log, deterministic(config.train.deterministic):
            if config.checkpoint.save or config.checkpoint.every:
                folder.require_shared(session.mesh)
            saver = Saver(session, folder.path / "checkpoints", folder.run)
            shown = Output(session, folder.path, folder.run, log, program, alerts)
            Loop(session, folder, resumed, stop, saver, shown).run()


@contextmanager
def _alerts(config: Config, main: bool) -> Iterator[Alerts]:
    """The run's alerts; sends one if the run fails. Collective when it is entered."""
    command = config.report.alert if main else None
    alerts = Objects().here(lambda: Alerts(command, config.train.name))
    try:
        yield alerts
    except Exception as error:
        alerts.send("failed", f"the run failed: {type(error).__name__}: {error}")
        raise
    finally:
        alerts.close()


def _source(config: Config, folder: Path) -> Path | None:
    """The path to resume from, or ``None``. Collective."""
    # torchrun restarts a run by the same command after a fault: it must find its own checkpoints.
    elastic = "TORCHELASTIC_RUN_ID" in os.environ
    if config.checkpoint.from_own_folder(elastic):
        saved = folder / "checkpoints"
        return Objects().on_first(lambda: folder if steps_in(saved) else None)
    return None if config.checkpoint.named is None else Path(config.checkpoint.named)


@contextmanager
def _log(session: Session, output: Path) -> Iterator[RankLog]:
    """This rank's log; also logs how the run ends. Collective when it is entered."""
    rank = session.mesh.rank
    log = Objects().here(lambda: RankLog(output, rank))
    log.write(f"{session.mesh.describe()}; the configuration is in {output / 'config.toml'}")
    for communicator in session.communicators:
        communicator.state.collectives.comm_context.on_launch = log.record_launch
    try:
        yield log
        log.write("ended well")
    except BaseException as error:
        with suppress(OSError):  # the disk may be full
            log.write_failure(error)
        raise
    finally:
        log.close()
