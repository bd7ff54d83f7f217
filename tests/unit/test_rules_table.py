"""The table of rules in ``internsp/wp/README.md`` cites tests that exist for each rule."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.proofs import Sources, absent, sources

README = Path(__file__).parents[2] / "internsp" / "wp" / "README.md"
RULE = re.compile(r"\bWP-\d+\b")

Table = dict[str, list[str]]  # tests as "ranks/test_x" or "ranks/test_x::test_y", by rule


def table_of(text: str) -> Table:
    """The last column of each row that begins with a rule."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| WP-")]
    return {row[0].split()[0]: re.findall(r"`([^`]+)`", row[-1]) for row in rows}


def cited(source: str) -> set[str]:
    """Rules that docstrings of a file name."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return set(RULE.findall("\n".join(ast.get_docstring(node) or "" for node in nodes)))


def mistakes(table: Table, tests: Sources) -> list[str]:
    """Mismatches between the table and the tests."""
    found = [f"WP-{n} is missing" for n in range(1, len(table) + 1) if f"WP-{n}" not in table]
    found += [f"{rule} has no test" for rule, proofs in table.items() if not proofs]
    found += absent(table, tests)
    for file, source in tests.items():
        for rule in sorted(cited(source)):
            if not any(proof.partition("::")[0] == file for proof in table.get(rule, [])):
                found.append(f"tests/{file}.py is about {rule}, whose row does not name it")
    return found


def test_every_rule_names_tests_that_exist_and_every_test_of_a_rule_is_named() -> None:
    table = table_of(README.read_text())
    assert len(table) >= 14
    assert mistakes(table, sources()) == []


ROW = "| WP-1 bounded | `slots.MemoryPool` | `unit/test_a`, `ranks/test_b::test_c` |\n"
FILES = {
    "unit/test_a": '"""WP-1: a."""',
    "ranks/test_b": '"""b"""\ndef test_c(rank):\n    """As WP-1 says."""',
}


@pytest.mark.parametrize(
    ("text", "files", "mistake"),
    [
        (ROW, FILES, None),
        (ROW.replace("test_a", "test_z"), FILES, "there is no tests/unit/test_z.py"),
        (ROW.replace("test_c", "test_z"), FILES, "tests/ranks/test_b.py has no test_z"),
        (ROW.replace("test_c", "test"), FILES, "tests/ranks/test_b.py has no test"),
        (ROW.replace("`", ""), FILES, "WP-1 has no test"),
        (ROW.replace("WP-1", "WP-2"), FILES, "WP-1 is missing"),
        (ROW, {**FILES, "unit/test_d": '"""d (WP-1)"""'}, "tests/unit/test_d.py is about WP-1"),
        (ROW, {**FILES, "unit/test_d": '"""WP-12"""'}, "tests/unit/test_d.py is about WP-12"),
        (ROW, {**FILES, "unit/test_d": "# WP-12, by the way"}, None),
    ],
)
def test_what_the_table_and_the_tests_say_of_each_other_is_compared(
    text: str, files: Sources, mistake: str | None
) -> None:
    found = "; ".join(mistakes(table_of(text), files))
    assert found == "" if mistake is None else mistake in found
