"""The folder of a run: used by one run at a time, which has an id, and never mixed with another's.

A fresh run moves an older run's folder aside, and so does a run that resumes from a checkpoint in
another folder. A run that resumes from its own folder keeps its id, and moves later checkpoints
aside.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from internsp.app.checkpoint.checkpoint import Resumed
from internsp.app.checkpoint.disk import (
    SEEN_SECONDS,
    abandon_later,
    discard_partial,
    require_seen,
    unused,
)
from internsp.app.process.rank_log import log_path
from internsp.config.words import one_line
from internsp.errors import ConfigError
from internsp.failure.objects import Objects
from internsp.mesh import ParallelMesh

_WRITTEN = ("metrics.jsonl", "checkpoints", "config.toml", "report.html", "report.json")
LOCK, OWNER = "run.lock", "run.owner"


class RunLock:
    """Lets one run at a time use a folder. The operating system frees it however a process ends.

    Args:
        folder: created if missing. ``run.owner`` in it says which process has the lock.
        run: id of the run.

    Raises:
        ConfigError: another process has the lock; the message names it.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, run: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / LOCK)
        owner = folder / OWNER
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            holder = "another process"
            with suppress(OSError):
                holder = one_line(owner.read_text(errors="replace")[:300]) or holder
            raise ConfigError(
                f"{folder} is in use by {holder}; wait until it has ended or stop it, or choose "
                "another train.name or --output"
            ) from None
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        owner.write_text(
            f"process {os.getpid()} on {socket.gethostname()} (run {run}, since {since})"
        )

    def release(self, folder: Path) -> None:
        """Release the lock of ``folder``, its name by now; may be called more than once.

        The lock file stays: who waits for it by name would otherwise lock a file without one.
        """
        if self._lock.is_locked:
            (folder / OWNER).unlink(missing_ok=True)
            self._lock.release()


class RunFolder:
    """A folder to which only this run writes.

    Attributes:
        path: the folder.
        run: the run's id; the same on every rank.
        notes: messages for the user, on rank 0.
    """

    def __init__(self, path: Path, run: str, lock: RunLock | None) -> None:
        self.path = path
        self.run = run
        self.notes: list[str] = []
        self._lock = lock  # on rank 0, else None

    def begin(self, resumed: Resumed | None) -> None:
        """Prepare the folder for writing. Collective.

        Raises:
            ConfigError, OSError: on every rank: another run took the folder meanwhile, files
                cannot be moved, or they are no run's.
        """
        self.run, notes = Objects().on_first(lambda: self._begin(resumed))
        self.notes += notes

    def _begin(self, resumed: Resumed | None) -> tuple[str, list[str]]:
        checkpoints = self.path / "checkpoints"
        discard_partial(checkpoints)
        if resumed and checkpoints.exists() and checkpoints.samefile(resumed.path.parent):
            step, run = resumed.content.step, resumed.content.run
            names, aside = abandon_later(checkpoints, step)
            moved = f"{', '.join(names)} came after step {step}: now in {aside}"
            return run, [moved] if names else []
        moved_to = set_aside(self.path)
        if moved_to is None:
            return self.run, []
        # It has taken its lock along: the new folder has its own.
        assert self._lock is not None, "rank 0 alone runs this, and holds the lock"
        self._lock.release(moved_to)
        self._lock = RunLock(self.path, self.run)
        return self.run, [f"the run that was in {self.path} is now in {moved_to}"]

    def require_shared(self, mesh: ParallelMesh) -> None:
        """Check that rank 0 sees every rank's log here: else no checkpoint is whole. Collective.

        Raises:
            ConfigError: on every rank: it does not.
        """
        logs = [log_path(self.path, rank) for rank in range(mesh.world_size)]
        names, seconds = [log.name for log in logs], min(SEEN_SECONDS, mesh.timeout_seconds / 2)
        Objects().on_first(lambda: require_seen(logs[0].parent, names, seconds))

    def release(self) -> None:
        """Release the folder's lock; may be called more than once."""
        if self._lock is not None:
            self._lock.release(self.path)


@contextmanager
def claimed(path: Path, main: bool) -> Iterator[RunFolder]:
    """Lock the folder ``path`` for this run. Collective when it is entered.

    Args:
        main: whether this is rank 0.

    Raises:
        ConfigError: on every rank: another process uses the folder.
        OSError: on every rank: it cannot be written.
    """
    held: list[RunLock] = []

    def acquire() -> str:
        run = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        held.append(RunLock(path, run))
        return run

    path = _named(path)
    fresh = not path.exists()
    run = Objects().on_first(acquire)
    folder = RunFolder(path, run, held[0] if main else None)
    try:
        yield folder
    finally:
        if main and fresh and set(os.listdir(path)) <= {LOCK, OWNER}:
            shutil.rmtree(path, ignore_errors=True)  # a run that could not start leaves no folder
        folder.release()


def set_aside(output: Path) -> Path | None:
    """Move an older run out of ``output``, so that a fresh one neither overwrites nor joins it.

    Returns:
        The older run's new folder, or ``None`` if there was none.

    Raises:
        ConfigError: no run has used ``output``, and it has files that a run would overwrite; or it
            is the current folder, or above it, and would move with all that the user has there; or
            a disk is mounted there.
    """
    output = _named(output)
    found = [name for name in _WRITTEN if (output / name).exists()]
    # The log comes first: a run that was killed at its start may have nothing else.
    if found and "metrics.jsonl" not in found and not log_path(output, 0).exists():
        raise ConfigError(
            f"{output} has {', '.join(found)}, which no run has written, and would lose it: choose "
            "another train.name or --output"
        )
    if not {"metrics.jsonl", "checkpoints"} & {*found}:
        return None
    if Path.cwd().is_relative_to(output.resolve()) or output.is_mount():
        raise ConfigError(
            f"{output} has an older run and is the current folder or above it, which would be "
            "moved with all its files, or the place of a mounted disk, which cannot be moved: "
            "choose another train.name or --output, or resume the run"
        )
    target = unused(f"{output}.")
    output.rename(target)
    return target


def _named(path: Path) -> Path:
    """``path`` in a form whose last part can be renamed; "." and ".." become absolute paths."""
    return path if path.name not in ("", "..") else Path(os.path.abspath(path))
