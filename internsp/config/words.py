"""What is wrong with a value of a section, in the same words in a file and in a program."""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from internsp.base.names import ANY_TEXT, FOLDER_NAME, nearest
from internsp.base.sizes import meant_size
from internsp.config.former import answer

Schema = Mapping[str, Any]
"""The JSON schema of a key, from pydantic: type, choices, default, description."""

_FITS = {
    ANY_TEXT: "a text without a NUL character",
    FOLDER_NAME: "usable as the name of a folder",
}
_MOST_ITEMS = 8  # entries of a list that a message shows
_MOST_LISTED = 30  # mistakes that a message shows
_TABLES = {"rules": "rule", "groups": "group"}


def mistakes(
    cls: type[BaseModel], values: Mapping[str, Any], error: ValidationError
) -> Iterator[tuple[str, str]]:
    """(key, sentence) of each mistake in ``values`` of a section; the key of the whole is empty.

    Of several errors of one value only the first is told, except of tables, which have keys of
    their own.
    """
    yield from _mistakes(cls, values, error.errors(include_url=False))


def _mistakes(
    cls: type[BaseModel], values: Mapping[str, Any], details: Sequence[ErrorDetails]
) -> Iterator[tuple[str, str]]:
    told: set[str] = set()
    for detail in details:
        if not detail["loc"]:
            yield "", str(detail.get("ctx", {}).get("error", detail["msg"]))
            continue
        key = str(detail["loc"][0])
        inner = cls.model_fields[key].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):  # a section of a Config
            if len(detail["loc"]) == 1 and detail["type"] != "value_error":
                yield key, f"expected a section, got {in_words(values[key])}"
            else:
                rest: Any = {**detail, "loc": detail["loc"][1:]}
                for at, text in _mistakes(inner, values[key], [rest]):
                    yield (f"{key}.{at}" if at else key), text
        elif (table := table_class(cls, key)) is not None:  # every mistake of every table
            name = f"{section_name(cls)}.{key}"
            yield key, describe_table_error(name, values[key], detail, schemas(table))
        elif key not in told:
            told.add(key)
            if detail["type"] == "missing":
                yield key, f"is missing: {expected(schemas(cls)[key])}"
            else:
                yield key, describe_error(schemas(cls)[key], values[key], detail)


def unknown_key(key: str, cls: type[BaseModel]) -> str:
    """The mistake of a ``key`` that a section does not have: what it became, or a near name."""
    names = list(cls.model_fields)
    near = nearest(key, names)
    hint = f"did you mean {near}?" if near else f"its keys: {', '.join(names)}"
    return f"unknown key {key!r}; {answer(section_name(cls), key) or hint}"


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


@cache
def schemas(cls: type[BaseModel]) -> Mapping[str, Schema]:
    """JSON schema of each key of a section or a table, in the order of its definition."""
    properties: Mapping[str, Schema] = cls.model_json_schema()["properties"]
    return properties


@cache
def table_class(cls: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The class of the tables that a key holds; ``None`` if it holds none."""
    of = typing.get_args(cls.model_fields[key].annotation)
    return next((c for c in of if isinstance(c, type) and issubclass(c, BaseModel)), None)


def describe_error(schema: Schema, value: Any, detail: ErrorDetails) -> str:
    """One of pydantic's errors as a sentence about ``value``."""
    kind, context = detail["type"], detail.get("ctx", {})
    got = f"got {in_words(value)}"
    limits = {
        "greater_than_equal": "at least {ge}",
        "greater_than": "more than {gt}",
        "less_than_equal": "at most {le}",
        "less_than": "less than {lt}",
    }
    if kind in limits:
        return f"must be {limits[kind].format_map(context)}, {got}"
    if kind == "finite_number":
        return f"must be a finite number, {got}"
    if kind in ("string_too_long", "too_long"):
        what = "characters" if kind == "string_too_long" else "entries"
        return f"must have at most {context['max_length']} {what}, {got}"
    if kind == "string_unicode":
        return f"must be a text that UTF-8 can hold, {got}"
    if kind == "string_pattern_mismatch":
        return f"must be {_FITS[context['pattern']]}, {got}"
    if kind == "value_error":  # its message already has what is expected
        near = None
        if isinstance(value, str):
            near = meant_size(value) or nearest(value, ("all", "none"))
        text = f"{context['error']}, {got}"
    else:
        text = f"expected {expected(schema)}, {got}"
        choices = choices_of(schema)
        near = nearest(value, choices) if isinstance(value, str) and choices else None
    return f"{text}; did you mean {in_words(near)}?" if near else text


def describe_table_error(
    name: str, values: Any, detail: ErrorDetails, keys: Mapping[str, Schema]
) -> str:
    """One of pydantic's errors in a list of tables, with the table's number and key.

    Args:
        name: ``"section.key"`` of the list.
        values: the list.
        keys: schema of each key of a table.
    """
    place = detail["loc"][1:]
    if isinstance(values, Mapping):
        return f"is a list of tables: write [[{name}]] for each"
    if not place:
        return f"expected a list of tables, got {in_words(values)}"
    number, value = int(place[0]), values[int(place[0])]
    where = f"{_TABLES.get(name.rpartition('.')[2], 'table')} {number + 1}"
    if len(place) == 1 or detail["type"] == "model_type":
        text = str(detail.get("ctx", {}).get("error", f"expected a table, got {in_words(value)}"))
        return f"{where}: {text}"
    key = str(place[1])
    if detail["type"] == "missing":
        return f"{where} lacks {key}: {expected(keys[key])}"
    return f"{where}: {key}: {describe_error(keys[key], value[key], detail)}"


def is_tables(schema: Schema) -> bool:
    """Whether a key holds tables, which can be given only in a file."""
    return "$ref" in schema.get("items", {})


def expected(schema: Schema, plural: bool = False) -> str:
    """What a value of ``schema`` must be, in plain words."""
    if "$ref" in schema:
        return "tables" if plural else "a table"
    if "anyOf" in schema:
        return " or ".join(expected(one, plural) for one in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(in_words(choice) for choice in schema["enum"])
    if "const" in schema:  # the only choice, in addition to "none" or numbers
        return in_words(schema["const"])
    if schema["type"] == "array":
        count = f"{schema['minItems']} " if "minItems" in schema else ""
        return f"a list of {count}{expected(items_of(schema)[0], plural=True)}"
    one = {"boolean": "true or false", "integer": "a whole number", "number": "a number"}
    many = {"boolean": "true or false", "integer": "whole numbers", "number": "numbers"}
    texts = {"string": "texts" if plural else "a text", "null": '"none"'}
    return ((many if plural else one) | texts)[schema["type"]]


def items_of(schema: Schema) -> Sequence[Schema]:
    """Schemas of a list's entries: one for any number of entries, or one for each."""
    return schema.get("prefixItems") or [schema["items"]]


def choices_of(schema: Schema) -> tuple[str, ...]:
    """The texts that a key allows, if it allows only some; else empty."""
    return next((tuple(s["enum"]) for s in (schema, *schema.get("anyOf", ())) if "enum" in s), ())


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
