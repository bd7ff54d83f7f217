"""Mistakes in a configuration, in plain words: what is wrong, where, and the nearest valid name."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from internsp.base.names import nearest, plain
from internsp.config.former import answer
from internsp.config.words import one_line, section_name, unknown_key

Names = Mapping[str, tuple[str, ...]]

LARGEST_FILE = 1 << 20  # bytes; a configuration with every key takes 20 thousand
_LONGEST_WORD = 80  # characters of a name that a message shows

# Names of our keys in other projects, which similar spelling alone would not find.
ELSEWHERE = {
    "batch_size": "train.global_batch",
    "clip_grad_norm": "optimizer.max_grad_norm",
    "gradient_accumulation_steps": "train.micro_batches",
    "learning_rate": "optimizer.lr",
    "max_seq_len": "data.sequence_length",
    "max_steps": "train.steps",
    "micro_num": "train.micro_batches",
    "nproc_per_node": "launch.processes",
    "num_attention_heads": "model.heads",
    "num_hidden_layers": "model.layers",
    "num_key_value_heads": "model.kv_heads",
    "num_layers": "model.layers",
}
_ATTENTION_DROPOUT = (
    "there is none: attention kernels draw masks of their own, which would differ from mesh to "
    "mesh; model.dropout drops of what attention adds"
)


@dataclass(frozen=True)
class Problem:
    """A mistake. ``keys`` are the ``section.key`` names that it concerns, the main one first."""

    keys: tuple[str, ...]
    text: str
    prefix: str = ""

    def __str__(self) -> str:
        shown = f"{self.prefix}{_short(self.keys[0])}: {self.text}" if self.keys else self.text
        return one_line(shown)


def read_toml(path: Path, problems: list[Problem]) -> dict[str, Any] | None:
    """Parse the file; ``None`` and one more problem if that fails."""
    try:
        with path.open("rb") as file:  # the path may be a pipe, or a device without an end
            data = file.read(LARGEST_FILE + 1)
        if len(data) <= LARGEST_FILE:
            return tomllib.loads(data.decode("utf-8-sig"))
        problems.append(Problem((), f"more than {LARGEST_FILE} bytes: not a configuration"))
    except OSError as error:
        problems.append(Problem((), f"cannot be read: {error.strerror}"))
    except (ValueError, RecursionError) as error:  # no UTF-8, a number of thousands of digits
        problems.append(Problem((), f"not valid TOML: {error}"))
    return None


def nearest_key(names: Names, prefix: str, cls: type[BaseModel], key: str) -> str:
    """What is told of a ``key`` that a section or a table does not have."""
    section = section_name(cls)
    if section not in names:
        return unknown_key(cls, key)
    hint = _meant(names, prefix, section, key)
    return f"unknown key; {hint}" if hint else unknown_key(cls, key)


def _meant(names: Names, prefix: str, section: str, key: str) -> str:
    """What became of a ``key``, or which one is meant; empty if nothing is like it.

    Args:
        section: where it is written; empty: outside any.
    """
    word = plain(key)
    if re.match(r"att.*drop", word):
        return _ATTENTION_DROPOUT
    if section and (told := answer(section, key)):
        return told
    full = {f"{s}.{k}": k for s, keys in names.items() for k in keys}
    right = ELSEWHERE.get(word) or next((f for f, k in full.items() if k == word), None)
    if right is None and (near := nearest(key, names.get(section, ()))):
        right = f"{section}.{near}"
    if right is None:
        # Only the name of another key can be meant now; be strict, since there are many.
        found = difflib.get_close_matches(word, list(full.values()), n=1, cutoff=0.75)
        right = next((f for f, k in full.items() if found and k == found[0]), None)
    return f"did you mean {prefix}{right}?" if right else answer("", key) or ""


def nearest_section(
    written: str, keys: tuple[str, ...], names: Names, prefix: str = ""
) -> tuple[str, Problem]:
    """The section that ``written`` most likely means (or ``""``), and the problem to report."""
    near = nearest(written, tuple(names))
    if near is None and keys:
        near = next((s for s, own in names.items() if set(keys) <= set(own)), None)
    if prefix:
        name = ".".join((_short(written), *keys[:1]))
        if near is None:
            options = ", ".join(f"--{section}.*" for section in names)
            return "", Problem((name,), f"unknown option; expected one of {options}", prefix)
        key = nearest(keys[0], names[near]) if keys else None
        text = f"unknown option; did you mean --{near}.{key or '*'}?"
        return near, Problem((name,), text, prefix)
    hint = f"did you mean [{near}]?" if near else f"sections: {', '.join(names)}"
    return near or "", Problem((f"[{written}]",), f"unknown section; {hint}")


def not_a_section(written: str, names: Names, prefix: str = "") -> Problem:
    """The problem of a value at the top level of the file, where only sections are allowed."""
    if written in names:
        return Problem((written,), f"is a section: write [{written}] and its keys below", prefix)
    hint = _meant(names, prefix, "", written)
    text = "unknown option" if prefix else "is outside any section"
    return Problem((written,), f"{text}; {hint}" if hint else text, prefix)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_WORD else f"{name[: _LONGEST_WORD - 3]}..."
