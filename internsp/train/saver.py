"""Saving beside training: a copy to host memory, then a process of its own on every rank.

::

    rank         copy | training goes on           | all wrote? | training goes on
    its process       | look, write, digest, fsync |            | (rank 0) manifest, rename, latest

A checkpoint is valid when every rank's file is durable and rank 0's process has renamed the folder.
How far the ranks are is asked with the step's own reduction, so that waiting costs no message.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from internsp.errors import LACKING, InternspError, MachineError, NotFiniteError
from internsp.optim.finite import NotFinite
from internsp.optim.slices import Slices
from internsp.train import checkpoint_folder
from internsp.train.agreement import from_first, on_every_rank, plain_errors
from internsp.train.checkpoint import manifest_of, parameter_of, scale_of, state_of
from internsp.train.checkpoint_files import FilePlan
from internsp.train.peer import Copies
from internsp.train.session import Session
from internsp.train.writer import Writer

_Told = tuple[str, dict[str, Any], dict[str, Any], list[str]]
"""Of a rank: its file, the record of that, values that are no tensors, tensors not finite."""


@dataclass
class _Save:
    """One that is under way.

    Attributes:
        step: finished steps.
        values: what this rank keeps that is no tensor.
        content: makes that of the manifest, on rank 0; called while training goes on.
        committing: whether every rank's file is durable.
        digests: of all files, then.
    """

    step: int
    final: Path
    partial: Path
    values: dict[str, Any]
    content: Callable[[], dict[str, Any]]
    committing: bool = False
    digests: list[str] = field(default_factory=list)


class Saver:
    """Writes checkpoints of a session into ``folder``, never two at once.

    Every method but :meth:`progress` and :meth:`close` is collective. A save that fails leaves what
    was there before, whole.

    Args:
        run: the run's id.
        copies: of ``checkpoint.peer``.

    Attributes:
        notes: what the user should read of the last save: copies that were not made.
    """

    def __init__(
        self, session: Session, folder: Path, run: str, copies: Copies | None = None
    ) -> None:
        self._session, self._folder, self._run = session, folder, run
        self._copies = copies
        self.notes: list[str] = []
        self._plan: FilePlan | None = None
        self._writer: Writer | None = None
        self._save: _Save | None = None
        self._attempts = 0

    def prepare(self) -> tuple[FilePlan, Writer]:
        """Plan who writes what, and start the processes: once, or at the first save.

        Raises:
            InternspError: on every rank: the ranks' parts do not fit together, or some process
                does not start.
        """
        if self._plan is None or self._writer is None:
            with plain_errors(f"no checkpoint can be saved in {self._folder}"):
                tensors, _ = state_of(self._session)
                plan = FilePlan.make(tensors)
                self._token = from_first(partial(secrets.token_hex, 4))
                on_every_rank(lambda: self._begin(plan))
                self._plan = plan
        assert self._writer is not None, "_begin has made it"
        return self._plan, self._writer

    def _begin(self, plan: FilePlan) -> None:
        try:
            patience = self._session.config.parallel.timeout_seconds
            self._writer = Writer(plan.nbytes, patience)
        except OSError as error:
            kind = MachineError if error.errno in LACKING else InternspError
            rank = self._session.mesh.rank
            raise kind(
                f"no checkpoint can be saved in {self._folder}: rank {rank}: OSError: {error}"
            ) from error
        if self._session.mesh.rank == 0:
            self._session.source.fingerprint  # noqa: B018 - computed now, not at a save
            tensors = {
                name: record.model_dump(mode="json") for name, record in plan.tensors.items()
            }
            self._writer.order("remember", tensors=tensors)
            self._writer.answer()

    def start(self, step: int, sequences: int, tokens: int = 0) -> None:
        """Copy the state of ``step`` finished steps; it is written while the caller goes on.

        Nothing is under way: :meth:`finish` comes first.

        Args:
            sequences: rows of the training text that were taken.
            tokens: of those, that the loss has counted.
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
        # A buffer may hold what is not finite: a mask.
        plain = [name for name, value in tensors.items() if not isinstance(value, DTensor | Slices)]
        copy = None if self._copies is None else self._copies.order(self._session.mesh.rank)
        writer.order(
            "write", folder=str(folder), name=plan.file, nbytes=plan.nbytes, unseen=plain, copy=copy
        )

    def progress(self) -> float:
        """1 where this rank's part of what is under way is done; to be summed over all ranks."""
        if self._save is None or self._writer is None:
            return 0.0
        waits = not self._save.committing or self._session.mesh.rank == 0
        return float(waits and self._writer.answered)

    def advance(self, done: float) -> Path | None:
        """Go on where all ranks are done.

        Args:
            done: the sum of :meth:`progress`.

        Returns:
            A checkpoint that has become valid.

        Raises:
            NotFiniteError: on every rank: weights or state are not finite; there is no checkpoint.
            InternspError: on every rank: some rank could not write.
        """
        if self._save is None:
            return None
        if self._save.committing:
            return self._committed() if done >= 1 else None
        if done >= self._session.mesh.world_size:
            self._written()
        return None

    def finish(self) -> Path | None:
        """Wait until what is under way has become a checkpoint; raises as :meth:`advance`."""
        pause = 0.001
        while self._save is not None:
            # Asked again and again: no rank waits longer in a collective than another one writes.
            with self._undone():
                done = sum(on_every_rank(self._waited_for))
            if path := self.advance(done):
                return path
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return None

    def _waited_for(self) -> float:
        """:meth:`progress`, while there is hope of any."""
        if self._writer is not None and self._save is not None and not self._writer.answered:
            try:
                self._writer.require_running()
            except InternspError as error:
                raise self._unsaved(self._save, error) from error
        return self.progress()

    def _written(self) -> None:
        """Every rank has its file, or says why not."""
        save, writer, plan = self._save, self._writer, self._plan
        assert save is not None, "the caller has looked"
        assert writer is not None, "start() has prepared"
        assert plan is not None, "start() has prepared"
        rank = self._session.mesh.rank
        with self._undone():
            found = on_every_rank(lambda: self._told(writer, plan, save))
            _require_finite(save, found)
        why = [(rank, record.pop("no copy")) for rank, (_, record, _, _) in enumerate(found)]
        self.notes = [
            f"checkpoint {save.final} has no copy of rank {rank}'s part in memory: {text}"
            for rank, text in why
            if text is not None
        ]
        save.digests = [record["sha256"] for _, record, _, _ in found]
        if rank == 0:
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
            writer.order("settled", folder=str(save.partial))
            with contextlib.suppress(InternspError):  # the next save will say so
                writer.answer()
        save.committing = True

    def _committed(self) -> Path:
        save, writer = self._save, self._writer
        assert save is not None, "the caller has looked"
        assert writer is not None, "start() has prepared"
        with self._undone():
            from_first(lambda: self._answer(writer, save))
        if self._copies is not None:
            self._copies.keep = save.digests
        self._save = None
        return save.final

    def _told(self, writer: Writer, plan: FilePlan, save: _Save) -> _Told:
        told = self._answer(writer, save)
        broken = [parameter_of(name.partition("[")[0]) for name in told.pop("broken")]
        return plan.file, told, save.values, list(dict.fromkeys(broken))

    def _answer(self, writer: Writer, save: _Save) -> dict[str, Any]:
        try:
            return writer.answer()
        except InternspError as error:
            raise self._unsaved(save, error) from error

    def _unsaved(self, save: _Save, error: InternspError) -> InternspError:
        what = f"checkpoint {save.final} was not saved: rank {self._session.mesh.rank}"
        return type(error)(f"{what}: {error}")

    @contextlib.contextmanager
    def _undone(self) -> Iterator[None]:
        """If what is inside fails, on all ranks: give back what the save has taken."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process; what is no checkpoint yet leaves no trace. No message."""
        save, writer, plan = self._save, self._writer, self._plan
        self._save = self._writer = self._plan = None
        if writer is not None:
            writer.close(kill=save is not None and not save.committing)
        if save is None or plan is None:
            return
        if not save.committing:
            with contextlib.suppress(OSError):
                (save.partial / plan.file).unlink(missing_ok=True)
                save.partial.rmdir()  # by the last rank
        elif self._session.mesh.rank == 0:  # whose process alone touches it now
            shutil.rmtree(save.partial, ignore_errors=True)


def _require_finite(save: _Save, found: list[_Told]) -> None:
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
