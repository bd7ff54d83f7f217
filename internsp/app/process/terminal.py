"""Text for the stream that a command writes to: a terminal, a notebook, a pipe or a file."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

_PIPE = 160  # columns of output to no terminal, unless COLUMNS is set


def shows_escapes(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether to write escape sequences to ``stream``, a terminal that shows them.

    False with NO_COLOR or TERM=dumb, and in a notebook, which gives its commands a terminal but
    shows their output as plain text.
    """
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb" or "JPY_PARENT_PID" in environ:
        return False
    return stream.isatty()


def terminal_width(stream: TextIO) -> int | None:
    """Value of COLUMNS, else the width of ``stream``'s terminal; ``None`` if it is no terminal."""
    width = os.environ.get("COLUMNS", "")
    if width.isdigit() and int(width):
        return int(width)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError, AttributeError):
        return None


def console() -> Console:
    """A console on standard output for tables and text; a pipe gets unbroken lines."""
    width = terminal_width(sys.stdout)
    return Console(
        soft_wrap=not sys.stdout.isatty(),
        highlight=False,
        width=width or _PIPE,
        force_terminal=None if shows_escapes(sys.stdout, os.environ) else False,
    )


def wrap(text: str, stream: TextIO) -> str:
    """``text`` wrapped between words to the width of a terminal.

    A word longer than a line (a path) is not broken; text for a pipe or a file is unchanged.
    """
    width = terminal_width(stream) if stream.isatty() else None
    if width is None:
        return text
    lines = []
    for line in text.split("\n"):
        begin = line[: len(line) - len(line.lstrip(" |"))]
        lines += textwrap.wrap(
            line, width, subsequent_indent=begin if "|" in begin else begin + "  ",
            expand_tabs=False, replace_whitespace=False, break_long_words=False,
            break_on_hyphens=False,
        ) or [line]  # fmt: skip
    return "\n".join(lines)


def printable(text: str) -> str:
    """``text`` without control characters (an untrained model may emit escape sequences)."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def write_lines(text: str, stream: TextIO) -> None:
    """Write ``text``, wrapped to the terminal, and flush."""
    stream.write(wrap(text, stream) + "\n")
    stream.flush()


class FittingTable(Table):
    """A table that prints one line for each cell if the terminal is too narrow for its columns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render as a table, or as lines if cells would be truncated."""
        drawn = list(super().__rich_console__(console, options))
        if not any("…" in getattr(part, "text", "") for part in drawn):
            yield from drawn
            return
        yield str(self.title)
        names = [str(column.header) for column in self.columns]
        cells = ([str(c).replace("\n", ", ") for c in column.cells] for column in self.columns)
        for first, *others in zip(*cells, strict=True):
            yield f"  {names[0]}: {first}"
            yield from (f"    {n}: {c}" for n, c in zip(names[1:], others, strict=True))
