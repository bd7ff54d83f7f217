"""A log file of each rank in the run's folder: what the rank did, how it ended, its last position.

The first line of the file holds the rank's step and the collective that it launched last. The line
is mapped memory that the kernel writes to the file, so that recording a launch needs no system call
and the line survives a rank that is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import re
import socket
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO

FOLDER = "logs"
_WIDTH = 240  # bytes of the first line, with its newline
_STEP_AT, _STEP_WIDTH = 24, 12
_LAUNCH_AT = _STEP_AT + _STEP_WIDTH
_DESCRIPTIONS = {
    "AG": "all-gather",
    "RS": "reduce-scatter",
    "EX": "sum between replicas",
    "PUBLISH": "all-gather of new values",
    "MATRIX": "matrices to or from their owners",
}
_LINE = re.compile(r"process (\d+) *step (\d+|-) *(?:, last collective: (.+?))? *$")


def log_path(output: Path, rank: int) -> Path:
    """Path of a rank's log in the run's folder ``output``."""
    return output / FOLDER / f"rank-{rank:05d}.log"


class RankLog:
    """The log of one rank; each attempt of the run appends to the same file.

    Args:
        output: the run's folder.
    """

    def __init__(self, output: Path, rank: int) -> None:
        self.path = log_path(output, rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = self.path.open("a", encoding="utf-8", errors="replace")
        first = f"process {os.getpid()}".ljust(_STEP_AT) + "step -"
        line = first.ljust(_WIDTH - 1).encode() + b"\n"
        if not os.fstat(self._file.fileno()).st_size:
            self._file.write(line.decode())
            self._file.flush()
        with self.path.open("r+b") as file:
            self._line = mmap.mmap(file.fileno(), _WIDTH)
        self._line[:] = line
        self._dumps_tracebacks = not faulthandler.is_enabled()
        if self._dumps_tracebacks:  # if the interpreter crashes: the traceback of each thread
            faulthandler.enable(self._file)
        self.write(f"rank {rank}, process {os.getpid()} on {socket.gethostname()}")

    def write(self, text: str) -> None:
        """Append a line that starts with the time."""
        self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        self._file.flush()

    def write_failure(self, error: BaseException) -> None:
        """Append the traceback of the error that ended the run on this rank."""
        self.write("failed\n" + "".join(traceback.format_exception(error)).rstrip())

    def begin_step(self, step: int) -> None:
        """Record that step ``step`` (from 1) begins."""
        self._line[_STEP_AT:_LAUNCH_AT] = f"step {step}".ljust(_STEP_WIDTH).encode()

    def record_launch(self, kind: str, what: str, phase: str) -> None:
        """Record a collective that is about to be launched; called for each one of a step."""
        words = f", last collective: {_DESCRIPTIONS.get(kind, kind)} of {what} ({phase})"
        width = _WIDTH - 1 - _LAUNCH_AT
        self._line[_LAUNCH_AT : _WIDTH - 1] = words.encode("ascii", "replace")[:width].ljust(width)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._dumps_tracebacks and faulthandler.is_enabled():
            faulthandler.disable()
        self._dumps_tracebacks = False
        with contextlib.suppress(OSError):  # a full disk
            self._file.close()


@dataclass(frozen=True)
class LastSeen:
    """The content of a log's first line.

    Attributes:
        process: process id of the rank.
        step: the step that the rank was in; 0 before its first.
        collective: description of the collective that it launched last; empty if none.
    """

    process: int
    step: int
    collective: str

    def __str__(self) -> str:
        where = f"at step {self.step}" if self.step else "before its first step"
        return f"{where}, last collective: {self.collective or 'none'}"


def last_seen(path: Path) -> LastSeen | None:
    """Read the first line of a log; ``None`` if the file is missing or has no such line."""
    match = None
    with contextlib.suppress(OSError), path.open("rb") as file:
        match = _LINE.fullmatch(file.read(_WIDTH - 1).decode("ascii", "replace"))
    if match is None:
        return None
    step = 0 if match[2] == "-" else int(match[2])
    return LastSeen(int(match[1]), step, match[3] or "")
