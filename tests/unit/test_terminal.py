"""Output fits the terminal that it is written to, and is plain where requested."""

from __future__ import annotations

import io
import os
import pty
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import pytest
from rich.console import Console

from internsp.app.process.terminal import FittingTable, console, shows_escapes, terminal_width, wrap
from internsp.app.report.display import Display, flow
from tests.support.metrics import step


@contextmanager
def terminal(width: int) -> Iterator[TextIO]:
    """The program's end of a terminal."""
    import fcntl
    import termios

    above, below = pty.openpty()
    fcntl.ioctl(below, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
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
    with terminal(40) as stream:
        assert shows_escapes(stream, environ) == wanted
    assert not shows_escapes(io.StringIO(), environ)


def test_the_width_is_what_is_said_or_what_the_terminal_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with terminal(40) as stream:
        assert terminal_width(stream) == 40
        monkeypatch.setenv("COLUMNS", "33")
        assert terminal_width(stream) == terminal_width(io.StringIO()) == 33
        for nothing in ("", "0", "wide"):
            monkeypatch.setenv("COLUMNS", nothing)
            assert (terminal_width(stream), terminal_width(io.StringIO())) == (40, None)


TEXT = (
    "a heading that is longer than thirty columns\n\n  | a quotation  of more than these, too\n"
    "  checkpoint  runs/a/path/that-is-longer-than-a-line/and-stays/whole"
)


def test_lines_are_broken_between_words_on_a_terminal_and_nowhere_else() -> None:
    assert wrap(TEXT, io.StringIO()) == TEXT
    with terminal(30) as stream:
        assert wrap(TEXT, stream).split("\n") == [
            "a heading that is longer than", "  thirty columns", "",
            "  | a quotation  of more than", "  | these, too", "  checkpoint",
            "    runs/a/path/that-is-longer-than-a-line/and-stays/whole",
        ]  # fmt: skip


def rendered(width: int) -> str:
    made = FittingTable(title="Ranks")
    for name in ("rank", "pipeline", "sequence"):
        made.add_column(name)
    made.add_row("0", "1\n2", "3")
    out = io.StringIO()
    Console(file=out, width=width).print(made)
    return out.getvalue()


def test_a_table_that_would_be_cut_is_laid_out_as_lines() -> None:
    assert rendered(24) == "Ranks\n  rank: 0\n    pipeline: 1, 2\n    sequence: 3\n"
    assert "┃ pipeline ┃" in rendered(40)


def test_a_pipe_gets_whole_lines_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    long = "word " * 60
    console().print(long)
    assert capsys.readouterr().out == long + "\n"


def test_figures_stand_side_by_side_as_many_as_fit() -> None:
    assert flow(["loss 5.5", "lr 1e-4", "tokens 12"], 17) == ["loss 5.5  lr 1e-4", "tokens 12"]
    assert flow(["wider than that"], 3) == ["wider than that"]
    assert flow([], 3) == []


@pytest.mark.parametrize("width", [40, 60, 100])
def test_the_live_panel_fits_its_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setenv("COLUMNS", str(width))
    display = Display(123_456, title="a-run-with-a-name", stream=stream, environ={})
    display.start()
    row: dict[str, Any] = {"eval_loss": 2.25, "eval_losses": {"code": 1.5, "a longer name": 3.5}}
    for number in range(1, 70):
        display.update(step(number, **(row if number == 60 else {})))
    assert display._panel is not None
    display._panel.draw()
    plain = Console(file=io.StringIO(), width=width, color_system=None)
    plain.print(*display._panel.get_renderables())
    display.close()
    text = plain.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for shown in ("a-run-with-a-name", "69/123456", "held-out", "a longer name", "3.5000"):
        assert shown in words
