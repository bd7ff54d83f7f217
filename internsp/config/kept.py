"""Values of ``weight_parallel.keep_unsharded``: how many blocks stay unsharded, or which size."""

from __future__ import annotations

import re
from decimal import Decimal

LARGEST = 1 << 50
"""Largest size that may be given, in bytes."""
MOST_BLOCKS = 1_000_000_000
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,16}(?:\.[0-9]{1,6})?) ?([A-Za-z]{1,5})")
_EXPECTED = 'expected a number of blocks, a size such as "2 GiB", "all" or "none"'


def size_in_bytes(text: str) -> int | None:
    """Bytes of ``"1.5 GiB"``: a number and one of :data:`UNITS`; ``None`` for any other text."""
    found = _SIZE.fullmatch(text)
    if found is None or found[2] not in UNITS:
        return None
    return int(Decimal(found[1]) * UNITS[found[2]])


def meant_size(text: str) -> str | None:
    """The size that a text with a misspelled unit (``2gb``, ``512 M``) most likely means."""
    found = _SIZE.fullmatch(text)
    if found is None or found[2] in UNITS:
        return None
    near = next((unit for unit in UNITS if unit[0] == found[2][0].upper()), None)
    return f"{found[1]} {near}" if near else None


def checked(value: object) -> object:
    """Check a value of ``keep_unsharded`` and return it as the configuration stores it.

    Returns:
        ``None``, ``"all"``, a number of blocks, or a size as text.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, str) and re.fullmatch("[0-9]{1,20}", value):
        value = int(value)  # from a command line
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= MOST_BLOCKS:
            raise ValueError(
                f'a number of blocks is at least 0 and at most {MOST_BLOCKS}; a size has a unit, '
                'as "2 GiB"'
            )
        return value
    if value is None or value == "all":
        return value
    size = size_in_bytes(value) if isinstance(value, str) else None
    if size is None:
        raise ValueError(_EXPECTED)
    if size > LARGEST:
        raise ValueError(f"a size is at most {LARGEST >> 40} TiB")
    return value
