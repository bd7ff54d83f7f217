"""Links, paths and sections that documents, docstrings and comments name exist."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.unit.test_structure import FLOORS

ROOT = Path(__file__).parents[2]
DESIGN = ROOT / "docs" / "dev" / "design.md"

FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]+))?\)")
QUOTED = re.compile(r"(?<!`)(`{1,2})([^`]+)\1(?!`)")
# A path needs a folder, unless it is quoted; what a run writes has other endings.
PATH = re.compile(r"(?<![\w./<*~$-])((?:\.\./)*(?:[\w.-]+/)+[\w-]+\.(?:py|md))\b(?![\w/*<])")
NAME = re.compile(r"[\w-]+\.py")
FOLDER = re.compile(r"(?:[a-z_]\w*/)+")
CITED = re.compile(r"\bdesign\.md (\d+(?:\.\d+)?)((?:, \d+(?:\.\d+)?)*)")
DOTTED = re.compile(r"(?<![\w.~/-])internsp(?:\.[A-Za-z_]\w*)+")
HINT = re.compile(r"\w\.(?:py|md)\b|internsp\.\w")
# A room, or a folder of the checkout, and what lies in it: a folder, or a module without `.py`.
INSIDE = re.compile(r"(\w+)(?:/\w+)+")
TOP = {"internsp", "model_zoo", "tests", "tools", "docs", "examples", "configs", "ranks", "unit"}
ROOMS = {name.replace(".", "/") for floor in FLOORS for name in floor}
# Below these a path may begin, besides the folder of the file that names it.
BASES = (".", "internsp", "internsp/app", "tests", "tests/ranks")
# What commands write, and examples of a reader's own files.
WRITTEN = re.compile(r"(?:runs|checkpoints|site|DIR|my_\w+)/.*|my_\w+\.py")


@cache
def tracked() -> frozenset[str]:
    """The repository's files, and their folders with ``/`` at the end."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = done.stdout.split("\n") if done.returncode == 0 else []
    files = [file for file in files if file and (ROOT / file).exists()]
    if not files:
        pytest.skip("not a checkout: git does not list its files")
    folders = {f"{folder}/" for file in files for folder in Path(file).parents}
    return frozenset(files) | folders


def exists(path: str) -> bool:
    """Whether a path, relative to the root, is a file or (with ``/`` at its end) a folder."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and parts:
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts) + ("/" if path.endswith("/") else "") in tracked()


def slugs(text: str) -> set[str]:
    """Anchors of a document's headings, as GitHub and the site make them."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).lower() for head in heads]
    return {re.sub(r"[^\w\- ]", "", head).strip().replace(" ", "-") for head in plain}


def broken_links(text: str, document: str) -> Iterator[str]:
    folder = Path(document).parent.as_posix()
    for path, anchor in LINK.findall(FENCE.sub("", text)):
        target = f"{folder}/{path}" if path else document
        if path and not exists(target) and not exists(f"{target.rstrip('/')}/"):
            yield path
        elif anchor and target.endswith(".md"):
            if anchor not in slugs((ROOT / target).read_text() if path else text):
                yield f"{path}#{anchor}"


def missing_paths(text: str, file: str, readers: Collection[str] = ()) -> Iterator[str]:
    """Paths in a paragraph or a docstring of ``file`` that lead nowhere.

    A bare name may be in a folder that the same paragraph names, by a path or as a link, or be one
    of ``readers``, the files that a page has its reader write.
    """
    own = Path(file).parent.as_posix()
    named = {match[1] for match in PATH.finditer(text)}
    quoted = [match[2].strip() for match in QUOTED.finditer(text)]
    bases = (*BASES, own)

    def found(path: str, where: tuple[str, ...] = bases) -> bool:
        return bool(WRITTEN.fullmatch(path)) or any(exists(f"{base}/{path}") for base in where)

    yield from sorted(path for path in named if not found(path))
    folders = {str(Path(base) / Path(path).parent) for path in named for base in bases}
    folders |= {f"internsp/{word}" for word in quoted if word in ROOMS}
    folders |= {str(Path(own) / Path(link).parent) for link, _ in LINK.findall(text) if link}
    for word in quoted:
        if NAME.fullmatch(word) and word not in readers and not found(word, (*bases, *folders)):
            yield word
        if file.endswith(".md") and FOLDER.fullmatch(word) and not found(word):
            yield word
        inside = INSIDE.fullmatch(word)
        if inside and inside[1] in {room.split("/")[0] for room in ROOMS} | TOP:
            if not found(f"{word}/") and not found(f"{word}.py"):
                yield word


