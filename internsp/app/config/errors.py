"""Mistakes in a configuration, in plain words: what is wrong, where, and the nearest valid name."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic_core import ErrorDetails

from internsp.app.config.sections import FOLDER_NAME
from internsp.base.names import nearest, plain
from internsp.base.sizes import meant_size

Names = Mapping[str, tuple[str, ...]]
Schema = Mapping[str, Any]
"""The JSON schema of a key, from pydantic: type, choices, default, description."""

LARGEST_FILE = 1 << 20  # bytes; a configuration with every key takes 10 thousand
_ITS_KEYS = "; its keys: "
_LONGEST_WORD = 80  # characters of a name that a message shows
_MOST_ITEMS = 8  # entries of a list that a message shows

# Names of our keys in other projects, which similar spelling alone would not find.
ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "clip_grad_norm": "optimizer.max_grad_norm",
    "num_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "num_attention_heads": "model.heads",
    "num_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
    "num_kv_attention_heads": "model.kv_heads",
    "seq_len": "data.sequence_length",
    "max_seq_len": "data.sequence_length",
    "total_steps": "train.steps",
    "max_steps": "train.steps",
    "micro_num": "train.micro_batches",
    "gradient_accumulation_steps": "train.micro_batches",
    "batch_size": "train.global_batch",
    "nproc_per_node": "launch.processes",
    "hidden_dropout": "model.dropout",
    "resid_pdrop": "model.dropout",
    "drop_rate": "model.dropout",
    "embd_pdrop": "model.embedding_dropout",
}
# Options that do not exist here, by their names elsewhere.
_ATTENTION = (
    "there is none: attention kernels draw masks of their own, which would differ from mesh to "
    "mesh; model.dropout drops of what attention adds"
)
ABSENT = dict.fromkeys(("attention_dropout", "attn_dropout", "attn_pdrop", "attn_drop_rate"),
                       _ATTENTION)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A mistake. ``keys`` are the ``section.key`` names that it concerns, the main one first."""

    keys: tuple[str, ...]
    text: str
    prefix: str = ""

    def __str__(self) -> str:
        shown = f"{self.prefix}{self.keys[0]}: {self.text}" if self.keys else self.text
        # One line, whatever a key or a value contains (a quoted key may be any text).
        if shown.isprintable():
            return shown
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)


def read_toml(path: Path, problems: list[Problem]) -> dict[str, Any] | None:
    """Parse the file; ``None`` and one more problem if that fails."""
    try:
        with path.open("rb") as file:  # the path may be a pipe, or a device without an end
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            problems.append(Problem((), f"more than {LARGEST_FILE} bytes: not a configuration"))
            return None
        return tomllib.loads(data.decode("utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        problems.append(Problem((), f"not valid TOML: {error}"))
    except UnicodeDecodeError:
        problems.append(Problem((), "not a text file in UTF-8"))
    except FileNotFoundError:
        problems.append(Problem((), f"no such file{_nearest_file(path)}"))
    except OSError as error:
        problems.append(Problem((), f"cannot be read: {error.strerror}"))
    except RecursionError:
        problems.append(Problem((), "not a configuration: lists or tables nested too deeply"))
    except ValueError as error:  # a number of thousands of digits, a NUL in the name of the file
        problems.append(Problem((), f"cannot be read: {error}"))
    return None


def _nearest_file(path: Path) -> str:
    """A hint at a file in the same folder with a similar name."""
    siblings = []
    with suppress(OSError):
        siblings = [p.name for p in path.parent.iterdir() if p.suffix == ".toml"]
    found = difflib.get_close_matches(path.name, siblings, n=1)
    return f"; did you mean {path.with_name(found[0])}?" if found else ""


def nearest_key(section: str, key: str, names: Names, prefix: str = "") -> Problem:
    """The problem of an unknown ``key`` in a known ``section``."""
    full = {f"{s}.{k}": k for s, keys in names.items() for k in keys}
    word = plain(key)
    if word in ABSENT:
        return Problem((f"{section}.{_short(key)}",), f"unknown key; {ABSENT[word]}", prefix)
    elsewhere = ELSEWHERE.get(word) or next((f for f, k in full.items() if k == word), None)
    near = nearest(key, names[section])
    if elsewhere is None and near is None:
        # Only the name of another key can be meant now; be strict, since there are many.
        found = difflib.get_close_matches(word, list(full.values()), n=1, cutoff=0.75)
        elsewhere = next((f for f, k in full.items() if found and k == found[0]), None)
    right = elsewhere or (f"{section}.{near}" if near else None)
    text = "unknown key"
    text += f"; did you mean {prefix}{right}?" if right else _ITS_KEYS + ", ".join(names[section])
    return Problem((f"{section}.{_short(key)}",), text, prefix)


def listed_once(problems: Iterable[Problem]) -> list[Problem]:
    """The same problems, listing the keys of a section only at its first unknown key."""
    listed: set[str] = set()
    found = []
    for problem in problems:
        text, mark, names = problem.text.partition(_ITS_KEYS)
        found.append(replace(problem, text=text) if mark and names in listed else problem)
        listed.add(names)
    return found


def nearest_section(
    written: str, keys: tuple[str, ...], names: Names, prefix: str = ""
) -> tuple[str, Problem]:
    """The section that ``written`` most likely means (or ``""``), and the problem to report."""
    near = nearest(written, tuple(names))
    if near is None and keys:
        near = next((s for s, own in names.items() if set(keys) <= set(own)), None)
    if prefix:
        name = ".".join((_short(written), *(_short(key) for key in keys[:1])))
        if near is None:
            options = ", ".join(f"--{section}.*" for section in names)
            return "", Problem((name,), f"unknown option; expected one of {options}", prefix)
        key = nearest(keys[0], names[near]) if keys else None
        text = f"unknown option; did you mean --{near}.{key or '*'}?"
        return near, Problem((name,), text, prefix)
    hint = f"did you mean [{near}]?" if near else f"sections: {', '.join(names)}"
    return near or "", Problem((f"[{_short(written)}]",), f"unknown section; {hint}")


def not_a_section(written: str, names: Names, prefix: str = "") -> Problem:
    """The problem of a value at the top level of the file, where only sections are allowed."""
    if written in names:
        return Problem((written,), f"is a section: write [{written}] and its keys below", prefix)
    owner = ELSEWHERE.get(written) or next(
        (f"{section}.{written}" for section, keys in names.items() if written in keys), None
    )
    near = nearest(written, [f"{s}.{k}" for s, keys in names.items() for k in keys])
    right = owner or near
    hint = f"; did you mean {prefix}{right}?" if right else ""
    text = "unknown option" if prefix else "is outside any section"
    return Problem((_short(written),), text + hint, prefix)


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
        if context["pattern"] == FOLDER_NAME:
            return f"must be usable as the name of a folder, {got}"
        return f"must be a text without a NUL character, {got}"
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
    words = {"weight_parallel.plan": "rule", "optimizer.groups": "group"}
    where = f"{words.get(name, 'table')} {number + 1}"
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


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_WORD else f"{name[: _LONGEST_WORD - 3]}..."
