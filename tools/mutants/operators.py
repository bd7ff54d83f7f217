"""Small faults of a Python source: which there are, each as a source that differs in one place."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

SWAPS: dict[type, tuple[type, ...]] = {  # the first is the opposite, the second moves the bound
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.Lt: (ast.GtE, ast.LtE),
    ast.LtE: (ast.Gt, ast.Lt), ast.Gt: (ast.LtE, ast.GtE), ast.GtE: (ast.Lt, ast.Gt),
}  # fmt: skip
ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
SPEECH = ("print", "warn", "warning", "info", "debug", "error", "log")
HEAD = """
try:
    from tools.mutants.hits import HITS as __hits__
except ImportError:  # a file that is run by itself, without paths
    __hits__ = {}
"""
TYPED = ("isinstance", "issubclass")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """One fault: ``source[start:end]``, in bytes, becomes ``after``."""

    file: str
    scope: str
    """Class and function around it."""
    line: int
    operator: str
    start: int
    end: int
    before: str
    after: str
    block: int
    """Line at which the innermost block around it starts; 0: outside of functions."""
    where: str
    """Text of the line, and which one of this text in the file it is."""

    def applied(self, source: str) -> str:
        """``source`` with the fault."""
        raw = source.encode()
        return (raw[: self.start] + self.after.encode() + raw[self.end :]).decode()

    def changes(self, source: str) -> bool:
        """Whether the fault changes the syntax tree; it is no fault if it does not."""
        return ast.dump(ast.parse(self.applied(source))) != ast.dump(ast.parse(source))

    def key(self) -> str:
        """Name of the fault; it stays when lines elsewhere change."""
        words = (self.file, self.scope, self.where, self.operator, self.before, self.after)
        return hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]


def changed(node: ast.AST, **fields: object) -> str:
    """Source of ``node`` with other fields; an expression stands in parentheses."""
    new = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    simple = ast.stmt | ast.Constant | ast.Call | ast.Name | ast.Attribute
    return ast.unparse(new) if isinstance(new, simple) else f"({ast.unparse(new)})"


def textual(node: ast.AST) -> bool:
    """Whether a part of ``node`` is text: what is computed with it is read by people."""
    return any(isinstance(getattr(n, "value", None), str) for n in ast.walk(node))


Found = Iterator[tuple[str, ast.AST, str]]
"""Name of the operator, the node to replace, and the source instead of it."""


def of_operators(node: ast.AST) -> Found:
    """Another comparison, bound, arithmetic or junction; a dropped ``not``."""
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            for j, other in enumerate(SWAPS[type(operator)]):
                ops = [*node.ops[:i], other(), *node.ops[i + 1 :]]
                yield ("bound" if j else "comparison"), node, changed(node, ops=ops)
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        if not textual(node):
            yield "arithmetic", node, changed(node, op=ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        other = ast.And if isinstance(node.op, ast.Or) else ast.Or
        yield "and/or", node, changed(node, op=other())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node, f"({ast.unparse(node.operand)})"


def of_values(node: ast.AST) -> Found:
    """A constant one off, arguments of one shape in each other's places, nothing returned."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", node, repr(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield from (("constant", node, f"({node.value + step!r})") for step in (1, -1))
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") not in TYPED:
        for i, (one, two) in enumerate(pairwise(node.args)):
            same = type(one) is type(two) and isinstance(one, ast.Name | ast.Attribute)
            if same and ast.dump(one) != ast.dump(two):
                args = [*node.args[:i], two, one, *node.args[i + 2 :]]
                yield "arguments", node, changed(node, args=args)
    elif isinstance(node, ast.Return) and node.value is not None and not textual(node.value):
        if getattr(node.value, "value", "") is not None:
            yield "return", node, "return None"


def of_flow(node: ast.AST) -> Found:
    """The other branch; ``break`` and ``continue``."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        plain = isinstance(node.test, ast.Compare) and len(node.test.ops) == 1
        if not plain and not isinstance(node.test, ast.Constant | ast.UnaryOp):
            yield "condition", node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Break | ast.Continue):
        yield "loop", node, "continue" if isinstance(node, ast.Break) else "break"


def of_statements(node: ast.AST, assigned: set[str]) -> Found:
    """A call or an assignment left out; ``assigned`` has the names with a value before it."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "deletion", node, "pass"
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        # Without its first value a local is a NameError, which shows nothing about the tests.
        if all(
            target.id in assigned if isinstance(target, ast.Name) else not hasattr(target, "elts")
            for target in targets
        ):
            yield "deletion", node, "pass"


