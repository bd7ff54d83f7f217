"""Names and options of optimizers, as a configuration gives them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from typing import Any

from internsp.base.names import nearest
from internsp.config.functions import _IMPORT_PATH

OPTIMIZERS = ("adamw", "sgd", "adafactor", "muon")
"""Optimizers that have names in the configuration."""


def checked_optimizer(name: str) -> str:
    """``name`` if it is a named optimizer or an import path; nothing is imported yet."""
    if name in OPTIMIZERS or _IMPORT_PATH.fullmatch(name):
        return name
    near = nearest(name, OPTIMIZERS)
    hint = f" (did you mean {near}?)" if near else ""
    raise ValueError(f'give {", ".join(OPTIMIZERS)}, or a class as "package.module:Class"{hint}')


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
