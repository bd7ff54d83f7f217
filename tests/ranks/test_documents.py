"""The Python blocks of documents run unchanged, on ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.support.ranks import ranks

DOCS = Path(__file__).parents[2] / "docs"


def blocks(name: str) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)
    assert found, f"{name} has no Python"
    return found


@ranks(2)
def test_the_examples_of_whole_parameters_run(tmp_path: Path) -> None:
    variables: dict[str, Any] = {"folder": tmp_path}
    for number, block in enumerate(blocks("whole_parameters.md")):
        exec(compile(block, f"whole_parameters.md, block {number}", "exec"), variables)


@ranks(4)
def test_the_mesh_of_a_loop_of_ones_own_is_made_of_a_device_mesh() -> None:
    variables: dict[str, Any] = {}
    for number, block in enumerate(blocks("own_loop.md")):
        exec(compile(block, f"own_loop.md, block {number}", "exec"), variables)
    assert (variables["mesh"].weight, variables["mesh"].replicas) == (2, 2)
