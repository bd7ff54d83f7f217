"""Memory of processes on Linux, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


def status(key: str, process: int | str = "self") -> int:
    """The value of a line of ``/proc/PROCESS/status`` in bytes: ``VmRSS`` (now), ``VmHWM`` (peak).

    Raises:
        OSError, KeyError: there is no such process, or no such line.
    """
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise KeyError(key)


def free() -> None:
    """Return all unused memory of this process to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