@cache
def sections() -> frozenset[str]:
    """Numbers of the design's sections."""
    return frozenset(re.findall(r"^##+ (\d+(?:\.\d+)?)\.? ", DESIGN.read_text(), re.MULTILINE))


def wrong_sections(text: str) -> Iterator[str]:
    """Sections of the design that are cited and are not there."""
    for first, more in CITED.findall(text):
        cited = [first, *re.findall(r"[\d.]+", more)]
        yield from (f"design.md {number}" for number in cited if number not in sections())


def unknown_modules(text: str) -> Iterator[str]:
    """Dotted names whose room, module or name is not there."""
    for dotted in DOTTED.findall(text):
        path = "internsp"
        for part in dotted.split(".")[1:]:
            if exists(f"{path}/{part}/"):
                path = f"{path}/{part}"
            elif exists(f"{path}/{part}.py"):
                path = f"{path}/{part}.py"
            else:
                source = ROOT / (path if path.endswith(".py") else f"{path}/__init__.py")
                if not re.search(rf"\b{part}\b", source.read_text()):
                    yield dotted
                break


def paragraphs(text: str) -> list[str]:
    """Paragraphs of a document; each row of a table is one."""
    rows = re.sub(r"^\|", "\n|", FENCE.sub("", text), flags=re.MULTILINE)
    return re.split(r"\n\s*\n", rows)


def docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    yield ast.get_docstring(node) or ""
    for inner in node.body:
        if isinstance(inner, ast.ClassDef | ast.FunctionDef):
            yield from docstrings(inner)


def prose(source: str) -> Iterator[str]:
    """Docstrings and comments of a Python file, comments of consecutive lines together.

    Most files name nothing, and are not parsed.
    """
    if not HINT.search(re.sub(r"^ *(from|import) .*", "", source, flags=re.MULTILINE)):
        return
    yield from docstrings(ast.parse(source))
    if not re.search(rf"#.*({HINT.pattern})", source):
        return
    last, lines = -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield "\n".join(lines)
                lines = []
            lines.append(token.string.lstrip("# "))
            last = token.start[0]
    yield "\n".join(lines)


def wrong_in_document(text: str, document: str) -> list[str]:
    found = [*broken_links(text, document), *wrong_sections(text)]
    if document != "CHANGES.md":  # it also says what was
        blocks = "".join(match.group() for match in FENCE.finditer(text))
        readers = set(NAME.findall(blocks))
        found += [one for p in paragraphs(text) for one in missing_paths(p, document, readers)]
    return found


def wrong_in_source(source: str, file: str) -> list[str]:
    found: list[str] = []
    for text in filter(HINT.search, prose(source)):
        found += [*missing_paths(text, file), *wrong_sections(text), *unknown_modules(text)]
    return found


def files(ending: str) -> list[str]:
    """Tracked files whose names are this repository's: those of tests/data/published are not."""
    own = (file for file in tracked() if not file.startswith("tests/data/published/"))
    return sorted(file for file in own if file.endswith(ending))


def test_what_documents_link_to_and_name_is_there() -> None:
    every = {file: wrong_in_document((ROOT / file).read_text(), file) for file in files(".md")}
    assert len(every) > 30
    assert {file: wrong for file, wrong in every.items() if wrong} == {}


def test_pages_for_users_are_short() -> None:
    """Those of the development may be tables of a thousand rows."""
    pages = [file for file in files(".md") if re.match(r"docs/(?!dev/)", file)]
    lines = {file: len((ROOT / file).read_text().splitlines()) for file in pages}
    assert len(lines) > 25
    assert {file: number for file, number in lines.items() if number > 250} == {}


def test_what_docstrings_and_comments_name_is_there() -> None:
    every = {file: wrong_in_source((ROOT / file).read_text(), file) for file in files(".py")}
    assert {file: wrong for file, wrong in every.items() if wrong} == {}


