"""Functions in a configuration: given as they are, or by place: ``"package.module:function"``."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from internsp.errors import ConfigError

_PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def checked(value: Any) -> Any:
    """``value`` if it is a function or has the form of a place; nothing is imported yet."""
    if callable(value) or (isinstance(value, str) and _PLACE.fullmatch(value)):
        return value
    raise ValueError('give a function, or its place as "package.module:function"')


def place_of(function: Callable[..., Any] | str) -> str:
    """Its place: what is compared between ranks, printed and saved."""
    if isinstance(function, str):
        return function
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def resolve(given: Callable[..., Any] | str, key: str) -> Callable[..., Any]:
    """The function itself.

    Args:
        key: of the configuration, for the error.

    Raises:
        ConfigError: there is none at that place.
    """
    if not isinstance(given, str):
        return given
    module, _, name = given.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key} = {given!r}: there is no such function ({error})") from error
    if not callable(found):
        raise ConfigError(f"{key} = {given!r} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]
