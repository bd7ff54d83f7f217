"""Functions in a configuration: the object, or its import path ``"package.module:function"``.

Also an optimizer's class, with its arguments.
"""

from __future__ import annotations

import difflib
import importlib
import re
import tomllib
from collections.abc import Callable, Iterable
from typing import Any

from internsp.errors import ConfigError

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

OPTIMIZERS = ("adamw", "sgd", "adafactor", "muon")
"""Optimizers that have names in the configuration."""


def checked_optimizer(name: str) -> str:
    """``name`` if it is a named optimizer or an import path; nothing is imported yet."""
    if name in OPTIMIZERS or _IMPORT_PATH.fullmatch(name):
        return name
    near = difflib.get_close_matches(name, OPTIMIZERS, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(f'give {", ".join(OPTIMIZERS)}, or a class as "package.module:Class"{hint}')


def checked_option(text: str) -> str:
    """``text`` if it is one argument, ``name = value``."""
    options([text])
    return text


def options(texts: Iterable[str]) -> dict[str, Any]:
    """The arguments in ``texts``, by name."""
    found: dict[str, Any] = {}
    for text in texts:
        try:
            given = tomllib.loads(text)
        except tomllib.TOMLDecodeError:
            given = {}
        if len(given) != 1 or "\n" in text:
            raise ValueError('write an argument as "name = value", a text in quotes')
        found |= given
    return found


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
