"""Reads docs/reference/names/*.md: tables, code cells, and the names that these use."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from internsp.app.config import Config

NAMES = Path(__file__).parents[2] / "docs" / "reference" / "names"
DOCUMENTS = [NAMES / name for name in ("fsdp.md", "deepspeed.md", "internevo.md")]
TEXT = "\n".join(document.read_text() for document in DOCUMENTS)
WORDS = ("nothing to write", "not yet", "none")
"""Placeholders in code; the page explains each."""


@dataclass(frozen=True)
class Row:
    """One row: what another system has, the equivalent here, and a note."""

    system: str
    theirs: str
    here: str
    note: str

    @property
    def codes(self) -> list[str]:
        """The code snippets of the column "here"."""
        return code_in(self.here)


def code_in(text: str) -> list[str]:
    """The snippets between backticks."""
    return re.findall(r"`([^`]+)`", text)


def rows(text: str) -> list[Row]:
    """Every row of the tables with the columns theirs, here and note, by system (its heading)."""
    found, system, inside = [], "", False
    for line in text.splitlines():
        if line.startswith("## "):
            system = line[3:]
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4:  # FSDP2's also say what one import gives
            del cells[1]
        if cells == ["theirs", "here", "note"]:
            inside = True
        elif not cells:
            inside = False
        elif inside and set(line) - set("|-"):
            assert len(cells) == 3, f"{len(cells)} cells: {line}"
            found.append(Row(system, *cells))
    return found


def block(text: str) -> str:
    """Its Python block: the names that the tables use."""
    (found,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(found)


def option(code: str) -> tuple[str, str] | None:
    """Section and key, if ``code`` is a key of a configuration file (perhaps an unknown key)."""
    found = re.fullmatch(r"([a-z_]+)\.([a-z_]+)( = .*)?", code)
    if found is None or found[1] not in Config.model_fields:
        return None
    section = Config.model_fields[found[1]].annotation
    if not found[3] and found[2] not in section.model_fields and found[1] in LIVE:  # type: ignore[union-attr]
        return None
    return found[1], found[2]


LIVE = {"optimizer", "model"}
"""Sections with the same names as objects in the tables' code: `optimizer.grad_norm`."""


def wrong_option(code: str) -> str | None:
    """pydantic's errors for an unknown key or an invalid value."""
    named = option(code)
    assert named is not None, f"{code} is no option"
    section: Any = Config.model_fields[named[0]].annotation
    if "=" not in code:
        return None if named[1] in section.model_fields else f"{code}: no such key"
    try:
        section(**tomllib.loads(code)[named[0]])
    except ValueError as error:
        return f"{code}: {error}"
    return None


def lines(found: Iterable[Row]) -> list[str]:
    """Python in the column "here", without duplicates; the snippets of a row form one program."""
    programs = ("\n".join(c for c in row.codes if option(c) is None) for row in found)
    return list(dict.fromkeys(program for program in programs if program))


def settings(found: Iterable[Row]) -> list[dict[str, Any]]:
    """What the column "here" sets in ``[weight_parallel]``, without duplicates."""
    codes = dict.fromkeys(code for row in found for code in row.codes)
    return [
        tomllib.loads(code)["weight_parallel"]
        for code in codes
        if code.startswith("weight_parallel.") and "=" in code
    ]
