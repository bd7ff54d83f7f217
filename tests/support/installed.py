"""Tests of packages that may be missing."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def need(package: str, reason: str) -> None:
    """Skip the tests of the calling file without this package, which is not imported for it.

    ``pytest.importorskip`` imports it in each worker, before the first test; few of them, and of
    their ranks, run a test that uses it.
    """
    if find_spec(package) is None:
        pytest.skip(reason, allow_module_level=True)
