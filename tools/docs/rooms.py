"""``python -m tools.docs.rooms``: the table of rooms by floor, for docs/dev/architecture.md.

Prints the table; with ``--write`` it replaces the one in the document. The floors are those of
``FLOORS`` in tests/unit/test_structure.py, and what a room is for is the first sentence of its
``__init__``: neither is stated twice.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "dev" / "architecture.md"
BEGIN, END = "<!-- python -m tools.docs.rooms --write -->\n", "<!-- end of rooms -->\n"
PLUG_IN = ("schedule", "wp", "modules", "parallel")


def floors() -> list[list[str]]:
    """Names of rooms, from the bottom up."""
    tree = ast.parse((ROOT / "tests" / "unit" / "test_structure.py").read_text())
    table = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS"
    )
    return list(ast.literal_eval(table))


def subject(room: str) -> str:
    """What lives in ``room``: the first sentence of its docstring."""
    source = (ROOT / "internsp" / room.replace(".", "/") / "__init__.py").read_text()
    text = ast.get_docstring(ast.parse(source)) or ""
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".").replace("``", "`")


def table() -> str:
    """Rows by floor, the highest first; rooms of the plug-in in bold."""
    rows = ["| floor | room | what lives there |", "|---:|---|---|"]
    for floor, rooms in reversed(list(enumerate(floors(), 1))):
        for number, room in enumerate(rooms):
            name = f"`{room.replace('.', '/')}`"
            shown = f"**{name}**" if room in PLUG_IN else name
            rows.append(f"| {'' if number else floor} | {shown} | {subject(room)} |")
    return "\n".join(rows) + "\n"


def written(document: str) -> str:
    """``document`` with the table of now between its two marks."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs.rooms", description=__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/dev/architecture.md")
    if parser.parse_args().write:
        DOCUMENT.write_text(written(DOCUMENT.read_text()))
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
