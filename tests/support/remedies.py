"""The scan for tables of remedies: what an error says to do is in a row, and the row is true.

A row has a piece of a text, and for each remedy in it the words that name it and what was done: a
function that runs the remedy, or the test elsewhere that does so.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
Remedy = Callable[[], None] | str
Table = Mapping[str, Mapping[str, Remedy]]
NOT_RUN: dict[str, Remedy] = {}  # the row of a package to install, or a device
NO_ADVICE: dict[str, Remedy] = {}  # that of words that only look like advice

_VERBS = (
    "add attach begin belongs broadcast build call cast change choose clone close compute "
    "copy declare define detach divide do drop export feed fill fix form freeze gather give "
    "go hold hook install keep leave let load look lower make map mark move name omit pad "
    "pass pip plan point put raise read recompute redistribute register remove rename repeat "
    "replace restart resume return run save see seed select set shard split start take try "
    "turn unfreeze untie use wait write"
)
SAYS_WHAT_TO_DO = re.compile(
    rf"(?:^|[:;,.(] |, or | or | and )(?:first |only |then |not )*(?:{_VERBS.replace(' ', '|')})\b",
    re.IGNORECASE,
)


def advice(rooms: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Each string of the rooms that says what to do: its place, its source without the quotes, and
    all strings of its room, of which a text may be made. Docstrings, logs and help are none."""
    for room in rooms:
        folder = ROOT / "internsp" / room
        trees = {p: ast.parse(p.read_text()) for p in sorted(folder.rglob("*.py")) or [folder]}
        nodes = [node for tree in trees.values() for node in ast.walk(tree)]
        beside = "\n".join(
            n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)
        )
        unread = {id(part) for node in nodes for part in _no_texts(node)}
        for path, tree in trees.items():
            for node in ast.walk(tree):
                string = isinstance(node, ast.Constant) and isinstance(node.value, str)
                if (string or isinstance(node, ast.JoinedStr)) and id(node) not in unread:
                    found = text_of(node)  # type: ignore[arg-type]
                    if " " in found and SAYS_WHAT_TO_DO.search(found):
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", found, beside  # type: ignore[attr-defined]


def _no_texts(node: ast.AST) -> Iterator[ast.AST]:
    """What lies in ``node`` and is no text by itself, or none of an error."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield node.value
    if isinstance(node, ast.JoinedStr):
        yield from (part for part in ast.walk(node) if part is not node)
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".info", ".add_argument")):
        yield from ast.walk(node)


def text_of(node: ast.expr) -> str:
    """A string's source without its quotes; what is filled in stands in braces."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "{" + ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node) + "}"


def require_complete(rooms: Sequence[str], table: Table) -> None:
    """Assert that what the rooms say to do is in one row, that rows say what is said, and that the
    tests that they name exist."""
    wrong, rows = [], set(table)
    for where, text, beside in advice(rooms):
        found = [piece for piece in table if piece in text]
        if len(found) != 1:
            wrong.append(f"{where}: {text!r} is in {len(found)} rows: {found}")
        for piece in found:
            rows.discard(piece)
            wrong += [
                f"{where} no longer says {words!r}: {text}"
                for words in table[piece]
                if words not in text and not ("{" in text and words in beside)
            ]
    wrong += [f"nothing says this any more: {piece!r}" for piece in sorted(rows)]
    assert not wrong, "\n".join(wrong)
    require_tests(table)


def require_tests(table: Table) -> None:
    """Assert that the tests that rows name exist."""
    for named in sorted({r for row in table.values() for r in row.values() if isinstance(r, str)}):
        path, _, name = named.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        tests = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        assert name in tests, f"{named} is not there"


def run(table: Table, part: int = 0, parts: int = 1) -> None:
    """Run this part of the remedies that are functions; ranks run the same ones in one order."""
    remedies = {
        f"{piece} > {words}": remedy
        for piece, row in table.items()
        for words, remedy in row.items()
        if not isinstance(remedy, str)
    }
    for name in sorted(remedies)[part::parts]:
        try:
            remedies[name]()
        except Exception as error:
            raise AssertionError(f"the remedy of: {name}") from error
