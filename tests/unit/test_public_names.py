"""The table of public names: what documents and public signatures use, lazily imported."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import internsp

ROOT = Path(__file__).parents[2]
TABLE = frozenset(internsp.__all__)
DOCS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "internsp/wp/README.md", *DOCS]
# Documented by the path of its module: `internsp.train` is the application's folder.
BY_PATH = {
    "internsp.app.train.run.train", "internsp.clients.trainer", "internsp.clients.trainer.Trainer",
    "internsp.fsdp", "internsp.fsdp.install", "internsp.fsdp.options", "internsp.fsdp.report",
    "internsp.fsdp.zero_optimizer",
}  # fmt: skip
# Layers and hooks use these; their methods have internal types of a chunk.
MADE_BY_PARALLELIZE = {
    "EmbeddingWeightParallelCommunicator", "HeadWeightParallelCommunicator", "ISPCommunicator",
    "MemoryPool", "ShardedParameter",
}  # fmt: skip
# Returned by properties and methods, never created by a user.
RETURNED = {"PendingExchange", "Refused", "Schedule", "WeightAxis"}
# In public signatures, but not for users; each with the reason.
UNNAMED = {
    "internsp.wp.collectives.Collectives": "an emulated link's; the docstring has its path",
}


def used_in(text: str) -> set[str]:
    """Dotted names below ``internsp`` in a document's code blocks and quoted code."""
    blocks = re.findall(r"```.*?```", text, re.DOTALL)
    quoted = re.findall(r"`[^`\n]+`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    found: set[str] = set()
    for code in (*blocks, *quoted):
        found |= set(re.findall(r"(?<![\w/.-])internsp(?:\.[A-Za-z_]\w*)+", code))
        for names in re.findall(r"from internsp import ([\w, ]+)", code):
            found |= {f"internsp.{name.strip()}" for name in names.split(",")}
    return found


def undocumented(text: str) -> list[str]:
    """Names in ``text`` that a user does not have."""
    return sorted(n for n in used_in(text) - BY_PATH if n.split(".")[1] not in TABLE)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_use_public_names_alone(document: str) -> None:
    assert undocumented((ROOT / document).read_text()) == []


def test_a_name_that_is_not_public_is_found_in_a_document() -> None:
    text = "see `internsp.optim.step` and\n```python\nfrom internsp import Pipeline, Hidden\n"
    text += "x = internsp.parallelise(model)\n```\nbut not internsp.prose or internsp/wp/slots.py"
    assert undocumented(text) == ["internsp.Hidden", "internsp.optim.step", "internsp.parallelise"]
    every = set().union(*(used_in((ROOT / document).read_text()) for document in DOCUMENTS))
    assert {"internsp.MicroBatch", "internsp.step_together", "internsp.ZeroOptimizer"} <= every
    assert every >= BY_PATH


def signatures() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every function that a user calls or overrides: public ones, and those of public classes.

    A class with ``create`` is created by it, not by its ``__init__``.
    """
    for name in sorted(TABLE - MADE_BY_PARALLELIZE):
        value = getattr(internsp, name)
        if inspect.isfunction(value):
            yield name, inspect.unwrap(value)
        for key, member in vars(value).items() if inspect.isclass(value) else ():
            maker = key in ("__init__", "create")
            if (maker and name in RETURNED) or (key.startswith("_") and not maker):
                continue
            if key == "__init__" and hasattr(value, "create"):
                continue
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if inspect.isfunction(function):
                yield f"{name}.{key}", inspect.unwrap(function)


def classes_in(annotation: Any, function: Callable[..., Any]) -> set[str]:
    """Full names of our classes in an annotation, also behind aliases."""
    if isinstance(annotation, str):
        scope = vars(sys.modules[function.__module__])
        names = {n.id for n in ast.walk(ast.parse(annotation)) if isinstance(n, ast.Name)}
        return set().union(*(classes_in(scope[n], function) for n in names if n in scope))
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        ours = annotation.__module__.partition(".")[0] == "internsp"
        return {f"{annotation.__module__}.{annotation.__name__}"} if ours else set()
    parts = typing.get_args(annotation)
    flat = [p for part in parts for p in (part if isinstance(part, list) else [part])]
    return set().union(*(classes_in(part, function) for part in flat if not isinstance(part, str)))


def missing(of: Iterator[tuple[str, Callable[..., Any]]]) -> dict[str, set[str]]:
    """Our classes that signatures use and users cannot import."""
    public = {getattr(internsp, name) for name in TABLE if name != "errors"}
    known = {f"{c.__module__}.{c.__name__}" for c in public if isinstance(c, type)}
    found = {
        where: set().union(*(classes_in(a, f) for a in f.__annotations__.values())) - known
        for where, f in of
    }
    return {where: names - set(UNNAMED) for where, names in found.items() if names - set(UNNAMED)}


def test_what_public_signatures_name_is_public() -> None:
    every = dict(signatures())
    assert {"parallelize", "ZeroOptimizer.__init__", "Pipeline.create", "ParallelMesh.axes",
            "SchedulerHook.before_forward", "DistributedAttention.start"} <= set(every)  # fmt: skip
    assert "Pipeline.__init__" not in every
    assert missing(signatures()) == {}
    annotations = ((a, f) for f in every.values() for a in f.__annotations__.values())
    named = set().union(*(classes_in(*pair) for pair in annotations))
    assert set(UNNAMED) <= named, "one of them is in no signature any more"


def test_what_a_callback_promises_to_return_is_used() -> None:
    """InternEvo documents a return value of its callbacks that it ignores."""
    hooks = {name: f for name, f in signatures() if name.startswith("SchedulerHook.")}
    assert len(hooks) >= 7
    assert {f.__annotations__["return"] for f in hooks.values()} == {"None"}


def test_a_class_that_is_not_public_is_found_in_a_signature() -> None:
    from internsp.pipeline import Pipeline
    from internsp.pipeline.hooks import last_weight_backwards

    inside = {"schedules.ScheduleKind", "stage.ISPPipelineStage"}
    found = missing(iter([("x", Pipeline.__init__)]))
    assert found == {"x": {f"internsp.pipeline.{name}" for name in inside}}
    assert missing(iter([("x", last_weight_backwards)])) == {}, "ComputeAction is public"


def test_every_name_is_there_and_type_checkers_see_the_same_table() -> None:
    for name in TABLE:
        value = getattr(internsp, name)
        assert getattr(value, "__name__", name).rpartition(".")[2] == name
    assert set(dir(internsp)) >= TABLE
    source = (ROOT / "internsp" / "__init__.py").read_text()
    table = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
    aliases = [a for node in table.body if isinstance(node, ast.ImportFrom) for a in node.names]
    assert len(aliases) == len(table.body), "one name an import"
    assert all(alias.asname == alias.name for alias in aliases), "only `X as X` is public to mypy"
    homes = {a.name: n.module for n in table.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert homes == internsp._HOMES | dict.fromkeys(internsp._MODULES, "internsp")
    assert sorted(homes) == sorted(TABLE)
    with pytest.raises(AttributeError, match="'internsp' has no attribute 'initialise'"):
        internsp.initialise  # noqa: B018


def test_the_names_are_known_without_loading_torch() -> None:
    code = (
        "import sys, internsp\n"
        "assert 'Pipeline' in dir(internsp) and 'Pipeline' in internsp.__all__\n"
        "internsp.errors.ConfigError, internsp.Config, internsp.Trace\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    names: dict[str, Any] = {}
    exec("from internsp import *", names)
    assert names["Pipeline"] is internsp.Pipeline
    assert {*internsp.__all__} <= names.keys()


# Stems of words that British and American spelling write differently.
BRITISH = re.compile(
    r"\b\w*(?:initiali|materiali|normali|summari|synchroni|optimi|paralleli|quanti|generali)s(?:e|ed|es|ing|ation)\b"
    r"|\b\w*(?:behaviou|colou|neighbou|favou|honou)r\w*|\b(?:travell|labell|modell|cancell)(?:ed|ing)\b"
    r"|\b(?:learnt|misspelt|towards|centre|judgement|whilst)\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, "configs/documented.toml", "internsp/errors/__init__.py"]
)
def test_spelling_is_american_in_documents(document: str) -> None:
    assert BRITISH.findall((ROOT / document).read_text()) == []


def test_spelling_is_american_in_public_names() -> None:
    told = [f"{name} {inspect.signature(function)}" for name, function in signatures()]
    assert [text for text in told if BRITISH.search(text.replace("_", " "))] == []
    assert BRITISH.search("initialise the colours of neighbouring ranks")
