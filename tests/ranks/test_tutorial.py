"""The tutorial, followed literally: its files are written, its commands run, its output compared.

Every page has a separate folder, into which it may copy another page's file. In a ``console`` block
the lines that begin with ``$`` are commands, and the lines below are a part of their output: each
must match a printed line, in this order (outputs of several commands may mix, so matches need not
be consecutive). ``...`` matches any text, a decimal number one within five percent, and a number of
MiB half to twice as many.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.shell import commands

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs" / "tutorial").glob("*.md") if path.stem != "index")
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COPIED = re.compile(r"\]\((\w+\.md)\): copy its `([\w.]+)`")
VARIES = re.compile(r"\.\.\.|\d+\.\d+(?:e[+-]\d+)?|\d+(?= MiB)")


def commands_of(console: str) -> list[tuple[str, list[str]]]:
    """Each command of a block, and the lines shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in console.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def says(shown: str, printed: str) -> bool:
    """Whether a printed line matches a line of the page."""
    figures = [(m.group(), shown[m.end() :]) for m in VARIES.finditer(shown)]
    wanted = "".join(
        re.escape(text) + (mark and ("(.*)" if mark == "..." else r"([\d.e+-]+)"))
        for text, mark in zip(VARIES.split(shown), [*(f for f, _ in figures), ""], strict=True)
    )
    match = re.fullmatch(wanted, printed.rstrip())
    return match is not None and all(
        figure == "..." or close(float(figure), found, 2.0 if rest.startswith(" MiB") else 1.05)
        for (figure, rest), found in zip(figures, match.groups(), strict=True)
    )


def close(shown: float, found: str, factor: float) -> bool:
    """Whether two figures differ by no more than a factor, or one unit of the third digit."""
    return shown / factor - 1e-3 <= float(found) <= shown * factor + 1e-3


def missing(shown: list[str], printed: str) -> str | None:
    """The first shown line that does not follow in order."""
    lines = iter(printed.splitlines())
    for line in shown:
        if line != "..." and not any(says(line, one) for one in lines):
            return line
    return None


# Other tests run these two with smaller sizes: agents that restart ranks (test_elastic), plans of
# the longest sequence (tools/test_longest).
LONG = {"failure", "long_sequence"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            marks=(pytest.mark.thorough if page.stem in LONG else pytest.mark.slow)(30),
            id=page.stem,
        )
        for page in PAGES
    ],
)
def test_a_page_of_the_tutorial_does_what_it_says(page: Path, tmp_path: Path) -> None:
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in launched}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    with commands() as names:
        environment["PATH"] = f"{names}{os.pathsep}{environment['PATH']}"
        ran = follow(page, tmp_path, environment)
    assert ran >= 2


def follow(page: Path, folder: Path, environment: dict[str, str]) -> int:
    """Write a page's files, run its commands; returns the number of commands."""
    ran = 0
    for other, name in COPIED.findall(page.read_text()):
        for _, title, body in BLOCK.findall(page.with_name(other).read_text()):
            if title == name:
                (folder / name).write_text(body)
    for language, title, body in BLOCK.findall(page.read_text()):
        if title:
            (folder / title).write_text(body)
        for command, shown in commands_of(body) if language == "console" else ():
            done = subprocess.run(
                command, shell=True, cwd=folder, env=environment, timeout=600, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            assert done.returncode == 0, f"$ {command}\n{done.stdout}"
            absent = missing(shown, done.stdout)
            assert absent is None, f"$ {command}\nhas not printed: {absent}\n{done.stdout}"
            ran += 1
    return ran


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("loss 2.179", "loss 2.180", True),
        ("loss 2.179", "loss 2.379", False),
        ("loss 2.179, norm 0.40", "loss 2.179, norm 0.50", False),
        ("step 20", "step 21", False),
        ("memory 117 MiB", "memory 150 MiB", True),
        ("memory 117 MiB", "memory 300 MiB", False),
        ("step ... of run 4", "step 17 of run 4", True),
        ("loss 5.5451  lr ...", "loss 5.5456  lr 1e-5", True),
        ("loss 5.5451  lr ...", "loss 5.8456  lr 1e-5", False),
        ("rank 1 was killed", "rank 0 was killed", False),
    ],
)
def test_lines_are_compared_by_their_figures(shown: str, printed: str, same: bool) -> None:
    assert says(shown, printed) is same


def test_lines_are_found_in_their_order_alone() -> None:
    assert missing(["a", "...", "c"], "a\nb\nc") is None
    assert missing(["c", "a"], "a\nb\nc") == "a"
    assert commands_of("$ one\na\nb\n$ two\n") == [("one", ["a", "b"]), ("two", [])]
