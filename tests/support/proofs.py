"""Tests that tables of documents name as proofs, ``ranks/test_x`` or ``ranks/test_x::test_y``."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

TESTS = Path(__file__).parents[1]
Sources = dict[str, str]  # of test files, by "ranks/test_x"


def sources() -> Sources:
    """Every test file, unparsed."""
    return {
        path.relative_to(TESTS).with_suffix("").as_posix(): path.read_text()
        for path in sorted(TESTS.rglob("test_*.py"))
    }


def tests_of(source: str) -> set[str]:
    """Names of the tests of a file; what they call is none."""
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return {node.name for node in functions if node.name.startswith("test_")}


def absent(table: Mapping[str, Iterable[str]], tests: Sources) -> list[str]:
    """What is said of each row's proofs that are not there."""
    names: dict[str, set[str]] = {}  # parsed once, and only what is named
    found = []
    for row, proofs in table.items():
        for proof in proofs:
            file, _, name = proof.partition("::")
            if file not in tests:
                found.append(f"{row}: there is no tests/{file}.py")
            elif name:
                if file not in names:
                    names[file] = tests_of(tests[file])
                if name not in names[file]:
                    found.append(f"{row}: tests/{file}.py has no {name}")
    return found
