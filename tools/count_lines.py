"""Lines of a Python package by file: code, docstrings, comments, blank; its classes and functions.

::

    python -m tools.count_lines internsp/wp
    python -m tools.count_lines internsp --folders
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import tyro

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.bench.report import Table


@dataclass(frozen=True)
class Options:
    """Count the lines of a package."""

    package: tyro.conf.Positional[Path]
    """A folder of Python files."""
    folders: bool = False
    """Print one row per folder instead of per file."""


@dataclass(frozen=True)
class Count:
    """Counts of one source; every line is one of code, docstring, comment and blank."""

    files: int = 0
    lines: int = 0
    code: int = 0
    docstrings: int = 0
    comments: int = 0
    """Lines with only a comment."""
    remarks: int = 0
    """All comments, including those after code."""
    classes: int = 0
    functions: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def count(source: str) -> Count:
    """Count the lines of one Python source."""
    tree = ast.parse(source)
    documented: set[int] = set()
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        texts = node.body if isinstance(node, kinds) else []
        for text in texts:  # attributes of classes are followed by their docstrings
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                if isinstance(text.value.value, str):
                    documented.update(range(text.lineno, (text.end_lineno or 0) + 1))
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    remarks = [t for t in tokens if t.type == tokenize.COMMENT]
    alone = [t for t in remarks if t.line.strip() == t.string]
    blank = [n for n, line in enumerate(lines, 1) if not line.strip() and n not in documented]
    nodes = list(ast.walk(tree))
    return Count(
        files=1,
        lines=len(lines),
        code=len(lines) - len(documented) - len(alone) - len(blank),
        docstrings=len(documented),
        comments=len(alone),
        remarks=len(remarks),
        classes=sum(isinstance(node, ast.ClassDef) for node in nodes),
        functions=sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes),
    )


def table(counts: Iterable[tuple[str, Count]]) -> Table:
    """A row for each, and the total."""
    counts = list(counts)
    head = ("", "files", "lines", "code", "docstrings", "comments alone", "comments", "classes",
            "functions")  # fmt: skip
    whole = sum((found for _, found in counts), Count())
    rows = [(name, *map(str, astuple(found))) for name, found in [*counts, ("all", whole)]]
    return Table([head, *rows])


def main(arguments: Sequence[str]) -> int:
    """Count and print."""
    options = tyro.cli(Options, args=list(arguments), description=__doc__)
    root = options.package
    found = [
        (path.relative_to(root), count(path.read_text("utf-8"))) for path in root.rglob("*.py")
    ]
    if not found:
        print(f"no Python files in {root}", file=sys.stderr)
        return 2
    by_name: dict[str, Count] = {}
    for path, each in sorted(found):
        name = path.parts[0] if options.folders else str(path)
        by_name[name] = by_name.get(name, Count()) + each
    print("\n".join(table(by_name.items()).text()).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
