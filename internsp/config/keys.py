"""What a key of a section may be: ``"none"``, or given by a program alone."""

from __future__ import annotations

import types
import typing
from typing import Any

from pydantic import BeforeValidator, ValidationInfo
from pydantic.fields import FieldInfo

FROM_FILE = "file"
"""Context of pydantic's validation for values of a file or a command line."""


class FolderNumber(int):
    """A number from the folder of a model, for a key that no file of a user may have."""


def _refused_in_a_file(value: Any, info: ValidationInfo) -> Any:
    if info.context == FROM_FILE and not isinstance(value, FolderNumber):
        raise ValueError("is for programs alone, as an argument of its class")
    return value


ProgramOnly = BeforeValidator(_refused_in_a_file)
"""Marks a key that a program may give and a file may not."""


def nullable(field: FieldInfo) -> bool:
    """Whether ``None`` (written ``"none"``) is a value of ``field``."""
    union = typing.get_origin(field.annotation) in (types.UnionType, typing.Union)
    return union and type(None) in typing.get_args(field.annotation)
