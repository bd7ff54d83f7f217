"""The templates of pages and of the drawings in them, and how they write numbers."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from internsp.base.sizes import UNITS, human

_MAX_TEXT = 100_000


def _bytes_as(nbytes: float, greatest: float) -> str:
    """Bytes in the unit of the greatest number of a table, so that a column can be compared."""
    unit = human(greatest).split()[1]
    return f"{nbytes / UNITS[unit]:.{0 if unit == 'B' else 1}f} {unit}"


TEMPLATES = Environment(
    loader=PackageLoader("internsp.app.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
)
TEMPLATES.filters |= {
    "bounded": lambda text: text[:_MAX_TEXT] + ("\n…" if len(text) > _MAX_TEXT else ""),
    "ms": lambda seconds: f"{seconds * 1e3:.2f}",
    "px": "{:.1f}".format,
    "human": human,
    "bytes_as": _bytes_as,
}
