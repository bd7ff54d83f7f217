"""A log of each rank in its run's folder: what the rank did, how it ended, and where it was last.

The first line of the file says where the rank is: its step and the collective that it launched
last. It is memory that the kernel writes to the file, so that a launch costs no system call and the
line outlives a rank that is killed.
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
_WIDTH = 240  # bytes of the first line, its end included
_STEP_AT, _STEP_WIDTH = 24, 12
_LAUNCH_AT = _STEP_AT + _STEP_WIDTH
_SPELLED = {"AG": "all-gather", "RS": "reduce-scatter", "EX": "sum between replicas",
            "PUBLISH": "all-gather of new values", "MATRIX": "matrices to or from their owners"}
_LINE = re.compile(r"process (\d+) *step (\d+|-) *(?:, last collective: (.+?))? *$")


def path_of(output: Path, rank: int) -> Path:
    """Where the log of a rank lies."""
    return output / FOLDER / f"rank-{rank:05d}.log"


class RankLog:
    """Written by one rank, of which one attempt after another appends to the file.

    Args:
        output: the run's folder.
    """

    def __init__(self, output: Path, rank: int) -> None:
        self.path = path_of(output, rank)
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
        self._texts: dict[tuple[str, str, str], bytes] = {}
        self._dumps = not faulthandler.is_enabled()
        if self._dumps:  # of an interpreter that dies: where each of its threads was
            faulthandler.enable(self._file)
        self.write(f"rank {rank}, process {os.getpid()} on {socket.gethostname()}")

    def write(self, text: str) -> None:
        """Append a line, with the time before it."""
        self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        self._file.flush()

    def failed(self, error: BaseException) -> None:
        """Append what has ended the run here."""
        self.write("failed\n" + "".join(traceback.format_exception(error)).rstrip())

    def at(self, step: int) -> None:
        """Step ``step`` (from 1) begins."""
        self._line[_STEP_AT:_LAUNCH_AT] = f"step {step}".ljust(_STEP_WIDTH).encode()

    def launched(self, kind: str, what: str, phase: str) -> None:
        """A collective is about to be launched; called for each one of a step."""
        key = kind, what, phase
        text = self._texts.get(key)
        if text is None:
            said = f", last collective: {_SPELLED.get(kind, kind)} of {what} ({phase})"
            width = _WIDTH - 1 - _LAUNCH_AT
            text = self._texts[key] = said.encode("ascii", "replace")[:width].ljust(width)
        self._line[_LAUNCH_AT:_WIDTH - 1] = text

    def close(self) -> None:
        """Once more is fine."""
        if self._dumps and faulthandler.is_enabled():
            faulthandler.disable()
        self._dumps = False
        with contextlib.suppress(OSError):  # a full disk
            self._file.close()


@dataclass(frozen=True)
class LastSeen:
    """What the first line of a log says.

    Attributes:
        process: of the rank.
        step: that it was at; 0: before its first.
        collective: that it launched last, in words; empty: none.
    """

    process: int
    step: int
    collective: str

    def __str__(self) -> str:
        where = f"step {self.step}" if self.step else "before its first step"
        return f"{where}, last collective: {self.collective or 'none'}"


def last_seen(path: Path) -> LastSeen | None:
    """Read where a rank was; ``None``: there is no such log."""
    try:
        with path.open("rb") as file:
            match = _LINE.fullmatch(file.read(_WIDTH - 1).decode("ascii", "replace"))
    except OSError:
        return None
    if match is None:
        return None
    step = 0 if match[2] == "-" else int(match[2])
    return LastSeen(int(match[1]), step, match[3] or "")
