"""This rank's end of the process that writes its checkpoints (:mod:`internsp.train.disk`)."""

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

from internsp.cli.lifetime import is_stopped
from internsp.errors import LACKING, InternspError, MachineError
from internsp.train import disk

_LOOK_SECONDS = 1.0


class Writer:
    """A process that takes orders one after the other, and the memory that it shares with us.

    The memory has no name, so that nothing is left of it, however the two end.

    Args:
        nbytes: of the memory; taken from the machine as it is first written to.
        patience: seconds for which the process may be stopped (SIGSTOP); a slow one has all time.

    Attributes:
        memory: uint8; what a ``write`` order writes. Not to be changed while one is under way.
    """

    def __init__(self, nbytes: int, patience: float = math.inf) -> None:
        self._patience, self._stopped_at = patience, math.inf
        handle = _unnamed(nbytes)
        try:
            self._mapped = mmap.mmap(handle, nbytes)
            self.memory = torch.frombuffer(self._mapped, dtype=torch.uint8)
            # -I: neither the folder it lies in nor the environment decides what it imports.
            command = [sys.executable, "-I", str(Path(disk.__file__)), str(handle), str(nbytes)]
            self._process = subprocess.Popen(
                [*command, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # or select would not see an answer that was read with the one before
                pass_fds=[handle],
                start_new_session=True,  # a signal to this rank's group is not for it
            )
        finally:
            os.close(handle)

    def order(self, what: str, **details: Any) -> None:
        """Have the process do one of ``disk._Orders``; the answer comes by :meth:`answer`."""
        assert self._process.stdin is not None, "made with a pipe"
        try:
            self._process.stdin.write(json.dumps({"do": what, **details}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: answer() says so

    @property
    def answered(self) -> bool:
        """Whether :meth:`answer` would not wait."""
        assert self._process.stdout is not None, "made with a pipe"
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def answer(self) -> dict[str, Any]:
        """Of the oldest order that has none yet. Blocks, but not for a process that is stopped.

        Raises:
            MachineError: the machine lacks what it takes (room on the disk).
            InternspError: anything else has failed, or the process has ended or is stopped.
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
            kind = MachineError if found["errno"] in LACKING else InternspError
            raise kind(found["error"])
        return found

    def require_running(self) -> None:
        """Raise where the process has been stopped for longer than it may be; Linux only.

        Raises:
            InternspError: nothing will come from it.
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
        """End the process, after the order that it is at or (``kill``) at once."""
        if kill:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "made with pipes"
            pipe.close()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_SECONDS)
                return
            if is_stopped(self._process.pid):  # it would stay for as long as this process waits
                self._process.kill()


def _unnamed(nbytes: int) -> int:
    """A handle of memory that has no name in any file system."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("internsp checkpoint", os.MFD_CLOEXEC)
    else:  # macOS
        handle, name = tempfile.mkstemp()
        os.unlink(name)
    os.ftruncate(handle, nbytes)
    return handle
