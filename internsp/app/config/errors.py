"""Mistakes in a configuration, in plain words: what is wrong, where, and the nearest valid name."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from internsp.base.names import nearest, plain
from internsp.config.former import answer
from internsp.config.words import one_line

Names = Mapping[str, tuple[str, ...]]

LARGEST_FILE = 1 << 20  # bytes; a configuration with every key takes 10 thousand
_ITS_KEYS = "; its keys: "
_LONGEST_WORD = 80  # characters of a name that a message shows

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
}
# Options that do not exist here, by their names elsewhere.
_ATTENTION = (
    "there is none: attention kernels draw masks of their own, which would differ from mesh to "
    "mesh; model.dropout drops of what attention adds"
)
ABSENT = dict.fromkeys(
    ("attention_dropout", "attn_dropout", "attn_pdrop", "attn_drop_rate"), _ATTENTION
)


@dataclass(frozen=True)
class Problem:
    """A mistake. ``keys`` are the ``section.key`` names that it concerns, the main one first."""

    keys: tuple[str, ...]
    text: str
    prefix: str = ""

    def __str__(self) -> str:
        shown = f"{self.prefix}{self.keys[0]}: {self.text}" if self.keys else self.text
        return one_line(shown)


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
    elsewhere = ELSEWHERE.get(word) or next((f for f, k in full.items() if k == word), None)
    near = nearest(key, names[section])
    told = ABSENT.get(word) or answer(section, key)
    if told is None and elsewhere is None and near is None:
        told = answer("", key)
    if told:
        return Problem((f"{section}.{_short(key)}",), f"unknown key; {told}", prefix)
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
    told = ABSENT.get(plain(written)) or (None if owner else answer("", written))
    hint = f"; {told}" if told else hint
    text = "unknown option" if prefix else "is outside any section"
    return Problem((_short(written),), text + hint, prefix)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_WORD else f"{name[: _LONGEST_WORD - 3]}..."
