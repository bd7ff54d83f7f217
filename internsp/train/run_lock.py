"""One run at a time in a folder: a lock file that says who holds it.

The lock is the operating system's (``flock``), which a process cannot leave behind: however a run
ends, the next one gets it, and takes the file over. NFS has had ``flock`` since Linux 2.6.12; where
a file system has none, the file's process and host decide.
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
    """Held from :meth:`acquire` to :meth:`release`.

    Attributes:
        path: the lock file.
        predecessor: what a holder that did not release it was, else ``None``.
    """

    def __init__(self, path: Path, handle: int, predecessor: str | None) -> None:
        self.path = path
        self.predecessor = predecessor
        self._handle = handle

    @classmethod
    def acquire(cls, folder: Path, run: str) -> RunLock:
        """Take ``folder`` (made if need be) for ``run``. Does not wait.

        Raises:
            ConfigError: another process holds it, which the message names.
            OSError: the folder or the file cannot be made.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / NAME
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                owner = _lock(handle, folder)
                # Between open and lock its holder may have removed or moved the file.
                if _is(handle, path):
                    lock = cls(path, handle, _words(owner) if owner else None)
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
        """The locked folder has another name now."""
        self.path = folder / NAME

    def release(self) -> None:
        """Remove the file and give the lock up; more than once is fine."""
        if self._handle < 0:
            return
        # Removed while it is held: who opened it before sees that it is another file.
        with contextlib.suppress(OSError):
            if _is(self._handle, self.path):
                self.path.unlink()
        os.close(self._handle)
        self._handle = -1


def _lock(handle: int, folder: Path) -> dict[str, Any]:
    """Lock the file or raise; returns what its last holder left in it."""
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
        f"{folder} is in use by {_words(owner)}; wait until it has ended or stop it, or choose "
        f"another train.name or --output (if there is no such process, remove {folder / NAME})"
    )


def _owner(handle: int) -> dict[str, Any]:
    try:
        owner = json.loads(os.pread(handle, 4096, 0))
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _words(owner: dict[str, Any]) -> str:
    if not owner:
        return "another process"
    pid, host, run, since = (str(owner.get(k))[:80] for k in ("pid", "host", "run", "since"))
    return f"process {pid} on {host} (run {run}, since {since})"


def _may_live(owner: dict[str, Any]) -> bool:
    """Of another machine nothing is known: it may."""
    if owner.get("host") != socket.gethostname():
        return True
    return owner.get("started") == _started(owner.get("pid"))


def _started(pid: Any) -> str | None:
    """When a process of this machine started, which no other process of its number shares."""
    try:
        if Path("/proc").is_dir():
            # After the command's name, which may hold anything, the 20th word.
            return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[19]
        os.kill(int(pid), 0)
        return "alive"
    except (OSError, ValueError, TypeError, IndexError):
        return None


def _is(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False
