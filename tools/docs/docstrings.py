"""Converts docstrings for the site: an extension of griffe, which reads them (mkdocs.yml).

The source refers to names by reST roles, as Python's own docstrings do, and may describe several
parameters in one entry; the site's pages are Markdown with one row per parameter.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|meth|func|attr|mod|data|exc):`~?([^`]+)`")
# A paragraph that ends with "::" before an indented block.
LITERAL = re.compile(r"::$", re.MULTILINE)
# "k, v: what they are", over as many lines as are indented further.
SHARED = re.compile(r"^( +)(\*{0,2}\w+(?:,\s+\*{0,2}\w+)+):( .*(?:\n\1 .*)*)", re.MULTILINE)


def in_markdown(text: str) -> str:
    """A docstring without roles, and with one entry per name."""

    def each(found: re.Match[str]) -> str:
        indent, names, said = found.groups()
        return "\n".join(f"{indent}{name}:{said}" for name in re.split(r",\s+", names))

    return LITERAL.sub(":", ROLE.sub(r"`\1`", SHARED.sub(each, text)))


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = in_markdown(obj.docstring.value)
