"""The rank's interface to its writer process (:mod:`internsp.app.checkpoint.disk`)."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from internsp.app.checkpoint import disk
from internsp.app.process.lifetime import is_stopped
from internsp.errors import MACHINE_ERRNOS, InternspError, MachineError

_LOOK_SECONDS = 1.0


class Writer:
    """A process that runs commands one after another, and the memory shared with it.

    The memory has no name, so nothing of it remains, however the two processes end.

    Args:
        nbytes: size of the memory; the machine allocates it when it is first written.
        patience: seconds for which the process may be stopped (SIGSTOP); a slow process has no
            limit.

    Attributes:
        memory: uint8, the content that a ``write`` command writes; must not change until it ends.
    """

    def __init__(self, nbytes: int, patience: float = math.inf) -> None:
        self._patience, self._stopped_at = patience, math.inf
        handle = _unnamed(nbytes)
        try:
            self._mapped = mmap.mmap(handle, nbytes)
            self.memory = torch.frombuffer(self._mapped, dtype=torch.uint8)
            # -I: neither the script's folder nor the environment affects what it imports.
            command = [sys.executable, "-I", str(Path(disk.__file__)), str(handle), str(nbytes)]
            self._process = subprocess.Popen(
                [*command, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # select() does not see an answer that is already in a buffer
                pass_fds=[handle],
                start_new_session=True,  # signals to this rank's process group must not reach it
            )
        finally:
            os.close(handle)

    def order(self, what: str, **details: Any) -> None:
        """Send one of ``disk._Commands`` to the process; :meth:`answer` returns its answer."""
        assert self._process.stdin is not None, "made with a pipe"
        try:
            self._process.stdin.write(json.dumps({"do": what, **details}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended: answer() reports it

    @property
    def answered(self) -> bool:
        """Whether :meth:`answer` would return at once."""
        assert self._process.stdout is not None, "made with a pipe"
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def answer(self) -> dict[str, Any]:
        """The answer to the oldest unanswered command. Blocks, unless the process is stopped.

        Raises:
            MachineError: the machine lacks a resource (disk space).
            InternspError: another failure, or the process has ended or is stopped.
        """
        assert self._process.stdout is not None, "made with a pipe"
        while not select.select([self._process.stdout], [], [], _LOOK_SECONDS)[0]:
            self.require_running()
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise InternspError(f"the process that writes checkpoints ended with status {status}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            kind = MachineError if found["errno"] in MACHINE_ERRNOS else InternspError
            raise kind(found["error"])
        return found

    def require_running(self) -> None:
        """Raise if the process has been stopped for longer than its patience; Linux only.

        Raises:
            InternspError: the process is stopped and will not answer.
        """
        if not is_stopped(self._process.pid):
            self._stopped_at = math.inf
            return
        now = time.monotonic()
        self._stopped_at = min(self._stopped_at, now)
        if now - self._stopped_at > self._patience:
            raise InternspError(
                "the process that writes checkpoints is stopped (SIGSTOP or a debugger), for more "
                f"than {self._patience:g} s (parallel.timeout_seconds)"
            )

    def close(self, kill: bool = False) -> None:
        """End the process, after its current command or (``kill``) at once."""
        if kill:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "made with pipes"
            pipe.close()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_SECONDS)
                return
            if is_stopped(self._process.pid):  # a stopped process would never end by itself
                self._process.kill()


def _unnamed(nbytes: int) -> int:
    """File descriptor of memory that has no name in any file system."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("internsp checkpoint", os.MFD_CLOEXEC)
    else:  # macOS
        handle, name = tempfile.mkstemp()
        os.unlink(name)
    os.ftruncate(handle, nbytes)
    return handle
