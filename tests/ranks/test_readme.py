"""The README's example runs unchanged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.support.ranks import run_ranks

README = Path(__file__).parents[2] / "README.md"


def example() -> str:
    """The README's Python block."""
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def losses_of(rank: int, world_size: int, source: str) -> list[float]:
    source = source.replace("    (loss / (", "    losses.append(loss.item())\n    (loss / (")
    variables: dict[str, Any] = {"losses": []}
    exec(compile(source, "README.md", "exec"), variables)
    found: list[float] = variables["losses"]
    return found


def test_the_example_of_the_readme_learns_and_stays_within_25_lines() -> None:
    source = example()
    code = [line for line in source.splitlines() if line.strip()]
    assert len(code) <= 25
    for losses in run_ranks(losses_of, 2, source):
        assert len(losses) == 20
        assert losses[-1] < 0.5 * losses[0]
