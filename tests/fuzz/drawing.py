"""A case of the configuration fuzzer: a file, options, an environment, text, a folder."""

from __future__ import annotations

import contextlib
import datetime
import gzip
import json
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli_w

from internsp.app.config import sections
from internsp.config.words import keys_of, metavar

# Below this a configuration is valid, small, and planned in milliseconds.
SMALL: dict[str, dict[str, Any]] = {
    "model": {"hidden_size": 16, "layers": 2, "heads": 2, "intermediate_size": 32},
    "data": {"sequence_length": 8},
    "train": {"global_batch": 8},
    "weight_parallel": {"min_shard_elements": 64},
}
NUMBERS: list[Any] = [
    0, 1, 2, 3, 4, 5, 8, 12, 16, 64, 2**11, 2**16, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1,
    2**63, 2**64, 10**30, 10**400, -1, -2, -(2**63), 0.0, -0.0, 0.5, 1.0, 1.5, -0.1, 1e-320,
    1e-30, 1e-8, 0.999999, 1e30, 1e308, math.inf, -math.inf, math.nan,
]  # fmt: skip
TEXTS = [
    "", " ", "none", "None", "true", "0", "2", "1e3", "nan", "inf", "-1", "auto", "cpu", "a/b",
    "..", ".", "/", "~", "a\x00b", "a\nb", "\x1b[31mred", "é", "日本語", "🙂", "\u202e", "x" * 300,
    "x" * 5000, "{}", "{0}", "%s", "[bold]", "--train.steps", "*", "[", "**/*", "[!", "\\",
    "all", "2 GiB", "3 kb",
]  # fmt: skip
OTHERS: list[Any] = [
    True, False, [], [1], [0, 1], ["a"], [[]], [[1], ["a"]], {}, {"a": 1}, {"steps": 3},
    datetime.date(2024, 2, 29), datetime.datetime(2024, 1, 1, 12, 0), datetime.time(1, 2),
    list(range(1000)), ["*"] * 200,
]  # fmt: skip


@dataclass
class Drawn:
    """One case; ``told`` describes in words what was changed."""

    config: Path
    output: Path
    overrides: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    joins: bool = True
    plans: bool = False
    told: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [*self.told, f"overrides {self.overrides!r:.500}", f"around {self.environment!r}"]
        if self.config.is_file() and self.config.stat().st_size < 4000:
            lines.append(repr(self.config.read_bytes()))
        return "\n".join(lines)


def draw(rng: random.Random, home: Path) -> Drawn:
    """Create the files of a case below ``home`` (the current folder) and return the case."""
    drawn = Drawn(home / "run.toml", Path("runs/run"))
    drawn.plans = rng.random() < 0.03
    values = {name: dict(keys) for name, keys in SMALL.items()}
    for _ in range(rng.choice((0, 0, 1, 1, 1, 1, 2, 4))):
        # An earlier change may have replaced the section by something else.
        with contextlib.suppress(TypeError, AttributeError):
            rng.choice(_MUTATIONS)(rng, values, drawn)
    if rng.random() < 0.25:
        _draw_text(rng, values, home, drawn)
    content = tomli_w.dumps(values).encode("utf-8", "surrogateescape")
    if rng.random() < 0.12:
        content = _damaged(rng, content, drawn)
    drawn.config.write_bytes(content)
    if rng.random() < 0.03:
        _misplaced(rng, drawn)
    if rng.random() < 0.15:
        _draw_output(rng, home, drawn)
    if rng.random() < 0.1:
        _draw_environment(rng, drawn)
    return drawn


