"""Saving while training goes on: a copy to host memory, then a thread on every rank that writes.

::

    rank        copy | training goes on            | all written? | training goes on
    its thread       | check, write, digest, fsync |              | rank 0: manifest, rename, latest

A checkpoint is valid when every rank's file is durable and rank 0 has renamed the folder. Whether
all ranks have written is found with the all-reduce that each step does in any case, so that saving
adds no collective to a step. The thread holds the interpreter's lock only between large calls.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from internsp.app.checkpoint import folder as checkpoint_folder
from internsp.app.checkpoint.checkpoint import manifest_of, parameter_of, state_of
from internsp.app.checkpoint.disk import publish, write_part
from internsp.app.checkpoint.files import FilePlan
from internsp.app.checkpoint.manifest import canonical
from internsp.app.session.session import Session
from internsp.errors import MACHINE_ERRNOS, InternspError, MachineError, NotFiniteError
from internsp.failure.objects import Objects
from internsp.optim.finite import NotFinite
from internsp.optim.slices import Slices

THREAD = "checkpoint"
_RankRecord = tuple[str, dict[str, Any], dict[str, Any], list[str]]
"""A rank's file name, its record, values that are not tensors, parameters that are not finite."""


@dataclass
class _Save:
    """A save that is not finished.

    Attributes:
        step: finished steps.
        content: makes the manifest's content, on rank 0; called while training goes on.
        given_up: ends the writing early.
        work: this rank's part of the current phase: its record, then (rank 0) the commit.
        committing: whether every rank's file is durable, so that rank 0 commits.
    """

    step: int
    final: Path
    partial: Path
    content: Callable[[], dict[str, Any]]
    given_up: threading.Event
    work: Future[Any]
    committing: bool = False


