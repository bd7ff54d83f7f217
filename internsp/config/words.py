"""What is wrong with a value of a section, in the same words in a file and in a program.

pydantic finds the mistakes. Each of its types of error is a sentence here.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from internsp.base.names import ANY_TEXT, FOLDER_NAME, nearest
from internsp.base.sizes import meant_size
from internsp.config.keys import ProgramOnly, nullable

_SENTENCES = {
    ANY_TEXT: "must be a text without a NUL character",
    FOLDER_NAME: "must be usable as the name of a folder",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "finite_number": "must be a finite number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_parsing_size": "expected a smaller number",
    "int_type": "expected a whole number",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "expected {expected}",
    "missing": "has too few entries",
    "model_type": "expected a table",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "string_type": "expected a text",
    "string_unicode": "must be a text that UTF-8 can hold",
    "too_long": "must have at most {max_length} entries",
    "tuple_type": "expected a list",
    "value_error": "{error}",
}
"""By pydantic's type of error; of a text that does not match a pattern, by the pattern."""
_ITS_KEYS = "; its keys: "
_MOST_ITEMS = 8  # entries of a list that a message shows
_MOST_LISTED = 30  # mistakes that a message shows
_TABLES = {"rules": "rule", "groups": "group"}

_Errors = Sequence[tuple[tuple[int | str, ...], ErrorDetails]]
"""Errors, each with its place in a section or in a value of it."""
Unknown = Callable[[type[BaseModel], str], str]
"""What is told of a key that a section does not have."""


def unknown_key(cls: type[BaseModel], key: str) -> str:
    """What a ``key`` that a section does not have became, or a near name."""
    from internsp.config.former import answer  # a table that is read for a mistake alone

    names = list(cls.model_fields)
    near = nearest(key, names)
    hint = f"; did you mean {near}?" if near else f"{_ITS_KEYS}{', '.join(names)}"
    became = answer(section_name(cls), key)
    return f"unknown key; {became}" if became else f"unknown key{hint}"


def mistakes(
    cls: type[BaseModel],
    values: Mapping[str, Any],
    error: ValidationError,
    unknown: Unknown = unknown_key,
) -> Iterator[tuple[str, str]]:
    """(key, sentence) of each mistake in ``values`` of a section; the key of the whole is empty.

    Of several errors of one value only the first is told, except of tables, which have keys of
    their own.
    """
    found = [(detail["loc"], detail) for detail in error.errors(include_url=False)]
    yield from _mistakes(cls, values, found, unknown)


def _mistakes(
    cls: type[BaseModel], values: Any, found: _Errors, unknown: Unknown
) -> Iterator[tuple[str, str]]:
    by_key: dict[str, list[tuple[tuple[int | str, ...], ErrorDetails]]] = {}
    for place, detail in found:
        by_key.setdefault(str(place[0]) if place else "", []).append((place[1:], detail))
    listed = False
    for number, (key, errors) in enumerate(by_key.items()):
        place, first = errors[0]
        field = cls.model_fields.get(key)
        if field is None and first["type"] == "extra_forbidden":
            text = unknown(cls, key) if number < _MOST_LISTED else "unknown key"
            if _ITS_KEYS in text:  # once is enough
                text = text.partition(_ITS_KEYS)[0] if listed else text
                listed = True
            yield key, text
        elif field is None:  # of the whole
            yield "", str(first.get("ctx", {}).get("error", first["msg"]))
        elif first["type"] == "missing" and not place:
            yield key, "is missing"
        elif isinstance(section := field.annotation, type) and issubclass(section, BaseModel):
            if first["type"] == "model_type":
                yield key, f"expected a section, got {in_words(values[key])}"
            else:
                for at, text in _mistakes(section, values[key], errors, unknown):
                    yield (f"{key}.{at}" if at else key), text
        elif table := table_class(cls, key):
            name = f"{section_name(cls)}.{key}"
            for text in _in_tables(name, table, values[key], errors, unknown):
                yield key, text
        else:
            yield key, _sentence(values[key], errors, nullable(field))


def _in_tables(
    name: str, table: type[BaseModel], values: Any, found: _Errors, unknown: Unknown
) -> Iterator[str]:
    """A sentence for each mistake in a list of tables, with the table's number and key."""
    if isinstance(values, Mapping):
        yield f"is a list of tables: write [[{name}]] for each"
        return
    by_number: dict[int, list[tuple[tuple[int | str, ...], ErrorDetails]]] = {}
    for place, detail in found:
        if not place:
            yield "expected a list of tables, got " + in_words(values)
            return
        by_number.setdefault(int(place[0]), []).append((place[1:], detail))
    for number, errors in by_number.items():
        where = f"{_TABLES.get(name.rpartition('.')[2], 'table')} {number + 1}"
        if errors[0][1]["type"] == "model_type":
            yield f"{where}: {_sentence(values[number], errors, False)}"
            continue
        for key, text in _mistakes(table, values[number], errors, unknown):
            yield f"{where}: {key}: {text}" if key else f"{where}: {text}"


