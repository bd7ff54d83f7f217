"""The README's example runs unchanged and prints what the README shows; the README stays short."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from tests.ranks.test_tutorial import commands_of, missing
from tests.support.ranks import run_ranks

README = Path(__file__).parents[2] / "README.md"


def block(language: str) -> str:
    """The README's only block in ``language``."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)
    return str(found)


def printed(rank: int, world_size: int, source: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        exec(compile(source, "README.md", "exec"), {})
    return text.getvalue()


def test_the_example_of_the_readme_prints_what_the_readme_shows() -> None:
    ((command, shown),) = commands_of(block("console"))
    assert command == "torchrun --nproc-per-node 2 own_loop.py"
    assert len(shown) == 4
    first, other = run_ranks(printed, 2, block("python"))
    assert missing(shown, first) is None, first
    assert len(first.splitlines()) == len(shown)
    assert other == ""


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 90
