"""Injects faults at counted file operations of a process, or of one of its threads.

An operation changes the file system below one folder: opening to write, each write, flush to disk,
rename, removal, link. It is counted where Python's ``os`` and ``io`` are called, so that the
library needs no hook. Imports neither torch nor internsp.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

WRITER = "checkpoint"
"""Name of the thread of a rank that writes checkpoints (``internsp.app.checkpoint.saver``)."""
FATAL = ("kill", "stop", "raise", "full", "leave")
Hit = Callable[[], None]
_open, _write = os.open, os.write  # the original functions, not counted


class Injected(RuntimeError):
    """A fault that was injected on purpose."""


def tell(log: str, **said: Any) -> None:
    """Append one line to the campaign's log with a single write."""
    line = json.dumps({"at": time.monotonic(), "pid": os.getpid(), **said}) + "\n"
    handle = _open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        _write(handle, line.encode())
    finally:
        os.close(handle)


def do(fault: dict[str, Any], log: str) -> None:
    """Inject ``fault`` into this process."""
    kind = fault["kind"]
    tell(log, fault=fault["id"])
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "leave":
        os._exit(0)
    elif kind == "raise":
        raise Injected(f"fault {fault['id']}")
    elif kind == "delay":
        time.sleep(fault["seconds"])
    elif kind == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    else:  # a signal by its name, to this process
        os.kill(os.getpid(), getattr(signal, kind))


class Counter:
    """Counts the points of one kind that a process reaches, and injects its faults there."""

    def __init__(self, faults: list[dict[str, Any]], log: str) -> None:
        self._faults, self._log = faults, log
        self.count = 0

    def around(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Perform ``call`` as the next point."""
        self.count += 1
        here = [fault for fault in self._faults if fault["n"] == self.count]
        for fault in here:
            if fault["when"] == "before":
                do(fault, self._log)
        result = call(*args, **options)
        for fault in here:
            if fault["when"] == "after":
                do(fault, self._log)
        return result


class _File:
    """A file open for writing, whose writes are counted; a full disk accepts half of one first."""

    def __init__(self, file: Any, files: Files) -> None:
        self._file, self._files = file, files

    def write(self, data: Any) -> int:
        """A counted write."""
        return self._files.write(self._file, data)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Files(Counter):
    """Counts operations below ``folder``. Once the disk is full, it stays full for this counter.

    Args:
        writer: count those of the thread that writes checkpoints, not those of all others; both,
            if it is ``None``.
    """

    def __init__(
        self, faults: list[dict[str, Any]], log: str, folder: str, writer: bool | None = None
    ) -> None:
        super().__init__(faults, log)
        self._writer = writer
        self._folder = os.path.realpath(folder)
        self._full = False

    def install(self) -> None:
        """Start counting in this process."""
        for name in ("rename", "replace", "unlink", "mkdir", "rmdir", "symlink", "fsync", "open"):
            setattr(os, name, self._counted(getattr(os, name), name))
        io.open = builtins.open = self._opened(io.open)

    def _ours(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        if self._writer not in (None, threading.current_thread().name == WRITER):
            return False
        if name == "fsync":
            path = os.readlink(f"/proc/self/fd/{args[0]}")
        elif name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return False
        elif options.get("dir_fd") is not None:
            path = os.readlink(f"/proc/self/fd/{options['dir_fd']}")
        else:
            path = os.path.abspath(args[1 if name == "symlink" else 0])
        return path == self._folder or path.startswith(self._folder + os.sep)

    def _counted(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if not self._ours(name, args, options):
                return call(*args, **options)
            if self._full and name in ("mkdir", "symlink"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.around(call, *args, **options)

        return counted

    def _opened(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wxa+"):
                return call(file, mode, *args, **options)
            if not self._ours("", (os.fspath(file),), {}):
                return call(file, mode, *args, **options)
            return _File(self.around(call, file, mode, *args, **options), self)

        return opened

    def write(self, file: Any, data: Any) -> int:
        """One write of a file."""
        try:
            if self._full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.around(file.write, data)
        except OSError as error:
            if error.errno == errno.ENOSPC and not self._full:
                self._full = True
                file.write(data[: len(data) // 2])
            raise


def files_of(plan: dict[str, Any], point: str) -> Files:
    """The counter of a rank's operations: those that write checkpoints (``writer``), or others."""
    faults = [fault for fault in plan["faults"] if fault["point"] == point]
    return Files(faults, plan["log"], plan["folder"], point == "writer")


def started(pid: int) -> str:
    """The start time of a process, to recognize reused process ids; empty: it has ended."""
    try:
        with _read(f"/proc/{pid}/stat") as file:
            words = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[0] == "Z" else words[19]


_read = io.open
