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
from collections.abc import Generator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from internsp.app.checkpoint.checkpoint import parameter_of, position_of, state_of
from internsp.app.checkpoint.disk import (
    folder_of,
    partial_of,
    publish,
    require_seen,
    write_part,
)
from internsp.app.checkpoint.files import FilePlan
from internsp.app.checkpoint.manifest import Manifest, canonical
from internsp.app.session.session import Session
from internsp.base.background import in_background
from internsp.errors import MACHINE_ERRNOS, InternspError, MachineError, NotFiniteError
from internsp.failure.objects import Objects
from internsp.optim.finite import NotFinite
from internsp.optim.slices import Slices

THREAD = "checkpoint"


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
        self._saving: Generator[Future[Any] | None, float, Path] | None = None
        self._awaited: Future[Any] | None = None  # this rank's part of the save's current phase
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
            memory = Objects().here(lambda: torch.empty(plan.nbytes, dtype=torch.uint8))
            if self._session.mesh.rank == 0:
                self._session.source.fingerprint  # noqa: B018 - computed now, not at a save
                tensors = {name: one.model_dump(mode="json") for name, one in plan.tensors.items()}
                self._tensors = canonical(tensors)
            self._planned = plan, memory
        return self._planned

    def start(self, step: int, sequences: int, tokens: int = 0) -> None:
        """Copy the state after ``step`` finished steps to host memory and start to write it.

        Blocks for the copy only. An earlier save must have ended (:meth:`finish`).

        Args:
            sequences: rows of the training text used so far.
            tokens: tokens of those rows that the loss counted.
        """
        assert self._saving is None, "never two at once"
        saving = self._save(step, sequences, tokens)
        self._awaited = next(saving)
        self._saving = saving

    def progress(self) -> float:
        """1 if this rank's part of the save's current phase is done; to be summed over ranks."""
        return float(self._awaited is not None and self._awaited.done())

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
        saving, self._saving, self._awaited = self._saving, None, None
        if saving is None:
            return None
        try:
            self._awaited = saving.send(done)
        except StopIteration as end:
            path: Path = end.value
            return path
        self._saving = saving
        return None

    def finish(self) -> Path | None:
        """Wait until the current save has become a checkpoint; raises as :meth:`advance`."""
        pause = 0.001
        while self._saving is not None:
            # Polled: no rank waits in one collective for as long as another rank writes.
            try:
                done = sum(Objects().gather(self.progress()))
            except BaseException:
                self.close()
                raise
            if path := self.advance(done):
                return path
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return None

    def close(self) -> None:
        """Give up a save that is not committed, and remove what it wrote. No communication."""
        saving, self._saving, self._awaited = self._saving, None, None
        if saving is not None:
            saving.close()

    def _save(
        self, step: int, sequences: int, tokens: int
    ) -> Generator[Future[Any] | None, float, Path]:
        """A save from its beginning to its end. It yields what this rank waits for, and is sent
        how many ranks have it; closed in between, or at an error, it removes what it wrote."""
        session, (plan, memory) = self._session, self.prepare()
        final = folder_of(self._folder, step)
        self._attempts += 1
        partial = partial_of(final, f"{self._token}-{self._attempts}")
        tensors, own = state_of(session)
        plan.fill(memory, tensors)
        # Not checked: buffers, which may hold values that are not finite, as masks do.
        plain = [name for name, value in tensors.items() if not isinstance(value, DTensor | Slices)]
        del tensors  # a program may replace them meanwhile
        scaler, given_up = session.optimizer.loss_scaler, threading.Event()
        scale = None if scaler is None else scaler.state_dict()

        def write() -> tuple[dict[str, Any], list[str]]:
            names = dict.fromkeys(parameter_of(n) for n in plan.not_finite(memory, plain))
            return write_part(partial, plan.file, memory.numpy().data, given_up), list(names)

        work = in_background(write, THREAD)
        try:
            while (yield work) < session.mesh.world_size:
                pass
            found = Objects().on_every(lambda: (plan.file, *self._result(work, final), own))
            broken = {rank: names for rank, (_, _, names, _) in enumerate(found) if names}
            if broken:
                names = tuple(dict.fromkeys(name for names in broken.values() for name in names))
                raise NotFiniteError(
                    f"weights or optimizer state are {NotFinite(names, tuple(broken))}: no "
                    f"checkpoint of step {step} is written"
                )
        except BaseException:
            given_up.set()
            self._wait_for(work)
            with contextlib.suppress(OSError):
                (partial / plan.file).unlink(missing_ok=True)
                partial.rmdir()  # succeeds on the last rank
            raise
        kept, place = session.config.checkpoint, secrets.token_hex(16)

        def commit() -> None:
            whole = Manifest(
                step=step, run=self._run, mesh=session.mesh.shape.degrees(),
                config=session.config.model_dump(mode="json"),
                data=position_of(session, sequences, tokens), loss_scaler=scale,
                values={}, tensors={}, files={},
            ).model_dump(mode="json")  # fmt: skip
            whole |= {"files": {name: record for name, record, _, _ in found}, "tensors": place}
            whole["values"] = {k: v for _, _, _, values in found for k, v in values.items()}
            require_seen(partial, whole["files"])
            # Spliced in as text: making the table of tensors anew would hold up training.
            text = canonical(whole).replace(f'"{place}"', self._tensors)
            publish(partial, final, text, kept.keep_last, kept.keep_every)

        committed = in_background(commit, THREAD) if session.mesh.rank == 0 else None
        try:
            while (yield committed) < 1:
                pass
            Objects().on_first(lambda: self._result(committed, final))
        except BaseException:
            if committed is not None:  # the only rank that still used it
                self._wait_for(committed)
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return final

    def _result(self, work: Future[Any] | None, final: Path) -> Any:
        """What a thread of this rank has returned.

        Raises:
            MachineError: the machine lacks a resource (disk space).
            InternspError: another failure.
        """
        assert work is not None, "only asked where it was begun"
        try:
            return work.result()
        except Exception as error:
            lacks = isinstance(error, OSError) and error.errno in MACHINE_ERRNOS
            what = f"checkpoint {final} was not saved: rank {self._session.mesh.rank}"
            kind = MachineError if lacks else InternspError
            raise kind(f"{what}: {type(error).__name__}: {error}") from error

    def _wait_for(self, work: Future[Any]) -> None:
        """Wait for a thread, but not for a disk that hangs: it must not hold up this rank's end."""
        wait([work], timeout=self._session.config.parallel.timeout_seconds)
