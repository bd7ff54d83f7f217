"""The folder of a run: held by one run at a time, which has an id, and never mixed with another's.

A fresh run moves an older one aside, and so does a run that goes on from another folder's
checkpoint; a run that goes on from its own keeps its id and sets aside what came after.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from internsp.errors import LACKING, ConfigError, MachineError
from internsp.train import checkpoint_folder
from internsp.train.agreement import from_first
from internsp.train.checkpoint import Resumed
from internsp.train.disk import LATEST, discard_partial
from internsp.train.run_lock import RunLock


class RunFolder:
    """A folder that this run alone writes to.

    Attributes:
        path: the folder.
        run: the run's id; the same on every rank.
        notes: what the user should read, on rank 0.
    """

    def __init__(self, path: Path, run: str, lock: RunLock | None) -> None:
        self.path = path
        self.run = run
        self.notes: list[str] = []
        self._lock = lock  # of rank 0
        if lock is not None and lock.predecessor:
            self.notes.append(f"took {path} over from {lock.predecessor}, which has ended")

    def begin(self, resumed: Resumed | None) -> None:
        """Make the folder ready to be written to. Collective.

        Raises:
            ConfigError, OSError: on every rank: another run has come between, or files cannot move.
        """
        self.run, notes = from_first(lambda: self._begin(resumed))
        self.notes += notes

    def _begin(self, resumed: Resumed | None) -> tuple[str, list[str]]:
        checkpoints = self.path / "checkpoints"
        discard_partial(checkpoints)
        if resumed is not None and _same(resumed.path.parent, checkpoints):
            latest = checkpoints / LATEST
            if latest.is_dir() and not latest.is_symlink():  # of a copy that followed links
                raise ConfigError(
                    f"{latest} is a folder, not a link to the newest checkpoint: remove it"
                )
            names, aside = checkpoint_folder.abandon_later(checkpoints, resumed.step)
            if not names:
                return resumed.run, []
            moved = f"{', '.join(names)} came after step {resumed.step}: now in {aside}"
            return resumed.run, [moved]
        moved_to = self._set_aside()
        if moved_to is None:
            return self.run, []
        return self.run, [f"the run that was in {self.path} is now in {moved_to}"]

    def _set_aside(self) -> Path | None:
        """Move an older run away; the lock goes with it, and a new one is taken."""
        assert self._lock is not None, "rank 0 alone runs this, and holds the lock"
        moved = set_aside(self.path)
        if moved is not None:
            self._lock.moved(moved)
            self._lock.release()
            self._lock = RunLock.acquire(self.path, self.run)
        return moved

    def release(self) -> None:
        """Give the folder up; more than once is fine."""
        if self._lock is not None:
            self._lock.release()


@contextmanager
def claimed(path: Path, main: bool) -> Iterator[RunFolder]:
    """Hold ``path`` for this run. Collective at the beginning; ``main`` is rank 0.

    Raises:
        ConfigError: on every rank: another process holds it, or it cannot be written.
        MachineError: on every rank: the disk is full, or the like.
    """
    held: list[RunLock] = []

    def acquire() -> tuple[str, str | None]:
        run = new_id()
        try:
            held.append(RunLock.acquire(path, run))
        except OSError as error:
            kind = MachineError if error.errno in LACKING else ConfigError
            raise kind(
                f"the run's folder {path} cannot be written on rank 0: {error.strerror}; choose "
                "another train.name or --output"
            ) from error
        return run, held[0].predecessor

    path = _named(path)
    fresh = not path.exists()
    run, _ = from_first(acquire)
    folder = RunFolder(path, run, held[0] if main else None)
    try:
        yield folder
    finally:
        folder.release()
        if main and fresh:  # a run that was refused leaves no empty folder
            _remove_if_empty(path)


def new_id() -> str:
    """An id that no other run has: when it began, and chance."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def set_aside(output: Path) -> Path | None:
    """Move an older run out of ``output``, so that a fresh one neither loses nor mixes with it.

    Returns:
        Where the older run is now, or ``None`` when there was none.
    """
    output = _named(output)
    if not (output / "metrics.jsonl").exists() and not (output / "checkpoints").exists():
        return None
    number = 1
    while (target := output.with_name(f"{output.name}.{number}")).exists():
        number += 1
    output.rename(target)
    return target


def _named(path: Path) -> Path:
    """``path`` with a name that can be changed, which "." has not, nor means the same after it."""
    return path if path.name not in ("", "..") else Path(os.path.abspath(path))


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _remove_if_empty(path: Path) -> None:
    with suppress(OSError):
        path.rmdir()
