"""Tables and facts: for the terminal, for a page between its marks, and as a file."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.bench.options import Options


def say(message: object) -> None:
    """Print progress, without times."""
    print(message, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Table:
    """Rows of text, the header first; the first column names the rows."""

    rows: Sequence[Sequence[str]]
    title: str = ""
    remarks: Sequence[str] = ()

    def text(self) -> list[str]:
        """The table as lines for the terminal."""
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = [self.title] if self.title else []
        for first, *others in self.rows:
            cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            lines.append("  ".join([first.ljust(widths[0]), *cells]))
        return [*lines, "", *self.remarks, ""]

    def markdown(self) -> list[str]:
        """The table as lines of Markdown."""
        lines = [f"### {self.title}", ""] if self.title else []
        lines += markdown_rows(self.rows)
        return [*lines, "", *(f"- {remark}" for remark in self.remarks), ""]


def markdown_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown; the first row is its header."""
    head, *others = (f"| {' | '.join(row)} |" for row in rows)
    return [head, "|---" + "|---:" * (len(rows[0]) - 1) + "|", *others]


@dataclass(frozen=True)
class Page:
    """A benchmark's output: the conditions of the measurement, and tables."""

    facts: Sequence[str]
    tables: Sequence[Table] = field(default_factory=list)

    def text(self) -> str:
        """Text for the terminal."""
        lines = [*self.facts, "", *(line for table in self.tables for line in table.text())]
        return "\n".join(lines).rstrip()

    def markdown(self, command: Iterable[str]) -> str:
        """Markdown for a documentation page; begins with the command."""
        lines = ["```", shlex.join(command), "```", "", *(f"- {fact}" for fact in self.facts), ""]
        lines += [line for table in self.tables for line in table.markdown()]
        return "\n".join(lines).rstrip() + "\n"


def write(
    options: Options, summary: dict[str, Any], page: Page, command: Iterable[str], mark: str
) -> None:
    """Write the files that ``options`` name."""
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(summary, indent=1) + "\n")
    if options.markdown is not None:
        put(options.markdown, mark, page.markdown(command))


def put(path: Path, mark: str, body: str) -> None:
    """Write ``body`` to ``path``: between its marks, else at the end of an existing file.

    The marks are ``<!-- MARK -->`` and ``<!-- /MARK -->``.
    """
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    old = path.read_text() if path.exists() else ""
    if begin in old and end in old:
        before, rest = old.split(begin, 1)
        body = f"{before}{begin}\n{body}{end}{rest.split(end, 1)[1]}"
    elif old:  # a page without marks keeps its text
        body = f"{old.rstrip()}\n\n{begin}\n{body}{end}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(body)