def _key(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(list(sections()))
    return name, rng.choice(list(keys_of(sections()[name])))


def _value(rng: random.Random, name: str, key: str) -> Any:
    """A value for a field; of the right type in about half of all cases."""
    field = keys_of(sections()[name])[key]
    kind = rng.random()
    if kind < 0.3:
        form = metavar(field.annotation)
        if form.startswith("{") and field.annotation is not bool:
            return rng.choice(form[1:].partition("}")[0].split(","))
        default = field.get_default()
        if isinstance(default, bool):
            return not default
        if isinstance(default, (int, float)):
            return rng.choice((default, default * 2, type(default)(default / 2)))
        return "none" if default is None else default
    return rng.choice(NUMBERS if kind < 0.65 else TEXTS if kind < 0.85 else OTHERS)


def _set(rng: random.Random, values: dict[str, Any], drawn: Drawn) -> None:
    name, key = _key(rng)
    value = _value(rng, name, key)
    drawn.told.append(f"{name}.{key} = {_short(value)}")
    values.setdefault(name, {})[key] = value


def _override(rng: random.Random, values: dict[str, Any], drawn: Drawn) -> None:
    """A value as on the command line: one text, or several."""
    name, key = _key(rng)
    value = _value(rng, name, key)
    if rng.random() < 0.8 and not isinstance(value, (list, int)):
        value = str(value)
    elif isinstance(value, list):
        value = tuple(str(v) for v in value[:20])
    elif isinstance(value, int) and value.bit_length() > 10_000:
        value = str(7)
    written = f"{name}.{key}" if rng.random() < 0.8 else _misspelled(rng, f"{name}.{key}")
    drawn.overrides[written] = value
    drawn.told.append(f"--{written} {_short(value)}")


def _unknown(rng: random.Random, values: dict[str, Any], drawn: Drawn) -> None:
    name, key = _key(rng)
    how = rng.randrange(5)
    if how == 0:
        values.setdefault(name, {})[_misspelled(rng, key)] = rng.choice(NUMBERS)
    elif how == 1:
        values[_misspelled(rng, name)] = {key: rng.choice(NUMBERS)}
    elif how == 2:
        values[key] = rng.choice([1, "a", [1], {}])
    elif how == 3:
        values[name] = rng.choice([1, "a", [1], [{"a": 1}]])
    else:
        values.setdefault(name, {})[rng.choice(TEXTS)] = 1
    drawn.told.append(f"unknown names around {name}.{key}")


def _misspelled(rng: random.Random, word: str) -> str:
    at = rng.randrange(len(word))
    return rng.choice((
        word[:at] + word[at + 1 :], word[:at] + word[at] + word[at:], word.upper(),
        word.replace("_", "-"), word + rng.choice(TEXTS), word * 200,
    ))  # fmt: skip


def _degrees(rng: random.Random, values: dict[str, Any], drawn: Drawn) -> None:
    """Degrees; they fit each other in about half of all cases."""
    size = rng.choice((1, 2, 3, 4, 6, 8, 12, 512))
    parallel = values.setdefault("parallel", {})
    if rng.random() < 0.5:
        size = rng.choice((2, 4, 8))
        parallel |= {"weight": rng.choice((1, 2, size)), "sequence": rng.choice((1, 2))}
        values.setdefault("launch", {})["processes"] = size
        drawn.told.append(f"degrees {parallel} of {size}")
        return
    keys = ("weight", "sequence", "pipeline", "optimizer_ranks", "expert", "expert_weight")
    for key in rng.sample(keys, 2):
        parallel[key] = rng.choice((1, 2, 2, 3, 4, size))
    values.setdefault("launch", {})["processes"] = size
    values.setdefault("train", {})["global_batch"] = rng.choice((8, 24, 512, 2048))
    if rng.random() < 0.5:
        values["train"]["micro_batches"] = rng.choice((1, 2, 3, 4))
    if rng.random() < 0.3:
        values["model"]["layers"] = rng.choice((1, 2, 3, 4))
    drawn.told.append(f"degrees {parallel} of {size}")


def _extreme(rng: random.Random, values: dict[str, Any], drawn: Drawn) -> None:
    """Sizes that are valid individually."""
    for name, key in rng.sample((
        ("model", "hidden_size"), ("model", "vocab_size"), ("model", "layers"), ("model", "heads"),
        ("model", "head_dim"), ("model", "intermediate_size"), ("data", "sequence_length"),
        ("train", "global_batch"), ("train", "micro_batches"), ("train", "steps"),
        ("launch", "processes"), ("weight_parallel", "prefetch_depth"),
        ("weight_parallel", "coalesce_bytes"), ("weight_parallel", "keep_unsharded"),
    ), 2):  # fmt: skip
        values.setdefault(name, {})[key] = 1 << rng.randrange(34)
    drawn.told.append("extreme sizes")


_MUTATIONS: tuple[Callable[[random.Random, dict[str, Any], Drawn], None], ...] = (
    _set, _set, _set, _override, _override, _unknown, _degrees, _degrees, _degrees, _extreme,
)  # fmt: skip


def _damaged(rng: random.Random, content: bytes, drawn: Drawn) -> bytes:
    how = rng.randrange(12)
    at = rng.randrange(len(content) + 1)
    drawn.told.append(f"damage {how} of the TOML at {at}")
    if how == 0:
        return content[:at]
    if how == 1:
        return content[:at] + bytes([rng.randrange(256)]) + content[at:]
    if how == 2:
        return content[:at] + content[at + rng.randrange(20) :]
    if how == 3:
        return content + content  # every section twice
    if how == 4:
        encoding = rng.choice(("utf-16", "utf-8-sig", "cp037"))
        return content.decode("utf-8", "replace").encode(encoding, "replace")
    if how == 5:
        return rng.randbytes(rng.choice((1, 50, 3000)))
    if how == 6:
        return b""
    if how == 7:
        return b"a = " + b"[" * rng.choice((5, 3000)) + b"\n"
    if how == 8:
        return b"[train]\nsteps = " + b"9" * rng.choice((30, 6000)) + b"\n"
    if how == 9:
        return b"".join(b"[s%d]\nk%d = 1\n" % (i, i) for i in range(rng.choice((3, 2000))))
    if how == 10:
        return content.replace(b"=", rng.choice((b"==", b":", b"", b"=\n")), 1)
    return b"[train]\n" + b"\n".join(b'"k%d" = 1' % i for i in range(rng.choice((3, 2000))))


def _misplaced(rng: random.Random, drawn: Drawn) -> None:
    """Put something other than a file at the configuration's path."""
    path = drawn.config
    path.unlink()
    how = rng.randrange(6)
    drawn.told.append(f"configuration misplaced {how}")
    if how == 0:
        path.mkdir()
    elif how == 1:
        path.symlink_to("nowhere")
    elif how == 2:
        path.symlink_to(path.name)
    elif how == 3:
        drawn.config = path / "below"
    elif how == 4:
        drawn.config = Path("/dev/zero")
    else:
        drawn.config = Path("x" * rng.choice((300, 5000)) + rng.choice(("", "\x00")))


def _draw_environment(rng: random.Random, drawn: Drawn) -> None:
    drawn.joins = rng.random() < 0.7
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if rng.random() < 0.6:
            right = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29400", "WORLD_SIZE": "4"}
            usual = right.get(name, "0")
            wrong = rng.choice(("", "abc", "-1", "1.5", "99999999999999999999999", " 1", "٣", "²",
                                "1e2", "0", "8", "\udcff"))  # fmt: skip
            drawn.environment[name] = usual if rng.random() < 0.7 else wrong


def _draw_output(rng: random.Random, home: Path, drawn: Drawn) -> None:
    how = rng.randrange(12)
    drawn.told.append(f"output {how}")
    drawn.output = out = home / "out"
    if how == 0:
        out.write_text("a file")
    elif how == 1:
        out.symlink_to("nowhere")
    elif how == 2:
        out.symlink_to(out.name)
    elif how == 3:
        (home / "file").write_text("a file")
        drawn.output = home / "file" / "below" / "it"
    elif how == 4:
        (out / rng.choice(("config.toml", "metrics.jsonl", "report.html"))).mkdir(parents=True)
    elif how == 5:
        out.mkdir()
        (out / rng.choice(("checkpoints", "traces"))).write_text("a file")
    elif how == 6:
        out.mkdir()
        (out / "metrics.jsonl").write_text("an older run")
    elif how == 7:
        drawn.output = Path(rng.choice(("/proc/there", "/dev/null", "/sys/x", "/", ".", "..")))
    elif how == 8:
        drawn.output = Path("y" * 300)
    elif how == 9:
        drawn.output = Path("z" * 5000)
    elif how == 10:
        drawn.output = home / "a\x00b"
    else:
        os.mkfifo(out)


@lru_cache
def _parquet(kind: str) -> bytes:
    import io

    import pyarrow
    import pyarrow.parquet

    columns: dict[str, Any] = {
        "right": pyarrow.array([f"text number {i} of some" for i in range(40)]),
        "binary": pyarrow.array([b"\xff\xfe", b"b"]),
        "numbers": pyarrow.array([1, 2, 3]),
        "nothing": pyarrow.array(["a", None]),
        "empty": pyarrow.array([], pyarrow.string()),
    }
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": columns[kind]}), out)
    return out.getvalue()


def _rows(rng: random.Random) -> bytes:
    rows: list[Any] = [{"text": f"text number {i} of some", "n": i} for i in range(20)]
    for _ in range(rng.choice((0, 0, 1, 2))):
        odd = rng.choice((
            1, None, "a", [], {}, {"text": None}, {"text": 5}, {"text": ["a"]}, {"text": ""},
            {"text": "\ud800"}, {"text": "\x00"}, {"text": 10**50}, {"Text": "a"}, math.nan,
        ))  # fmt: skip
        rows[rng.randrange(len(rows))] = odd
    if rng.random() < 0.15:
        return json.dumps(rows).encode()
    lines = [json.dumps(row) for row in rows]
    if rng.random() < 0.1:
        lines[rng.randrange(len(lines))] = rng.choice(("[" * 5000, "9" * 6000, "{", "\x00", "nul"))
    return "\n".join(lines).encode()


def _draw_text(rng: random.Random, values: dict[str, Any], home: Path, drawn: Drawn) -> None:
    source = rng.choice(("text", "jsonl", "jsonl", "parquet"))
    name = {"text": "a.txt", "jsonl": "a.jsonl", "parquet": "a.parquet"}[source]
    if source == "parquet":
        kinds = ("right", "right", "right", "binary", "numbers", "nothing", "empty")
        content = _parquet(rng.choice(kinds))
    else:
        content = _rows(rng) if source == "jsonl" else b"some text to read, a line of it\n" * 20
    how = rng.randrange(14)
    drawn.told.append(f"{source}, damage {how}")
    content = _damaged_text(rng, content, how)
    if how == 6 and source == "jsonl":
        content, name = gzip.compress(content), f"{name}.gz"
        content = content[: rng.choice((len(content), len(content) // 2, 5))]
    folder = home / "data"
    folder.mkdir()
    name = _placed_text(folder, name, content, how)
    where = rng.choice((f"data/{name}", "data", str(folder), f"data/{name}"))
    data = values.setdefault("data", {})
    if isinstance(data, dict):
        data |= {"source": source, "paths": [where]}
        if rng.random() < 0.1:
            data["tokenizer"] = where


def _damaged_text(rng: random.Random, content: bytes, how: int) -> bytes:
    at = rng.randrange(len(content) + 1)
    if how == 0:
        return content[:at]
    if how == 1:
        return content[:at] + rng.randbytes(rng.choice((1, 1, 40))) + content[at:]
    if how == 2:
        return b""
    if how == 3:
        return content.decode("utf-8", "replace").encode("utf-16")
    if how == 4:
        return rng.randbytes(500)
    return b"\xef\xbb\xbf" + content if how == 5 else content


def _placed_text(folder: Path, name: str, content: bytes, how: int) -> str:
    """Write the file, or put something else at its path; returns its name."""
    path = folder / name
    if how == 7:
        path.mkdir()
    elif how == 8:
        path.symlink_to("nowhere")
    elif how == 9:
        path.symlink_to(path.name)
    elif how == 10:
        os.mkfifo(path)
    elif how == 11:
        path.symlink_to("/proc/self/mem")  # a file that cannot be read
    else:
        path.write_bytes(content)
    return f"gone{name}" if how == 12 else name


def _short(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 10_000:
        return "a very long number"
    return f"{value!r:.200}"