def skipped(node: ast.AST) -> bool:
    """Texts, logging, errors, assertions, annotations' guard, and how a thing is printed."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        owner = getattr(getattr(node.func, "value", None), "id", "").lower().strip("_")
        return name == "print" or (name in SPEECH and owner in ("log", "logger", "warnings"))
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or skipped(node.value)
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, Function):
        return node.name in ("__repr__", "__str__")
    return isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom)


def note_line(body: object, lines: list[str]) -> int:
    """Where a note that a block runs can stand, as the line it would precede; 0: nowhere."""
    if not isinstance(body, list) or not body or not isinstance(body[0], ast.stmt):
        return 0
    documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    first = body[1] if documented and len(body) > 1 else body[0]
    decorators = getattr(first, "decorator_list", None) or [first]
    before = lines[first.lineno - 1].encode()[: first.col_offset]
    line = 0 if before.strip() else decorators[0].lineno
    return 0 if lines[line - 1].lstrip().startswith("elif ") else line


def mutants(file: str, source: str) -> list[Mutant]:
    """Every fault that the operators know for one file."""
    lines = source.splitlines(keepends=True)
    starts = [0, *accumulate(len(line.encode()) for line in lines)]
    texts = [line.strip() for line in lines]
    found: dict[str, Mutant] = {}
    tree = ast.parse(source)

    def add(operator: str, place: Any, after: str, scope: tuple[str, ...], block: int) -> None:
        start = starts[place.lineno - 1] + place.col_offset
        end = starts[place.end_lineno - 1] + place.end_col_offset
        before = source.encode()[start:end].decode()
        text = texts[place.lineno - 1]
        where = f"{texts[: place.lineno].count(text)} {text}"
        qualified = ".".join(scope)
        one = Mutant(
            file, qualified, place.lineno, operator, start, end, before, after, block, where
        )
        found.setdefault(one.key(), one)

    def visit(node: ast.AST, scope: tuple[str, ...], block: int, assigned: set[str]) -> None:
        if skipped(node):
            return
        statements = of_statements(node, assigned) if block else ()
        for name, place, after in (
            *of_operators(node), *of_values(node), *of_flow(node), *statements,
        ):  # fmt: skip
            add(name, place, after, scope, block)
        if isinstance(node, Function | ast.ClassDef):
            scope = (*scope, node.name)
        if isinstance(node, Function):
            assigned = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
            block = note_line(node.body, lines)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            inner = note_line(value, lines) if block else 0
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, scope, inner or block, assigned)
                    stored = (n for n in ast.walk(child) if isinstance(n, ast.Name))
                    assigned = assigned | {n.id for n in stored if isinstance(n.ctx, ast.Store)}

    visit(tree, (), 0, set())
    return list(found.values())


def marked(source: str, first: int = 0) -> tuple[str, list[int]]:
    """``source`` whose blocks in functions note that they run, and the blocks' lines.

    Each is named by its line as in :attr:`Mutant.block`; its number in the table of notes is
    ``first`` and its place in the list.
    """
    lines = source.splitlines(keepends=True)
    blocks: dict[int, int] = {}  # indentation by line

    def visit(node: ast.AST, inside: bool) -> None:
        inside = inside or isinstance(node, Function)
        for _, value in ast.iter_fields(node):
            if inside and (line := note_line(value, lines)):
                blocks[line] = len(lines[line - 1]) - len(lines[line - 1].lstrip())
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, inside)

    tree = ast.parse(source)
    visit(tree, False)
    for number, (line, column) in enumerate(blocks.items(), first):
        lines[line - 1] = f"{' ' * column}__hits__[{number}] = 1\n" + lines[line - 1]
    head = [n for n in tree.body[:2] if isinstance(n, ast.Expr) or "__future__" in ast.unparse(n)]
    at = max((n.end_lineno or 0 for n in head), default=0)
    lines.insert(at, HEAD)
    return "".join(lines), list(blocks)
