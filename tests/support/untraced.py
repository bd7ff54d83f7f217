"""Long tests run without coverage's tracer: it takes a quarter of what they take, or as much again.

What they run, shorter tests run, too; so one run of all tests both measures and stays short.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from typing import Any
from unittest.mock import patch

STARTS = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
"""Environment by which coverage starts in a process that this one starts."""


@contextmanager
def untraced() -> Iterator[None]:
    """No tracer inside, neither in this process nor in one that is started there."""
    traces = sys.gettrace(), threading.gettrace()
    environment = {name: os.environ.pop(name) for name in STARTS if name in os.environ}
    prepared = spawn.get_preparation_data

    def plain(name: str) -> dict[str, Any]:
        """Without what makes processes of multiprocessing start coverage."""
        return {key: value for key, value in prepared(name).items() if key != "stowaway"}

    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    try:
        with patch.object(spawn, "get_preparation_data", plain):
            yield
    finally:
        threading.settrace(traces[1])  # type: ignore[arg-type]
        sys.settrace(traces[0])
        os.environ.update(environment)
