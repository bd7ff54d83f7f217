"""What is known of the place that a command writes to: a terminal, a notebook, a pipe or a file."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

_PIPE = 160  # columns of what is written to no terminal, where nothing else is said


def draws(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether ``stream`` is a terminal that shows escape sequences, and is to be sent any.

    Not where NO_COLOR or TERM=dumb object, nor below a notebook, which gives its commands a
    terminal and shows what they write as a text.
    """
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb" or "JPY_PARENT_PID" in environ:
        return False
    return stream.isatty()


def columns(stream: TextIO) -> int | None:
    """Width of the terminal behind ``stream``, or what COLUMNS says; ``None``: there is none."""
    said = os.environ.get("COLUMNS", "")
    if said.isdigit() and int(said):
        return int(said)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError, AttributeError):
        return None


def console() -> Console:
    """Standard output for tables and text, of which a pipe gets every line unbroken."""
    width = columns(sys.stdout)
    return Console(
        soft_wrap=not sys.stdout.isatty(),
        highlight=False,
        width=width or _PIPE,
        force_terminal=None if draws(sys.stdout, os.environ) else False,
    )


def fitted(text: str, stream: TextIO) -> str:
    """``text`` broken between words for a terminal; what is longer than a line (a path) stays
    whole, and so does all that goes elsewhere."""
    width = columns(stream) if stream.isatty() else None
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


def harmless(text: str) -> str:
    """``text`` without control characters (an untrained model may emit escape sequences)."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def say(text: str, stream: TextIO) -> None:
    """Write lines for a person, at once."""
    stream.write(fitted(text, stream) + "\n")
    stream.flush()


class FittingTable(Table):
    """A table that is laid out as lines, one a cell, where it is too wide to be read."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render it in the one form or the other."""
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
