"""A lock file that lets one run at a time use a folder, and names the process that holds it.

The lock is the operating system's (``flock``), which is released when its process ends, in any
way; the next run then takes the file over. NFS has ``flock`` since Linux 2.6.12. On a file system
without ``flock``, process id and host in the file decide whether the folder is in use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from internsp.errors import ConfigError

NAME = "run.lock"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class RunLock:
    """A lock, held from :meth:`acquire` to :meth:`release`.

    Attributes:
        path: the lock file.
        predecessor: describes a previous holder that did not release the lock, else ``None``.
    """

    def __init__(self, path: Path, handle: int, predecessor: str | None) -> None:
        self.path = path
        self.predecessor = predecessor
        self._handle = handle

    @classmethod
    def acquire(cls, folder: Path, run: str) -> RunLock:
        """Lock ``folder`` (created if missing) for ``run``. Does not wait.

        Raises:
            ConfigError: another process holds the lock; the message names it.
            OSError: the folder or the file cannot be created.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / NAME
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                owner = _lock(handle, folder)
                # The previous holder may have removed or moved the file between open and lock.
                if _is_file_at(handle, path):
                    lock = cls(path, handle, _describe(owner) if owner else None)
                    lock._write(run)
                    return lock
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def _write(self, run: str) -> None:
        owner = {
            "run": run,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "started": _started(os.getpid()),
        }
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, json.dumps(owner).encode(), 0)
        os.fsync(self._handle)

    def moved(self, folder: Path) -> None:
        """Note that the locked folder was renamed to ``folder``."""
        self.path = folder / NAME

    def release(self) -> None:
        """Remove the file and release the lock; may be called more than once."""
        if self._handle < 0:
            return
        # Removed while locked: a process that opened it before sees that the path is another file.
        with contextlib.suppress(OSError):
            if _is_file_at(self._handle, self.path):
                self.path.unlink()
        os.close(self._handle)
        self._handle = -1


def _lock(handle: int, folder: Path) -> dict[str, Any]:
    """Lock the file or raise; returns what its previous holder wrote into it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(_refusal(folder, _owner(handle))) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        owner = _owner(handle)
        if owner and _may_live(owner):
            raise ConfigError(_refusal(folder, owner)) from None
        return owner
    return _owner(handle)


def _refusal(folder: Path, owner: dict[str, Any]) -> str:
    return (
        f"{folder} is in use by {_describe(owner)}; wait until it has ended or stop it, or choose "
        f"another train.name or --output (if there is no such process, remove {folder / NAME})"
    )


def _owner(handle: int) -> dict[str, Any]:
    try:
        owner = json.loads(os.pread(handle, 4096, 0))
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _describe(owner: dict[str, Any]) -> str:
    if not owner:
        return "another process"
    pid, host, run, since = (str(owner.get(k))[:80] for k in ("pid", "host", "run", "since"))
    return f"process {pid} on {host} (run {run}, since {since})"


def _may_live(owner: dict[str, Any]) -> bool:
    """Whether the process may still run; of another machine this is unknown, so it may."""
    if owner.get("host") != socket.gethostname():
        return True
    return owner.get("started") == _started(owner.get("pid"))


def _started(pid: Any) -> str | None:
    """Start time of a process of this machine; tells it from a later one with the same id."""
    try:
        if Path("/proc").is_dir():
            # The command's name may hold anything; the 20th word after it is the start time.
            return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[19]
        os.kill(int(pid), 0)
        return "alive"
    except (OSError, ValueError, TypeError, IndexError):
        return None


def _is_file_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False
