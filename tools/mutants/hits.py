"""Which blocks ran: a byte for each, in a file that all processes of a test share."""

from __future__ import annotations

import mmap
import os

SIZE = 1 << 16
VARIABLE = "MUTANTS_HITS"


def shared() -> mmap.mmap:
    """The table in the file that the environment names; without one, a table of this process."""
    if VARIABLE not in os.environ:
        return mmap.mmap(-1, SIZE)
    with open(os.environ[VARIABLE], "r+b") as file:
        return mmap.mmap(file.fileno(), SIZE)


HITS = shared()
