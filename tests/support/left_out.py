"""Leaves out a wait, an event or a kept reference of the library, found in its source."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import internsp

ROOT = Path(internsp.__file__).parent
ORDERS = {
    "wait", "wait_stream", "wait_event", "record_stream", "order", "reached", "take", "join",
    "before_overwrite", "filled_by", "written", "keep_until_here", "take_turn", "_outlive",
    "_read_slot", "finish_copies_to_host", "synchronize", "wait_until_ready",
}  # fmt: skip
KEPT = {"keep", "kept"}


@dataclass(frozen=True)
class Site:
    """What can be left out: the ``number``-th call of ``what`` in a function, or what it keeps."""

    file: str
    function: str
    what: str
    number: int

    def among(self, called: set[tuple[str, str]]) -> bool:
        """Whether it may matter where these functions are called; a class counts always."""
        return (self.file, self.function) in called or self.function[:1].isupper() * (
            "." not in self.function
        )

    def __str__(self) -> str:
        again = f" {self.number + 1}" if self.number else ""
        return f"{self.file}: {self.function}: {self.what}{again}"


def sites(files: Iterator[Path] | list[Path]) -> list[Site]:
    """Every statement in ``files`` that orders streams and nothing else, and every reference that
    is kept: an argument, or a field of a dataclass, of that name."""
    found: list[Site] = []
    for path in files:
        name = str(path.relative_to(ROOT))
        for function, node in _functions(ast.parse(path.read_text())):
            calls = [call.func.attr for _, call in _calls(node)]
            found += [
                Site(name, function, what, calls[:at].count(what)) for at, what in enumerate(calls)
            ]
            kept = [a.arg for a in node.args.args if a.arg in KEPT]
            found += [Site(name, function, arg, 0) for arg in kept]
        found += [Site(name, each, "keep", 0) for each in _fields(ast.parse(path.read_text()))]
    return found


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


def _fields(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and getattr(line.target, "id", "") == "keep":
                    yield node.name


def _calls(function: ast.FunctionDef) -> Iterator[tuple[ast.Expr, Any]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            if isinstance(call.func, ast.Attribute):
                on_slot = call.func.attr == "read" and "streams" in ast.unparse(call.func.value)
                if call.func.attr in ORDERS or on_slot:
                    yield node, call


@contextmanager
def functions_called() -> Iterator[set[tuple[str, str]]]:
    """The file and name of each function of the library that is called inside."""
    codes: set[CodeType] = set()
    found: set[tuple[str, str]] = set()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: codes.add(frame.f_code) if event == "call" else None)
    try:
        yield found
    finally:
        sys.setprofile(before)
        for code in codes:
            if code.co_filename.startswith(f"{ROOT}/"):
                name = code.co_filename.removeprefix(f"{ROOT}/")
                found.add((name, code.co_qualname))


@contextmanager
def left_out(site: Site) -> Iterator[None]:
    """Inside, the library runs without it."""
    module = importlib.import_module("internsp." + site.file[:-3].replace("/", "."))
    with pytest.MonkeyPatch.context() as patch:
        owner: Any = functools.reduce(getattr, site.function.split(".")[:-1], module)
        found = inspect.getattr_static(owner, site.function.split(".")[-1])
        if inspect.isclass(found):
            _without_field(found, site.what, patch)
        else:
            found = getattr(found, "fget", None) or getattr(found, "__func__", found)
            found = inspect.unwrap(found)
            patch.setattr(found, "__code__", _changed(site, found.__code__))
        yield


def _without_field(kind: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    made = kind.__init__

    def init(self: Any, *args: Any, **keywords: Any) -> None:
        made(self, *args, **keywords)
        setattr(self, name, ())

    patch.setattr(kind, "__init__", init)


def _changed(site: Site, code: CodeType) -> CodeType:
    path = ROOT / site.file
    tree = ast.parse(path.read_text())
    function = dict(_functions(tree))[site.function]
    if site.what in KEPT:
        function.body.insert(0, ast.parse(f"{site.what} = ()").body[0])
    else:
        matching = [e for e, call in _calls(function) if call.func.attr == site.what]
        statement = matching[site.number]
        statement.value = statement.value.func.value  # type: ignore[attr-defined]
    found = _code(compile(ast.fix_missing_locations(tree), path, "exec"), code.co_qualname)
    assert found is not None, "it was compiled from the same file"
    return found


def _code(code: CodeType, qualname: str) -> CodeType | None:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_qualname == qualname:
                return each
            found = _code(each, qualname)
            if found is not None:
                return found
    return None
