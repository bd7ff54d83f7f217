"""Replaces a function in every loaded module that holds it."""

from __future__ import annotations

import sys
from typing import Any


def replace_everywhere(old: Any, new: Any) -> list[str]:
    """Replace ``old`` by ``new``, under whatever name modules, other than ours, hold it.

    Returns:
        Names of the modules.
    """
    found = []
    for name, module in [*sys.modules.items()]:
        if name.startswith("internsp.") or not isinstance(getattr(module, "__dict__", None), dict):
            continue
        for key, value in [*vars(module).items()]:
            if value is old:
                setattr(module, key, new)
                found.append(name)
    return [*dict.fromkeys(found)]
