"""``python -m tools.docs.configuration``: writes ``configs/documented.toml``, every key by default.

It is made from the classes that read a configuration; ``tests/unit/test_config.py`` checks that the
file is this text. ``internsp init --config documented`` copies the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import wrap

from pydantic.fields import FieldInfo

from internsp.app.config import sections
from internsp.config.words import help_of, in_words, keys_of, metavar, table_class

FILE = Path(__file__).parents[2] / "configs" / "documented.toml"


def documented() -> str:
    """A TOML file of every key with its default, each below a comment that describes it."""
    lines = ["# Every key with its default. A config names only what differs."]
    for name, cls in sections().items():
        lines += ["", f"# {cls.__doc__}", f"[{name}]"]
        for key, field in keys_of(cls).items():
            lines += [*_comment("# ", help_of(field)), f"{key} = {in_words(field.get_default())}"]
            lines[-1] += _choices(field, "  # ")
            if (table := table_class(cls, key)) is not None:
                lines += [f"# [[{name}.{key}]]"]
                for inner, its in keys_of(table).items():
                    lines += _comment("#   ", f"{inner}: {help_of(its)}{_choices(its, ' (', ')')}")
    return "\n".join(lines) + "\n"


def _comment(mark: str, text: str) -> list[str]:
    after = mark + "  " * (len(mark) > 2)
    return wrap(text, 100, initial_indent=mark, subsequent_indent=after, break_on_hyphens=False)


def _choices(field: FieldInfo, before: str, after: str = "") -> str:
    """The texts that a key allows, if it allows only some; else empty."""
    shown = re.fullmatch("{([^}]*)}", metavar(field.annotation))
    if shown is None or field.annotation is bool:
        return ""
    return f"{before}{shown[1].replace(',', ' | ')}{after}"


if __name__ == "__main__":
    FILE.write_text(documented(), encoding="utf-8")