def _sentence(value: Any, found: _Errors, or_none: bool) -> str:
    """What is wrong with a value. Where it may have several forms, it has none of them."""
    entries = [one for one in found if any(isinstance(at, int) for at in one[0])]
    chosen = entries[:1] or found
    place, first = chosen[0]
    where = ""
    if entries and first["type"] != "missing" and not isinstance(value, str):
        number = next(at for at in place if isinstance(at, int))
        where, value = f"entry {number + 1}: ", value[number]
    one, *others = dict.fromkeys(_said(detail) for _, detail in chosen)
    text = one + "".join(f" or {other.removeprefix('expected ')}" for other in others)
    if or_none and first["type"] != "value_error" and text.startswith("expected ") and not where:
        text += ' or "none"'
    near = _near(value, first) if isinstance(value, str) else None
    hint = f"; did you mean {in_words(near)}?" if near else ""
    return f"{where}{text}, got {in_words(value)}{hint}"


def _said(detail: ErrorDetails) -> str:
    context = dict(detail.get("ctx", {}))
    if "expected" in context:  # of a literal_error: 'a', 'b' or 'c'
        context["expected"] = context["expected"].replace("'", '"')
    known = _SENTENCES.get(context.get("pattern", detail["type"]))
    return known.format_map(context) if known else detail["msg"]


def _near(value: str, detail: ErrorDetails) -> str | None:
    if detail["type"] == "value_error":
        return meant_size(value) or nearest(value, ("all", "none"))
    return nearest(value, re.findall("'([^']*)'", detail.get("ctx", {}).get("expected", "")))


def all_mistakes(cls: type[BaseModel], values: Mapping[str, Any], error: ValidationError) -> str:
    """All mistakes in the values of a section that a program makes, one a line."""
    prefix = f"{section_name(cls)}." if section_name(cls) else ""
    found = mistakes(cls, values, error)
    lines = [one_line(f"{prefix}{key}: {text}" if key else text) for key, text in found]
    return listed(cls.__name__, lines)


def listed(heading: str, found: Sequence[object]) -> str:
    """``heading``, which counts the mistakes, then one mistake a line: a screen of them."""
    count = "1 mistake" if len(found) == 1 else f"{len(found)} mistakes"
    lines = [f"{heading}: {count}", *(f"  {mistake}" for mistake in found[:_MOST_LISTED])]
    more = len(found) - _MOST_LISTED
    return "\n".join([*lines, f"  and {more} more"] if more > 0 else lines)


def one_line(text: str) -> str:
    """``text`` in one line, whatever a key or a value contains (a quoted key may be any text)."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def section_name(cls: type[BaseModel]) -> str:
    """The section that ``WeightParallelConfig`` is in a file, ``weight_parallel``; else empty."""
    name = cls.__name__.removesuffix("Config").removesuffix("Section")
    return "" if name == cls.__name__ else re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def keys_of(cls: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a section or a table that a file may have, in the order of their definition."""
    return {k: f for k, f in cls.model_fields.items() if ProgramOnly not in f.metadata}


@cache
def table_class(cls: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The class of the tables that a key holds; ``None`` if it holds none."""
    of = typing.get_args(cls.model_fields[key].annotation)
    return next((c for c in of if isinstance(c, type) and issubclass(c, BaseModel)), None)


def metavar(annotation: Any) -> str:
    """What a value is, in short: ``{a,b}``, ``INT``, ``[TEXT ...]``."""
    origin, of = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return metavar(of[0])
    if origin is Literal:
        return "{" + ",".join(of) + "}"
    if origin in (types.UnionType, typing.Union):
        return "|".join(metavar(one) for one in of if one is not types.NoneType)
    if origin is tuple and of[-1] is Ellipsis:
        return f"[{metavar(of[0])} ...]"
    if origin is tuple:
        return " ".join(map(metavar, of))
    return {bool: "{true,false}", int: "INT", float: "FLOAT"}.get(annotation, "TEXT")


def help_of(field: FieldInfo) -> str:
    """The text under a field, in one line."""
    return " ".join((field.description or "").split())


def in_words(value: Any) -> str:
    """A value as it is written in TOML, shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    value = "none" if value is None else value
    if isinstance(value, str):
        return f'"{value}"' if len(value) <= 60 else f'"{value[:57]}..."'
    if isinstance(value, (list, tuple)):
        shown = [in_words(v) for v in value[:_MOST_ITEMS]]
        more = [f"... {len(value) - _MOST_ITEMS} more"] if len(value) > _MOST_ITEMS else []
        return f"[{', '.join([*shown, *more])}]"
    if isinstance(value, int) and value.bit_length() > 200:  # Python refuses to print huge ones
        return f"a number of about {int(value.bit_length() * math.log10(2))} digits"
    return "a section" if isinstance(value, Mapping) else str(value)
