"""Commands in documents: the tool, the configuration and every option that they use exist."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from internsp.app.cli import command, plain
from internsp.app.config import sections

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "internsp/wp/README.md")),
    *(ROOT / "docs").rglob("*.md"),
]
OWN = {**command._COMMANDS, **plain.COMMANDS}
KEYS = {f"{name}.{key}" for name, section in sections().items() for key in section.model_fields}


def commands(text: str) -> Iterator[str]:
    """Command lines of a document: in its blocks and quoted, each as one line."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [line.strip().removeprefix("$ ") for line in lines]
    found += re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    for line in found:
        if re.match(r"(\S*/)?(internsp|python|torchrun|srun|sh) \S", line):
            yield re.sub(r"\s+", " ", line)


def options_in(words: str) -> list[str]:
    return re.findall(r"(?<=\s)--([a-z][\w.-]*)", words)


def source_of(tool: str) -> str:
    """The files in which a tool may declare an option: its file, its package, shared options."""
    path = ROOT / (tool if tool.endswith(".py") else tool.replace(".", "/"))
    files = [path] if path.is_file() else [*path.glob("*.py"), path.with_suffix(".py")]
    own = [file.read_text() for file in files if file.is_file()]
    shared = [file.read_text() for file in (ROOT / "tools" / "overlap").glob("*.py")]
    return "".join([*own, *shared]) if own else ""


def mistakes(line: str) -> list[str]:
    """Names in a command that do not exist."""
    if tool := re.search(r"python\S* (?:-m )?((?:tools|tests)\b[\w./]*)", line):
        source = source_of(tool[1])
        told = [option.removeprefix("no-") for option in options_in(line)]  # tyro's negated form
        names = [rf"\b({option}|{option.replace('-', '_')})\b" for option in told]
        absent = [
            f"--{o}" for o, name in zip(told, names, strict=True) if not re.search(name, source)
        ]
        return absent if source else [f"no {tool[1]}"]
    ours = re.search(r"\binternsp (\w+)", line)
    if not ours or ours[1] not in OWN:
        return []
    known = {field.name for field in dataclasses.fields(OWN[ours[1]])} | {"help"} | KEYS
    configs = re.findall(r"configs/\w+\.toml", line)
    return [
        *(f"--{option}" for option in options_in(line[ours.end() :]) if option not in known),
        *(path for path in configs if not (ROOT / path).is_file()),
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_of_a_document_name_what_there_is(document: Path) -> None:
    assert [(c, wrong) for c in commands(document.read_text()) if (wrong := mistakes(c))] == []


def test_commands_are_found_and_what_is_not_there_too() -> None:
    every = [line for document in DOCUMENTS for line in commands(document.read_text())]
    assert len(every) > 40
    assert mistakes("internsp train configs/nowhere.toml --train.stepps 3 --resume auto") == [
        "--train.stepps", "configs/nowhere.toml",
    ]  # fmt: skip
    assert mistakes("python -m tools.nothing --x 3") == ["no tools.nothing"]
    assert mistakes("python -m tests.nothing") == ["no tests.nothing"]
    assert mistakes("python -m tests.families --familly llama") == ["--familly"]
    assert mistakes("python -m tools.bench_overlap --preset even --pictures x") == ["--pictures"]
    assert mistakes("python tools/bench_overhead.py") == []
