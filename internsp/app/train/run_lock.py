"""A lock that lets one run at a time use a folder, and names the process that holds it."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from internsp.config.words import one_line
from internsp.errors import ConfigError

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