def test_the_designs_rooms_stand_on_the_floors_of_the_code() -> None:
    rows = re.findall(r"^\| `([\w/]+)` \| (\d+) \|", DESIGN.read_text(), re.MULTILINE)
    floors = {
        name.replace(".", "/"): floor for floor, names in enumerate(FLOORS, 1) for name in names
    }
    assert {room: int(floor) for room, floor in rows} == floors


TEXT = "# One, `two`\n\n[a](dev/fuzz.md#campaigns) [b](dev/fuzz.md) [c](../README.md) "
TEXT += "[d](#one-two) [e](https://x.y)\n"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        pytest.param("", [], id="nothing"),
        pytest.param("[x](plans.md)", ["plans.md"], id="no such document"),
        pytest.param("[x](../internsp/wp/slot.py)", ["../internsp/wp/slot.py"], id="no such file"),
        pytest.param("[x\ny](dev/fuzz.md#unit)", ["dev/fuzz.md#unit"], id="no such anchor there"),
        pytest.param("[x](#two)", ["#two"], id="no such anchor here"),
        pytest.param("```\n[x](plans.md)\n```", [], id="in a code block"),
        pytest.param("[x](dev) [y](../internsp/wp/)", [], id="a folder"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(text: str, wrong: list[str]) -> None:
    assert list(broken_links(f"{TEXT}\n{text}", "docs/x.md")) == wrong


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        pytest.param("`wp/slots.py`, internsp/wp/slots.py, `cli/plain.py`", [], id="by its room"),
        pytest.param("`test_life.py`, tests/ranks/test_life.py", [], id="tests"),
        pytest.param("(`structure/blocks.py`, `rules.py`)", [], id="in a folder named before"),
        pytest.param("`wp` has `slots.py`", [], id="in a room named before"),
        pytest.param("| [`slots.py`](../internsp/wp/slots.py) |", [], id="in a linked folder"),
        pytest.param("in wp/slot.py.", ["wp/slot.py"], id="no such file"),
        pytest.param("of ../internsp/x/y.py", ["../internsp/x/y.py"], id="no such file upward"),
        pytest.param("``slots.py`` alone", ["slots.py"], id="a bare name without its folder"),
        pytest.param("`layers/` and `sp/hf/`", [], id="folders"),
        pytest.param("`agreement/`", ["agreement/"], id="no such folder"),
        pytest.param("`sp/hf`, `wp/slots`, `ranks/test_life`", [], id="without an ending"),
        pytest.param("`app/hf`, `wp/slot`", ["app/hf", "wp/slot"], id="nothing without an ending"),
        pytest.param("`runs/demo/report.py`, `my_loop.py`, `mine.py`", [], id="a reader's own"),
        pytest.param("https://x.org/a/b.py and torch's a/<b>/c.py", [], id="no path of ours"),
    ],
)
def test_a_path_that_leads_nowhere_is_found(text: str, wrong: list[str]) -> None:
    assert list(missing_paths(text, "docs/x.md", {"mine.py"})) == wrong


def test_in_a_source_docstrings_and_comments_are_read_and_nothing_else() -> None:
    source = '''"""See wp/slot.py."""
import internsp.wp.slot
def f():
    """In :mod:`internsp.wp.slot`, :class:`internsp.wp.slots.MemoryPool`; as design.md 4.1, 4.9."""
    return "wp/no.py"  # as plan/
#
# In ``wp`` there is
# ``sloth.py``, and design.md 77
'''
    wrong = ["wp/slot.py", "design.md 4.9", "internsp.wp.slot", "sloth.py", "design.md 77"]
    assert wrong_in_source(source, "tests/unit/test_x.py") == wrong
    assert wrong_in_source(source.replace("slot.py", "slots.py"), "x.py") == wrong[1:]


def test_every_check_runs_on_a_document() -> None:
    text = "`wp/slot.py`\n\n```\nwp/no.py own.py\n```\n[x](no.md) of `own.py`, design.md 99\n"
    assert wrong_in_document(text, "docs/x.md") == ["no.md", "design.md 99", "wp/slot.py"]
    assert wrong_in_document(text, "CHANGES.md") == ["no.md", "design.md 99"]
