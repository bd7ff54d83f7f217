"""The count of lines: every line is one of code, docstring, comment and blank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.count_lines import Count, count, main

SOURCE = '''"""Of a module,

of three lines."""

# Alone.
LIMIT = 3  # beside code
"""Of a value."""


class Kind:
    text = "# no comment"

    def call(self) -> str:
        """Of a function."""
        return """not a
docstring"""
'''


def test_every_line_is_counted_once_as_what_it_is() -> None:
    found = count(SOURCE)
    assert found == Count(
        files=1, lines=16, code=6, docstrings=5, comments=1, remarks=2, classes=1, functions=1
    )
    blank = SOURCE.replace("of three lines", "").splitlines().count("") - 1  # one in a docstring
    assert found.lines == found.code + found.docstrings + found.comments + blank


def test_folders_are_summed_and_nothing_to_count_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "inner").mkdir()
    for name in "a.py", "inner/b.py", "inner/c.py":
        (tmp_path / name).write_text("x = 1\n")
    assert main([str(tmp_path), "--folders"]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [["a.py", "1", "1"], ["inner", "2", "2"], ["all", "3", "3"]]
    assert main([str(tmp_path / "none")]) == 2
    assert "no Python files" in capsys.readouterr().err
