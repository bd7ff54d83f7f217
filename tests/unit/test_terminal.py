"""Output is plain where requested, and whole in a pipe and in a narrow terminal."""

from __future__ import annotations

import io
import os
import pty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest
from rich.console import Console

from internsp.app.plan.classes import table
from internsp.app.process.terminal import console, shows_escapes


@contextmanager
def terminal() -> Iterator[TextIO]:
    """The program's end of a terminal."""
    above, below = pty.openpty()
    with os.fdopen(below, "w", encoding="utf-8") as stream:
        yield stream
    os.close(above)


@pytest.fixture(autouse=True)
def _unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, True), ({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False),
        ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"JPY_PARENT_PID": "12"}, False),
    ],
)  # fmt: skip
def test_escape_sequences_go_to_a_terminal_that_wants_them_alone(
    environ: dict[str, str], wanted: bool
) -> None:
    with terminal() as stream:
        assert shows_escapes(stream, environ) == wanted
    assert not shows_escapes(io.StringIO(), environ)


def test_a_table_that_is_too_wide_loses_no_character() -> None:
    out = io.StringIO()
    made = table("Ranks", ("rank", "<pipeline", "sequence"), [(12345, "a-long-name", 3)])
    Console(file=out, width=18).print(made)
    columns = zip(*(line.split("│")[1:4] for line in out.getvalue().splitlines() if "│" in line),
                  strict=True)  # fmt: skip
    assert ["".join("".join(c).split()) for c in columns] == ["12345", "a-long-name", "3"]


def test_a_pipe_gets_whole_lines_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    long = "word " * 60
    console().print(long)
    assert capsys.readouterr().out == long + "\n"
