"""``docs/dev/features.md``: one row per behavior, names that exist, and tests that exist."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from pydantic import ValidationError

import internsp
from internsp.app.config import Config, sections
from tests.support.proofs import Sources, absent, sources

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "dev" / "features.md"
PARTS = {"I": 26, "L": 18, "H": 18, "F": 12, "M": 16}
EVERY = [f"{part}{number}" for part, last in PARTS.items() for number in range(1, last + 1)]
EVERY += [f"fault {number}" for number in range(1, 44)]
ROW = re.compile(r"^\| ([A-Z]\d+|fault \d+) \| (.*) \|$")

Table = dict[str, list[str]]  # cells after the id, by row
Classes = dict[str, tuple[set[str], list[str]]]  # own members and bases, by name


def rows(text: str) -> list[tuple[str, list[str]]]:
    """Every row of the tables with an id, in order."""
    found = [ROW.match(line) for line in text.splitlines()]
    return [(row[1], row[2].split(" | ")) for row in found if row is not None]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def proofs_of(table: Table) -> Table:
    return {row: quoted(cells[-1]) for row, cells in table.items()}


def self_made(function: ast.FunctionDef) -> set[str]:
    """Attributes that a method sets on ``self``."""
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


@cache
def defined() -> tuple[Classes, set[str]]:
    """Classes and functions of the package, read from its syntax trees."""
    classes: Classes = {}
    functions: set[str] = set()
    for path in sorted((ROOT / "internsp").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                functions.add(node.name)
            elif isinstance(node, ast.ClassDef):
                members = set()
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef):
                        members |= {inner.name, *self_made(inner)}
                    elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                        members.add(inner.target.id)
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                classes[node.name] = (members, bases)
    return classes, functions


def has(name: str, member: str) -> bool:
    """Whether a class or one of its bases has a member."""
    classes, _ = defined()
    own, bases = classes.get(name, (set(), []))
    return member in own or any(has(base, member) for base in bases)


def option(text: str) -> str | None:
    """The error in ``section.key`` or ``section.key = value``; None: none."""
    section, _, key = text.partition(" = ")[0].partition(".")
    if key not in sections()[section].model_fields:
        return f"{section} has no option {key}"
    if " = " in text:
        try:
            sections()[section].model_validate(tomllib.loads(text)[section])
        except (ValidationError, tomllib.TOMLDecodeError) as error:
            return f"{text}: {error}"
    return None


def unknown(name: str) -> str | None:
    """The error in a quoted name of ours; None: none, or it is not ours."""
    if name.startswith(("torch.", "nn.", "transformers.")):
        return None
    if name.startswith("python -m "):
        path = ROOT / name.split()[2].replace(".", "/")
        return None if path.is_dir() or path.with_suffix(".py").exists() else f"no {name}"
    if name in ("internsp plan", "internsp train"):
        return None
    head, _, rest = name.partition(".")
    if head in sections() and rest:
        return option(name)
    public = head == "internsp"
    if public:
        head, _, rest = rest.partition(".")
        if head not in internsp.__all__:
            return f"internsp.{head} is not public"
    classes, functions = defined()
    if head in functions and not rest:
        return None
    if head not in classes:
        return f"{head} is no class or function of internsp"
    return None if not rest or has(head, rest) else f"{head} has no {rest}"


def mistakes(text: str, tests: Sources, wanted: Mapping[str, int]) -> Iterator[str]:
    """Wrong statements of the page, and omissions."""
    found = rows(text)
    counts = Counter(row for row, _ in found)
    for row in sorted({*wanted, *counts}):
        if counts[row] != wanted.get(row, 0):
            yield f"{row} stands there {counts[row]} times"
    table = dict(found)
    for row, cells in table.items():
        if len(cells) != 3:
            yield f"{row} has {len(cells)} cells behind its id"
        elif not quoted(cells[-1]) and "not yet" not in cells[-1]:
            yield f'{row} names no test and does not say "not yet"'
        for name in quoted(" ".join(cells[:-1])):
            if (wrong := unknown(name)) is not None:
                yield f"{row}: {wrong}"
    yield from absent(proofs_of(table), tests)


def test_each_behavior_and_fault_has_a_row_with_names_and_tests_that_exist() -> None:
    text = PAGE.read_text()
    assert list(mistakes(text, sources(), dict.fromkeys(EVERY, 1))) == []
    assert [row for row, _ in rows(text)] == EVERY, "in order"


RIGHT = "| I1 | prefetch | `ZeroOptimizer.step` | `unit/test_a`, `ranks/test_b::test_c` |"
FILES = {"unit/test_a": "", "ranks/test_b": "def test_c(rank): ...\ndef helper(): ...\n"}


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        (RIGHT, None),
        (RIGHT + "\n" + RIGHT, "I1 stands there 2 times"),
        (RIGHT.replace("I1", "I2"), "I1 stands there 0 times; I2 stands there 1 times"),
        (RIGHT.replace("test_a", "test_z"), "I1: there is no tests/unit/test_z.py"),
        (RIGHT.replace("test_c", "test_z"), "I1: tests/ranks/test_b.py has no test_z"),
        (RIGHT.replace("test_c", "helper"), "I1: tests/ranks/test_b.py has no helper"),
        (RIGHT.replace(" | prefetch", ""), "I1 has 2 cells"),
        ("| I1 | a | b | not yet |", None),
        ("| I1 | a | not yet | c |", 'I1 names no test and does not say "not yet"'),
        (RIGHT.replace("ZeroOptimizer.step", "ZeroOptimizer.stop"), "ZeroOptimizer has no stop"),
        (RIGHT.replace("ZeroOptimizer.step", "Zero"), "Zero is no class or function of internsp"),
        (RIGHT.replace("ZeroOptimizer", "internsp.Bucket"), "internsp.Bucket is not public"),
        (RIGHT.replace("ZeroOptimizer.step", "internsp.ZeroOptimizer.grad_norm"), None),
        (RIGHT.replace("ZeroOptimizer.step", "token_loss"), None),
        (RIGHT.replace("ZeroOptimizer.step", 'weight_parallel.gather_before = "rolling"'), None),
        (RIGHT.replace("ZeroOptimizer.step", 'weight_parallel.gather_before = "rollin"'),
         "Input should"),
        (RIGHT.replace("ZeroOptimizer.step", "weight_parallel.triger"), "has no option triger"),
        (RIGHT.replace("ZeroOptimizer.step", "python -m tools.nothing"), "no python -m tools.n"),
    ],
)
def test_a_wrong_row_is_found(text: str, mistake: str | None) -> None:
    found = "; ".join(mistakes(text, FILES, {"I1": 1}))
    assert found == "" if mistake is None else mistake in found


def test_every_option_is_read_by_the_code_that_it_is_for() -> None:
    """An option that is accepted without effect is a fault of other libraries (fault 2)."""
    files = [*(ROOT / "internsp").rglob("*.py"), *(ROOT / "model_zoo").rglob("*.py")]
    read = {
        node.attr
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    options = {(name, key) for name, section in sections().items() for key in section.model_fields}
    unread = {(name, key) for name, key in options if key not in read}
    degrees = Config().degrees()
    assert unread <= {("parallel", key) for key in degrees}, "handed on as one"
