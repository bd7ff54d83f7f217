"""Patterns of dotted names (of modules, parameters, blocks), and the nearest name to a wrong one.

All patterns in the configuration have the same syntax. A pattern is anchored: it must match a full
name, part by part, as paths do::

    *        any text within one part            layers.*        layers.3, not layers.3.mlp
    ?        one character within one part       layers.1?       layers.10, not layers.1
    {*}      one whole number                    layers.{*}      layers.12, not layers.last
    {a-b}    a whole number from a to b          layers.{0-3}    layers.3, not layers.30
    **       any number of parts, none too       **.experts      experts, layers.0.mlp.experts
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

MOST_NUMBERS = 10_000
"""Largest number of values of one ``{a-b}``."""
ANY_TEXT = r"^[^\x00]*$"
"""Regular expression of a text without a NUL character."""
FOLDER_NAME = r"^[^/\\\x00-\x1f]*[^/\\.\x00-\x1f][^/\\\x00-\x1f]*$"
"""Regular expression of one part of a path: not only dots, without control characters."""
_TOKEN = re.compile(r"\*|\?|\{\*\}|\{([0-9]{1,9})-([0-9]{1,9})\}|[^*?{}]")


_LONGEST_WORD = 80  # characters of a name for which the nearest one is searched


def plain(word: str) -> str:
    """``word`` normalized for comparison with names."""
    return word[:_LONGEST_WORD].replace("-", "_").lower()


def nearest(word: str, words: Sequence[str]) -> str | None:
    """The one of ``words`` that ``word`` most likely means; ``None`` if none is similar."""
    meant = plain(word)
    if meant in words:
        return meant
    found = difflib.get_close_matches(meant, words, n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """`` (did you mean NAME?)`` with the nearest of ``names``; empty where none is near."""
    near = nearest(word, list(dict.fromkeys(names)))
    return f" (did you mean {near!r}?)" if near else ""


def below(name: str, pattern: str) -> bool:
    """Whether ``pattern`` matches a parameter's name, or the name of a module that contains it."""
    return matches(name, pattern) or matches(name, f"{pattern}.**")


def matches(name: str, pattern: str) -> bool:
    """Whether a valid ``pattern`` (see :func:`mistake`) matches all of ``name``."""
    if "*" not in pattern and "?" not in pattern and "{" not in pattern:
        return name == pattern
    return _expression(pattern).fullmatch(f"{name}.") is not None


def ancestors(name: str) -> Iterator[str]:
    """``name``, then the names of the modules that contain it, without the model's, inner first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def within(name: str, pattern: str) -> bool:
    """Whether consecutive parts of a name match ``pattern``."""
    return matches(name, f"**.{pattern}.**")


def mistake(pattern: str) -> str | None:
    """What is wrong with ``pattern``; ``None`` if nothing is."""
    for part in pattern.split("."):
        if not part:
            return "has an empty part between its dots"
        if part != "**" and "**" in part:
            return "has ** beside other text: it stands for whole parts, between dots"
        if "[" in part:
            return "has a [: write {a-b} for numbers from a to b"
        for found in _TOKEN.finditer(part):
            if found[1] and not 0 <= int(found[2]) - int(found[1]) < MOST_NUMBERS:
                return f"has {found[0]}: write the smaller number first, {MOST_NUMBERS} at the most"
        if _TOKEN.sub("", part):
            return "has a brace that is neither {*} nor {a-b} (numbers from a to b)"
    return None


def checked(pattern: str) -> str:
    """``pattern`` itself, if it is valid.

    Raises:
        ValueError: :func:`mistake` finds something wrong.
    """
    if (wrong := mistake(pattern)) is not None:
        raise ValueError(f"{pattern!r} {wrong}")
    return pattern


@lru_cache(maxsize=4096)
def _expression(pattern: str) -> re.Pattern[str]:
    """For names with a dot behind each part."""
    any_parts = r"(?:[^.]*\.)*"
    pattern = re.sub(r"\*\*(?:\.\*\*)+", "**", pattern)  # says the same; many would take seconds
    return re.compile("".join(
        any_parts if part == "**" else "".join(map(_translated, _TOKEN.finditer(part))) + r"\."
        for part in pattern.split(".")
    ))  # fmt: skip


def _translated(token: re.Match[str]) -> str:
    text = token[0]
    if text in "*?":
        return "[^.]*" if text == "*" else "[^.]"
    if text[0] != "{":
        return re.escape(text)
    numbers = "[0-9]+"
    if token[1]:
        numbers = "|".join(map(str, range(int(token[1]), int(token[2]) + 1)))
    # A number is matched in full: {0-3} does not match the 3 of 13.
    return f"(?<![0-9])(?:{numbers})(?![0-9])"
