"""Functions in a configuration: the object, or its import path ``"package.module:function"``.

Also an optimizer's class, with its arguments.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable
from typing import Any

from internsp.errors import ConfigError

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def checked(value: Any) -> Any:
    """``value`` if it is a function or has the form of an import path; nothing is imported yet."""
    if callable(value) or (isinstance(value, str) and _IMPORT_PATH.fullmatch(value)):
        return value
    raise ValueError('give a function, or its import path "package.module:function"')


def import_path(function: Callable[..., Any] | str) -> str:
    """Import path of a function: what is compared between ranks, printed and saved."""
    if isinstance(function, str):
        return function
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def resolve(given: Callable[..., Any] | str, key: str) -> Callable[..., Any]:
    """The function itself, imported if needed.

    Args:
        key: key of the configuration, for the error message.

    Raises:
        ConfigError: there is no function at that import path.
    """
    if not isinstance(given, str):
        return given
    try:
        found = pkgutil.resolve_name(given)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{key} = {given!r}: there is no such function or class ({error}); its module must be "
            "installed, or in a folder of PYTHONPATH"
        ) from error
    if not callable(found):
        raise ConfigError(f"{key} = {given!r} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]
