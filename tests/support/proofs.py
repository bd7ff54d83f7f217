"""Finds the tests that tables of documents cite: ``ranks/test_x`` or ``ranks/test_x::test_y``."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

TESTS = Path(__file__).parents[1]
Sources = dict[str, str]  # of test files, by "ranks/test_x"


def sources() -> Sources:
    """The source of every test file."""
    return {
        path.relative_to(TESTS).with_suffix("").as_posix(): path.read_text()
        for path in sorted(TESTS.rglob("test_*.py"))
    }


def tests_of(source: str) -> set[str]:
    """Names of the test functions of a file; helpers that they call do not count."""
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return {node.name for node in functions if node.name.startswith("test_")}


def absent(table: Mapping[str, Iterable[str]], tests: Sources) -> list[str]:
    """An error for each cited test that does not exist."""
    names: dict[str, set[str]] = {}  # parsed once, and only cited files
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
