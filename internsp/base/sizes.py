"""Sizes in bytes: read from texts, and formatted for people."""

from __future__ import annotations

import re
from decimal import Decimal

LARGEST = 1 << 50
"""Largest size that may be given, in bytes."""
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,16}(?:\.[0-9]{1,6})?) ?([A-Za-z]{1,5})")


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


def human(nbytes: float) -> str:
    """Bytes for people, exact below 10,000: ``9999 B``, ``1.5 MiB``."""
    if nbytes < 10_000:
        return f"{nbytes:.0f} B"
    power = min(4, (int(nbytes).bit_length() - 1) // 10)  # of 1024
    return f"{nbytes / 1024**power:.1f} {'KMGT'[power - 1]}iB"
