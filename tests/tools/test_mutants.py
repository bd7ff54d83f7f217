"""Faults that ``python -m tools.mutants`` puts in: what they are, what they leave alone, counts."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.mutants.__main__ import Options, drawn, report
from tools.mutants.campaign import Campaign, chunks
from tools.mutants.operators import Mutant, marked, mutants
from tools.mutants.record import Record, add, copied
from tools.mutants.worker import Worker


def of(body: str) -> dict[str, set[str]]:
    """The faults of a function by operator: the line ``body`` as each of them makes it."""
    source = f"def f(a, b, x):\n    {body}\n"
    found: dict[str, set[str]] = {}
    for one in mutants("m.py", source):
        line = ast.unparse(ast.parse(one.applied(source))).split("\n", 1)[1].strip()
        found.setdefault(one.operator, set()).add(" ".join(line.split()))
    return found


@pytest.mark.parametrize(
    ("body", "operator", "faults"),
    [
        ("x.y = a == b", "comparison", {"x.y = a != b"}),
        ("x.y = a < b", "comparison", {"x.y = a >= b"}),
        ("x.y = a < b", "bound", {"x.y = a <= b"}),
        ("x.y = a + b * x", "arithmetic", {"x.y = a - b * x", "x.y = a + b // x"}),
        ("a -= b", "arithmetic", {"a += b"}),
        ("x.y = 3", "constant", {"x.y = 4", "x.y = 2"}),
        ("x.y = True", "constant", {"x.y = False"}),
        ("x.y = a and b", "and/or", {"x.y = a or b"}),
        ("x.y = not a", "not", {"x.y = a"}),
        ("x.y = b if a else x", "condition", {"x.y = b if not a else x"}),
        ("return a", "return", {"return None"}),
        ("x.y(a, b, 1)", "arguments", {"x.y(b, a, 1)"}),
        ("x.y(a)", "deletion", {"pass"}),
        ("a = b", "deletion", {"pass"}),
    ],
)
def test_an_operator_makes_the_faults_that_it_names(
    body: str, operator: str, faults: set[str]
) -> None:
    assert of(body)[operator] == faults


def test_a_loop_ends_instead_of_going_on_and_the_other_way_round() -> None:
    assert of("for x in a: break")["loop"] == {"for x in a: continue"}


@pytest.mark.parametrize(
    "body",
    [
        '"""1 < 2"""',
        "c: Literal[3]",
        "raise ValueError(a + 1)",
        "assert a < b",
        "_LOG.info(a, b)",
        "warnings.warn(a, stacklevel=2)",
        "print(a, 1)",
        'return f"{a + 1}"',
        "return None",
        "return",
        "c = a",  # without its first value a local is a NameError
        "pass",
    ],
)
def test_texts_errors_logs_annotations_and_what_changes_nothing_have_no_faults(body: str) -> None:
    assert of(body) == {} or of(body) == {"return": {"return None"}} == of("return a")


def test_what_changes_nothing_is_no_fault() -> None:
    source = "def f(a):\n    a.b(1)\n"
    one = mutants("m.py", source)[0]
    assert one.changes(source)
    assert not replace(one, after=f"({one.before})").changes(source)


def test_a_fault_has_the_same_name_when_lines_before_it_change() -> None:
    source = "def f(a):\n    a.b(1)\n    a.b(1)\n"
    moved = "import os\n\n\n" + source
    names = [[one.key() for one in mutants("m.py", text)] for text in (source, moved)]
    assert names[0] == names[1]
    assert len(set(names[0])) == 6  # of two equal lines, each has its own


def test_a_marked_source_notes_each_block_that_runs_and_does_the_same() -> None:
    source = (
        '"""Text."""\n\nfrom __future__ import annotations\n\n\ndef f(a):\n    """Text."""\n'
        "    if a == 0:\n        return 1\n    elif a == 1:\n        return 2\n"
        "    else:\n        return 3\n"
    )
    text, lines = marked(source, first=5)
    assert sorted(lines) == [8, 9, 11, 13]
    hits: dict[int, int] = {}
    known: dict[str, Any] = {}
    exec(text, known)
    known["__hits__"] = hits
    assert (known["f"](1), known["f"].__doc__) == (2, "Text.")
    assert {lines[number - 5] for number in hits} == {8, 11}
    assert {one.block for one in mutants("m.py", source)} <= {*lines}


def test_the_same_seed_draws_the_same_faults_from_the_rooms_one_a_line(tmp_path: Path) -> None:
    folder = tmp_path / "internsp" / "wp"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("".join(f"A{i} = {i} + 1\n" for i in range(30)))
    first = drawn(tmp_path, Options("run", number=9))
    assert first == drawn(tmp_path, Options("run", number=9)) != []
    assert {one.key() for one in first} < {o.key() for o in drawn(tmp_path, Options("run"))}
    assert len({one.line for one in first}) == 9
    assert first != drawn(tmp_path, Options("run", number=9, seed=1))


def test_tests_that_reach_the_block_run_first_cases_first_named_before_others(
    tmp_path: Path,
) -> None:
    (one,) = (m for m in mutants("internsp/wp/a.py", "def deep(a):\n    a.b()\n"))
    record = Record(tmp_path)
    (tmp_path / "marked").mkdir()
    for name, text in (("far.py", "x()"), ("near.py", "deep()")):
        (tmp_path / "marked" / name).write_text(text)
    record.table.write_text(json.dumps([["internsp/wp/a.py", 2], ["internsp/wp/a.py", 9]]))
    tests = [("far.py::t", 1, [0]), ("near.py::t[a]", 3, [0]), ("near.py::t[b]", 4, [0, 1])]
    rows = [*tests, ("near.py::elsewhere", 1, [1])]
    lines = [{"test": test, "seconds": s, "hits": hits, "failed": ""} for test, s, hits in rows]
    lines.append({"test": "near.py::fails", "seconds": 1, "hits": [0], "failed": "yes"})
    record.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(record.reaching(one)) == ["near.py::t[a]", "far.py::t", "near.py::t[b]"]
    assert list(record.reaching(one, since=1)) == ["near.py::t[a]", "near.py::t[b]"]
    unseen = replace(one, block=3)
    assert list(record.reaching(unseen))[:2] == ["near.py::elsewhere", "near.py::t[a]"]


class Scripted(Campaign):
    """A campaign whose runs are scripted: by whether there is a fault, failures of each test."""

    def __init__(self, faulty: list[dict[str, str]], clean: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        super().__init__(Path("none"))
        self.faulty, self.clean = faulty, clean

    def _run(self, mutant: Mutant | None, tests: Any, limit: float) -> dict[str, Any]:
        if not mutant:
            bad = self.clean & set(tests)
            return {"code": int(bool(bad)), "seconds": 1.0, "tests": []}
        text = self.faulty.pop(0)
        if "hang" in text:
            return {"code": None, "seconds": limit, "tests": []}
        lines = [{"test": test, "failed": text.get(test, "")} for test in tests]
        failed = [line for line in lines if line["failed"]]
        return {"code": int(bool(failed)), "seconds": 1.0, "tests": lines}


@pytest.mark.parametrize(
    ("faulty", "clean", "ending"),
    [
        ([{}], set(), {"end": "survived", "ran": 2, "reach": 2}),
        ([{"b": "assert 1 == 2"}], set(), {"end": "caught", "by": "b"}),
        ([{"a": "assert"}, {}], {"a"}, {"end": "survived", "ran": 2, "reach": 2}),
        ([{"b": "timed out"}, {}], set(), {"end": "survived", "ran": 2, "reach": 2}),
        ([{"b": "timed out"}, {"b": "timed out"}], set(), {"end": "caught", "by": "b"}),
        ([{"hang": ""}], set(), {"end": "time", "by": "a"}),
    ],
    ids=["passes", "fails", "fails-without-fault", "late-once", "late-twice", "hangs"],
)
def test_a_fault_is_caught_by_a_failure_that_it_makes(
    faulty: list[dict[str, str]], clean: set[str], ending: dict[str, Any]
) -> None:
    one = mutants("m.py", "A = 1\n")[0]
    assert Scripted(faulty, clean).judge(one, {"a": 1.0, "b": 1.0}, 60) == ending
    unreached = {"end": "unreached", "ran": 0, "reach": 0}
    assert Scripted([]).judge(one, {}, 60) == unreached


def test_a_test_is_covered_if_enough_others_that_stay_reach_its_blocks(tmp_path: Path) -> None:
    record = Record(tmp_path)
    reach = {"a::dear": (5, [1, 2]), "b::cases[1]": (1, [1]), "b::cases[2]": (1, [2]),
             "c::other": (1, [1, 2]), "d::alone": (9, [1, 3]), "e::fails": (9, [1])}  # fmt: skip
    for test, (seconds, hits) in reach.items():
        add(record.path, {"test": test, "failed": test == "e::fails" and "x", "seconds": seconds,
                          "hits": hits})  # fmt: skip
    assert record.covered(1) == [(5, "a::dear"), (2, "b::cases")]
    assert record.covered(2) == [(5, "a::dear")]
    assert record.covered(3) == []


def test_a_worker_runs_tests_in_a_copy_whose_package_each_run_imports_anew(tmp_path: Path) -> None:
    worker = Worker(copied(tmp_path / "plain"))
    for _ in range(2):
        got = worker.run(["tests/unit/test_covering.py"], "not thorough", 120, stop=True)
        assert got["code"] == 0
        assert got["tests"]
        assert not any(test["failed"] for test in got["tests"])


def test_runs_grow_and_end_at_the_limit() -> None:
    tests = {str(i): 10.0 for i in range(30)}
    assert [len(chunk) for chunk in chunks(tests, 200)] == [2, 5, 13]
    assert list(chunks({"long": 500.0, "b": 1.0}, 200)) == [{"long": 500.0}]


def test_the_report_counts_by_room_and_names_each_survivors_fate(tmp_path: Path) -> None:
    fault = {"file": "internsp/wp/a.py", "scope": "f", "before": "a\n == b", "after": "a != b"}
    lines: list[dict[str, Any]] = [
        {"key": "1", **fault, "end": "caught", "by": "t"},
        {"key": "2", **fault, "end": "survived"},
        {"key": "3", **fault, "end": "unreached"},
        {"key": "4", **fault, "end": "time", "by": "t"},
        {"key": "5", **fault, "end": "survived"},
        {"key": "2", **fault, "end": "caught", "by": "new.py::t", "new": True},
        {"key": "3", "fate": "equivalent", "why": "b is a"},
    ]
    (tmp_path / "r").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = report(tmp_path / "r")
    assert "| wp | 5 | 3 | 1 | 1 | 1 | 1 | 75.0% |" in text
    at = "- `internsp/wp/a.py`, `f`: `a == b` → `a != b`:"
    assert text[-3:] == [
        f"{at} caught by `new.py::t`.",
        f"{at} equivalent: b is a.",
        f"{at} survived.",
    ]
