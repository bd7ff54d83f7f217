"""Text for the stream that a command writes to: a terminal, a notebook, a pipe or a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console

_PIPE = 160  # columns of output to no terminal, unless COLUMNS is set


def shows_escapes(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether to write escape sequences to ``stream``, a terminal that shows them.

    False with NO_COLOR or TERM=dumb, and in a notebook, which gives its commands a terminal but
    shows their output as plain text.
    """
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb" or "JPY_PARENT_PID" in environ:
        return False
    return stream.isatty()


def console() -> Console:
    """A console on standard output for tables and text; a pipe gets unbroken lines."""
    terminal = sys.stdout.isatty()
    return Console(
        soft_wrap=not terminal,
        highlight=False,
        width=None if terminal or "COLUMNS" in os.environ else _PIPE,
        force_terminal=None if shows_escapes(sys.stdout, os.environ) else False,
    )


def printable(text: str) -> str:
    """``text`` without control characters (an untrained model may emit escape sequences)."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def discard(stream: TextIO) -> None:
    """Let what ``stream`` has buffered, and what it will get, go nowhere: nothing reads it."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def write_lines(text: str, stream: TextIO) -> None:
    """Write ``text`` and a newline, and flush. What the encoding lacks (a log in ASCII) becomes ?.

    Raises:
        OSError: it cannot be written; of a pipe, BrokenPipeError.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
    stream.flush()
