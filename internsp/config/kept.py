"""Values of ``weight_parallel.keep_unsharded``: how many blocks stay unsharded, or which size."""

from __future__ import annotations

import re

from internsp.base.sizes import LARGEST, size_in_bytes

MOST_BLOCKS = 1_000_000_000
_EXPECTED = 'expected a number of blocks, a size such as "2 GiB", "all" or "none"'


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
