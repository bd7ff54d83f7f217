"""Saving while training goes on: a copy to host memory, then a writer process on every rank.

::

    rank        copy | training goes on            | all written? | training goes on
    its process      | check, write, digest, fsync |              | rank 0: manifest, rename, latest

A checkpoint is valid when every rank's file is durable and rank 0's process has renamed the folder.
Whether all ranks have written is found with the all-reduce that each step does in any case, so that
saving adds no collective to a step.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from internsp.app.checkpoint import folder as checkpoint_folder
from internsp.app.checkpoint.checkpoint import manifest_of, parameter_of, scale_of, state_of
from internsp.app.checkpoint.files import FilePlan
from internsp.app.checkpoint.writer import Writer
from internsp.app.session.session import Session
from internsp.errors import MACHINE_ERRNOS, InternspError, MachineError, NotFiniteError
from internsp.failure.objects import Objects
from internsp.optim.finite import NotFinite
from internsp.optim.slices import Slices

_RankRecord = tuple[str, dict[str, Any], dict[str, Any], list[str]]
"""A rank's file name, its record, values that are not tensors, names of tensors not finite."""


@dataclass
class _Save:
    """A save that is not finished.

    Attributes:
        step: finished steps.
        values: this rank's values that are not tensors.
        content: makes the manifest's content, on rank 0; called while training goes on.
        committing: whether every rank's file is durable, so that rank 0 commits.
    """

    step: int
    final: Path
    partial: Path
    values: dict[str, Any]
    content: Callable[[], dict[str, Any]]
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
        self._plan: FilePlan | None = None
        self._writer: Writer | None = None
        self._save: _Save | None = None
        self._attempts = 0

    def prepare(self) -> tuple[FilePlan, Writer]:
        """Plan which rank writes what, and start the writer processes; later calls do nothing.

        Called by the first save, if not before.

        Raises:
            InternspError: on every rank: the ranks' parts do not fit together, or a process does
                not start.
        """
        if self._plan is None or self._writer is None:
            tensors, _ = state_of(self._session)
            plan = FilePlan.make(tensors)
            self._token = Objects().on_first(partial(secrets.token_hex, 4))
            Objects().on_every(lambda: self._begin(plan))
            self._plan = plan
        assert self._writer is not None, "_begin has made it"
        return self._plan, self._writer

    def _begin(self, plan: FilePlan) -> None:
        try:
            patience = self._session.config.parallel.timeout_seconds
            self._writer = Writer(plan.nbytes, patience)
        except OSError as error:
            kind = MachineError if error.errno in MACHINE_ERRNOS else InternspError
            rank = self._session.mesh.rank
            raise kind(
                f"no checkpoint can be saved in {self._folder}: rank {rank}: OSError: {error}"
            ) from error
        if self._session.mesh.rank == 0:
            self._session.source.fingerprint  # noqa: B018 - computed now, not at a save
            tensors = {
                name: record.model_dump(mode="json") for name, record in plan.tensors.items()
            }
            self._writer.order("set_tensors", tensors=tensors)
            self._writer.answer()

    def start(self, step: int, sequences: int, tokens: int = 0) -> None:
        """Copy the state after ``step`` finished steps to host memory and start to write it.

        Blocks for the copy only. An earlier save must have ended (:meth:`finish`).

        Args:
            sequences: rows of the training text used so far.
            tokens: tokens of those rows that the loss counted.
        """
        assert self._save is None, "never two at once"
        plan, writer = self.prepare()
        final = checkpoint_folder.folder_of(self._folder, step)
        self._attempts += 1
        folder = checkpoint_folder.partial_of(final, f"{self._token}-{self._attempts}")
        tensors, values = state_of(self._session)
        plan.fill(writer.memory, tensors)
        about = (step, sequences, tokens, self._run, scale_of(self._session))
        content = partial(manifest_of, self._session, *about)
        self._save = _Save(step, final, folder, values, content)
        # Not checked: buffers, which may hold values that are not finite, as masks do.
        plain = [name for name, value in tensors.items() if not isinstance(value, DTensor | Slices)]
        writer.order(
            "write", folder=str(folder), name=plan.file, nbytes=plan.nbytes, unseen=plain
        )

    def progress(self) -> float:
        """1 if this rank's part of the save's current phase is done; to be summed over ranks."""
        if self._save is None or self._writer is None:
            return 0.0
        waits = not self._save.committing or self._session.mesh.rank == 0
        return float(waits and self._writer.answered)

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
        if self._save is None:
            return None
        if self._save.committing:
            return self._finish_commit() if done >= 1 else None
        if done >= self._session.mesh.world_size:
            self._start_commit()
        return None

    def finish(self) -> Path | None:
        """Wait until the current save has become a checkpoint; raises as :meth:`advance`."""
        pause = 0.001
        while self._save is not None:
            # Polled: no rank waits in one collective for as long as another rank writes.
            with self._close_on_error():
                done = sum(Objects().on_every(self._progress_or_error))
            if path := self.advance(done):
                return path
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return None

    def _progress_or_error(self) -> float:
        """:meth:`progress`; raises if the writer process has ended or stays stopped."""
        if self._writer is not None and self._save is not None and not self._writer.answered:
            try:
                self._writer.require_running()
            except InternspError as error:
                raise self._save_error(self._save, error) from error
        return self.progress()

    def _start_commit(self) -> None:
        """Gather all ranks' records, or raise the error of one; then let rank 0 commit."""
        save, writer, plan = self._save, self._writer, self._plan
        assert save is not None, "the caller has looked"
        assert writer is not None, "start() has prepared"
        assert plan is not None, "start() has prepared"
        with self._close_on_error():
            found = Objects().on_every(lambda: self._rank_record(writer, plan, save))
            _require_finite(save, found)
        if self._session.mesh.rank == 0:
            content = save.content()
            content["files"] = {name: record for name, record, _, _ in found}
            content["values"] = {k: v for _, _, values, _ in found for k, v in values.items()}
            settings = self._session.config.checkpoint
            writer.order(
                "commit",
                folder=str(save.partial),
                final=str(save.final),
                content=content,
                keep_last=settings.keep_last,
                keep_every=settings.keep_every,
            )
        else:
            writer.order("close_folder", folder=str(save.partial))
            with contextlib.suppress(InternspError):  # the next save reports it
                writer.answer()
        save.committing = True

    def _finish_commit(self) -> Path:
        save, writer = self._save, self._writer
        assert save is not None, "the caller has looked"
        assert writer is not None, "start() has prepared"
        with self._close_on_error():
            Objects().on_first(lambda: self._answer(writer, save))
        self._save = None
        return save.final

    def _rank_record(self, writer: Writer, plan: FilePlan, save: _Save) -> _RankRecord:
        record = self._answer(writer, save)
        broken = [parameter_of(name.partition("[")[0]) for name in record.pop("broken")]
        return plan.file, record, save.values, list(dict.fromkeys(broken))

    def _answer(self, writer: Writer, save: _Save) -> dict[str, Any]:
        try:
            return writer.answer()
        except InternspError as error:
            raise self._save_error(save, error) from error

    def _save_error(self, save: _Save, error: InternspError) -> InternspError:
        what = f"checkpoint {save.final} was not saved: rank {self._session.mesh.rank}"
        return type(error)(f"{what}: {error}")

    @contextlib.contextmanager
    def _close_on_error(self) -> Iterator[None]:
        """A context that cleans up the save if its body raises, which it does on all ranks."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the writer process and remove what is not committed. No communication."""
        save, writer, plan = self._save, self._writer, self._plan
        self._save = self._writer = self._plan = None
        if writer is not None:
            writer.close(kill=save is not None and not save.committing)
        if save is None or plan is None:
            return
        if not save.committing:
            with contextlib.suppress(OSError):
                (save.partial / plan.file).unlink(missing_ok=True)
                save.partial.rmdir()  # succeeds on the last rank
        elif self._session.mesh.rank == 0:  # its process was the only one that still used it
            shutil.rmtree(save.partial, ignore_errors=True)


def _require_finite(save: _Save, found: list[_RankRecord]) -> None:
    ranks = tuple(rank for rank, (*_, broken) in enumerate(found) if broken)
    if ranks:
        names = dict.fromkeys(name for *_, broken in found for name in broken)
        raise NotFiniteError(
            f"weights or optimizer state are {NotFinite(tuple(names), ranks)}: no checkpoint of "
            f"step {save.step} is written"
        )


def save(session: Session, folder: Path, step: int, run: str, sequences: int = 0) -> Path:
    """Write ``folder/step-N`` and wait until it is valid. Collective; raises as :class:`Saver`."""
    saver = Saver(session, folder, run)
    try:
        saver.start(step, sequences)
        path = saver.finish()
    finally:
        saver.close()
    assert path is not None, "finish() raises, or there is a checkpoint"
    return path
