"""Runs long tests without coverage's tracer, which adds 25 % to 100 % to their time.

Shorter tests cover the same code, so that one run of all tests both measures and stays short.
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
"""Environment variables by which coverage starts in a child process."""


@contextmanager
def untraced() -> Iterator[None]:
    """A context without a tracer, in this process and in processes that it starts."""
    traces = sys.gettrace(), threading.gettrace()
    environment = {name: os.environ.pop(name) for name in STARTS if name in os.environ}
    prepared = spawn.get_preparation_data

    def plain(name: str) -> dict[str, Any]:
        """A context in which processes of multiprocessing do not start coverage."""
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