class Saver:
    """Writes checkpoints of a session into ``folder``, one at a time.

    Every method but :meth:`progress` and :meth:`close` is collective. A save that fails leaves the
    earlier checkpoints as they were.

    Args:
        run: the run's id.
    """

    def __init__(self, session: Session, folder: Path, run: str) -> None:
        self._session, self._folder, self._run = session, folder, run
        self._planned: tuple[FilePlan, Tensor] | None = None
        self._tensors = ""  # on rank 0: the manifest's table of tensors, the same at every save
        self._save: _Save | None = None
        self._attempts = 0

    def prepare(self) -> tuple[FilePlan, Tensor]:
        """Plan which rank writes what, and allocate host memory; later calls do nothing.

        Called by the first save, if not before.

        Returns:
            The plan, and memory (uint8) for this rank's file.

        Raises:
            InternspError: on every rank: the ranks' parts do not fit together, or memory lacks.
        """
        if self._planned is None:
            plan = FilePlan.make(state_of(self._session)[0])
            self._token = Objects().name()[:8]
            made: list[Tensor] = []
            Objects().on_every(lambda: made.append(torch.empty(plan.nbytes, dtype=torch.uint8)))
            if self._session.mesh.rank == 0:
                self._session.source.fingerprint  # noqa: B018 - computed now, not at a save
                tensors = {name: one.model_dump(mode="json") for name, one in plan.tensors.items()}
                self._tensors = canonical(tensors)
            self._planned = plan, made[0]
        return self._planned

    def start(self, step: int, sequences: int, tokens: int = 0) -> None:
        """Copy the state after ``step`` finished steps to host memory and start to write it.

        Blocks for the copy only. An earlier save must have ended (:meth:`finish`).

        Args:
            sequences: rows of the training text used so far.
            tokens: tokens of those rows that the loss counted.
        """
        assert self._save is None, "never two at once"
        plan, memory = self.prepare()
        final = checkpoint_folder.folder_of(self._folder, step)
        self._attempts += 1
        folder = checkpoint_folder.partial_of(final, f"{self._token}-{self._attempts}")
        tensors, values = state_of(self._session)
        plan.fill(memory, tensors)
        # Not checked: buffers, which may hold values that are not finite, as masks do.
        plain = [name for name, value in tensors.items() if not isinstance(value, DTensor | Slices)]
        given_up = threading.Event()

        def write() -> _RankRecord:
            names = dict.fromkeys(parameter_of(n) for n in plan.not_finite(memory, plain))
            record = write_part(folder, plan.file, memory.numpy().data, given_up)
            return plan.file, record, values, list(names)

        scaler = self._session.optimizer.loss_scaler
        scale = None if scaler is None else scaler.state_dict()
        about = (step, sequences, tokens, self._run, scale)
        content = partial(manifest_of, self._session, *about)
        self._save = _Save(step, final, folder, content, given_up, in_background(write))

    def progress(self) -> float:
        """1 if this rank's part of the save's current phase is done; to be summed over ranks."""
        if self._save is None:
            return 0.0
        waits = not self._save.committing or self._session.mesh.rank == 0
        return float(waits and self._save.work.done())

    def advance(self, done: float) -> Path | None:
        """Start the commit, or finish it, if all ranks are done with what comes before.

        Args:
            done: the sum of :meth:`progress` over all ranks.

        Returns:
            The checkpoint, when it has become valid.

        Raises:
            NotFiniteError: on every rank: weights or state are not finite; nothing is committed.
            InternspError: on every rank: some rank could not write.
        """
        save = self._save
        if save is None:
            return None
        with self._close_on_error():
            if save.committing and done >= 1:
                Objects().on_first(lambda: self._result(save))
                self._save = None
                return save.final
            if not save.committing and done >= self._session.mesh.world_size:
                found = Objects().on_every(lambda: self._result(save))
                _require_finite(save, found)
                content = Objects().on_first(save.content)
                self._start_commit(save, found, content)
        return None

    def finish(self) -> Path | None:
        """Wait until the current save has become a checkpoint; raises as :meth:`advance`."""
        pause = 0.001
        while self._save is not None:
            # Polled: no rank waits in one collective for as long as another rank writes.
            with self._close_on_error():
                done = sum(Objects().gather(self.progress()))
            if path := self.advance(done):
                return path
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return None

    def _start_commit(self, save: _Save, found: list[_RankRecord], content: dict[str, Any]) -> None:
        """Let rank 0 commit what all ranks have written."""
        save.committing = True
        if self._session.mesh.rank:
            return
        files = {name: record for name, record, _, _ in found}
        values = {k: v for _, _, own, _ in found for k, v in own.items()}
        kept, place = self._session.config.checkpoint, secrets.token_hex(16)
        content |= {"files": files, "values": values, "tensors": place}

        def commit() -> None:
            # Spliced in as text: making the table of tensors anew would hold up training.
            text = canonical(content).replace(f'"{place}"', self._tensors)
            publish(save.partial, save.final, text, kept.keep_last, kept.keep_every)

        save.work = in_background(commit)

    def _result(self, save: _Save) -> Any:
        """What this rank's thread has returned.

        Raises:
            MachineError: the machine lacks a resource (disk space).
            InternspError: another failure.
        """
        try:
            return save.work.result()
        except Exception as error:
            kind = InternspError
            if isinstance(error, OSError) and error.errno in MACHINE_ERRNOS:
                kind = MachineError
            what = f"checkpoint {save.final} was not saved: rank {self._session.mesh.rank}"
            raise kind(f"{what}: {type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def _close_on_error(self) -> Iterator[None]:
        """A context that cleans up the save if its body raises, which it does on all ranks."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give up a save that is not committed, and remove what it wrote. No communication."""
        save, self._save = self._save, None
        if save is None:
            return
        if not save.committing:
            save.given_up.set()
        # A disk that hangs must not hold up the end of this rank.
        wait([save.work], timeout=self._session.config.parallel.timeout_seconds)
        if not save.committing and self._planned is not None:
            with contextlib.suppress(OSError):
                (save.partial / self._planned[0].file).unlink(missing_ok=True)
                save.partial.rmdir()  # succeeds on the last rank
        elif self._session.mesh.rank == 0:  # the only one that still used it
            shutil.rmtree(save.partial, ignore_errors=True)


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """Run ``work()`` in a thread that holds up no end of the program."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            done.set_exception(error)

    threading.Thread(target=run, name=THREAD, daemon=True).start()
    return done


def _require_finite(save: _Save, found: list[_RankRecord]) -> None:
    ranks = tuple(rank for rank, (*_, broken) in enumerate(found) if broken)
    if ranks:
        names = dict.fromkeys(name for *_, broken in found for name in broken)
        raise NotFiniteError(
            f"weights or optimizer state are {NotFinite(tuple(names), ranks)}: no checkpoint of "
            f"step {save.step} is written"
        )
