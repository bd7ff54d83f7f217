"""The shape of the source, read from its syntax trees: who may import whom, and a few bans."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tools.docs import rooms

ROOT = Path(__file__).parents[2]

ZOO = "internsp.model_zoo"  # where the folder model_zoo is installed

# The rooms, from the bottom up: a folder is a room and stands on one floor. A module imports from
# its own room or from a lower floor; there are no exceptions. The face, `internsp` itself, is above
# all.
FLOORS = [
    ["errors"],
    ["base"],
    ["config"],
    ["mesh", "schedule"],
    ["dtensor", "failure", "sp"],
    ["experts"],
    ["wp", "structure"],
    ["modules", "optim"],
    ["values", "layers"],
    ["parallel", "model_zoo"],
    ["pipeline", "fsdp"],
    # the application
    ["app.config"],
    ["app.process", "app.data", "app.models"],
    ["app.report"],
    ["app.plan"],
    ["app.session"],
    ["app.checkpoint"],
    ["app.launch", "clients"],
    ["app.train"],
    ["app.cli"],
]
SP_MAY_IMPORT = (
    "internsp.errors",
    "internsp.base",
    "internsp.config",
    "internsp.mesh",
    "internsp.sp",
)
ZOO_MAY_IMPORT = ("internsp.errors", "internsp.layers", "internsp.sp", "internsp.config", ZOO)
# Those that move tensors. Objects (names agreed upon at set-up) are neither weights nor gradients.
COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "gather", "irecv", "isend", "monitored_barrier", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
}  # fmt: skip
WEIGHT_SIDE = (
    "internsp.wp", "internsp.dtensor", "internsp.layers", "internsp.modules",
    "internsp.optim", "internsp.parallel",
)  # fmt: skip

# Lines of internsp that `from internsp import parallelize` may load.
MOST_LINES = 18_000

Sources = dict[str, str]


@cache
def sources() -> Sources:
    """Source of each module of the library and the zoo, by dotted name."""
    found: Sources = {}
    for folder, package in ((ROOT / "internsp", "internsp"), (ROOT / "model_zoo", ZOO)):
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path.read_text()
    return found


@cache
def tree_of(source: str) -> ast.Module:
    """The syntax tree of ``source``, parsed once for all rules."""
    return ast.parse(source)


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """All nodes of ``source``."""
    return tuple(ast.walk(tree_of(source)))


@cache
def importing(source: str, types: bool) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """The import statements of ``source``; see :func:`imports`."""
    branches = [node for node in nodes_of(source) if isinstance(node, ast.If)]
    guards = [] if types else [b for b in branches if "TYPE_CHECKING" in ast.unparse(b.test)]
    unseen = {id(node) for guard in guards for node in ast.walk(guard)}
    found = (n for n in nodes_of(source) if isinstance(n, ast.Import | ast.ImportFrom))
    return tuple(node for node in found if id(node) not in unseen)


def below(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def imports(module: str, source: str, known: Sources, types: bool = True) -> Iterator[str]:
    """Modules of this project that ``source`` imports anywhere, also within functions.

    ``types=False`` leaves out what stands under ``if TYPE_CHECKING:`` and never runs.
    """
    is_package = any(name.startswith(module + ".") for name in known)
    for node in importing(source, types):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            base = node.module or ""
            if node.level:
                steps = node.level - (1 if is_package else 0)
                anchor = module.split(".")[: len(module.split(".")) - steps]
                base = ".".join([*anchor, *([base] if base else [])])
            full = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in known else base for name in full]
        yield from (n for n in names if below(n, "internsp"))


def room(module: str) -> str:
    """The folder in `internsp` or in `internsp.app` that has ``module``; of the face, nothing."""
    parts = module.split(".")[1:]
    if parts == ["__main__"]:
        return ""
    return ".".join(parts[: 2 if parts[:1] == ["app"] else 1])


def level(module: str) -> int:
    return next((i for i, rooms in enumerate(FLOORS) if room(module) in rooms), len(FLOORS))


def upward_imports(known: Sources) -> list[str]:
    return [
        f"{module} imports {name}"
        for module, source in known.items()
        if below(module, "internsp")
        for name in imports(module, source, known)
        if room(name) != room(module) and level(name) >= level(module)
    ]


def forbidden_imports(known: Sources) -> list[str]:
    """Violations of the narrower rules: wp and sp independent, few imports in sp and the zoo."""
    found = []
    for module, source in known.items():
        for name in imports(module, source, known):
            wrong = (
                (below(module, "internsp.wp") and below(name, "internsp.sp"))
                or (below(module, "internsp.sp") and not any(below(name, p) for p in SP_MAY_IMPORT))
                or (below(module, ZOO) and not any(below(name, p) for p in ZOO_MAY_IMPORT))
            )
            if wrong:
                found.append(f"{module} imports {name}")
    return found


def zoo_names(known: Sources) -> list[str]:
    """Modules of internsp that name the zoo, in an import or in a string that is code."""
    found = []
    for module, source in known.items():
        texts = {
            id(node.value) for node in nodes_of(source) if isinstance(node, ast.Expr)
        }  # docstrings may speak of it
        named = any(below(n, ZOO) for n in imports(module, source, known)) or any(
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "model_zoo" in node.value
            and id(node) not in texts
            for node in nodes_of(source)
        )
        if named and not below(module, ZOO):
            found.append(module)
    return found


def distributed_calls(source: str) -> list[str]:
    """Collectives of torch.distributed that ``source`` uses, under any imported name."""
    modules, functions = {"torch.distributed"}, {}
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if below(alias.name, "torch.distributed") and alias.asname:
                    modules.add(alias.asname)
                elif below(alias.name, "torch.distributed"):
                    modules.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if below(full, "torch.distributed") and alias.name in COLLECTIVES:
                    functions[alias.asname or alias.name] = alias.name
                elif below(full, "torch.distributed"):
                    modules.add(alias.asname or alias.name)
    used = []
    for node in nodes_of(source):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            if ast.unparse(node.value) in modules:
                used.append(node.attr)
        elif isinstance(node, ast.Name) and node.id in functions:
            used.append(functions[node.id])
    return used


def cycle(known: Sources) -> list[str]:
    """An import cycle (except between a package and its own modules), or nothing."""
    edges = {
        module: sorted(
            {n for n in imports(module, source, known, types=False) if not below(module, n)}
        )
        for module, source in known.items()
    }
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for name in edges.get(module, []):
            if found := visit(name, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in edges if (found := visit(module, []))), [])


def circle_of_folders(folders: dict[str, Iterator[Path]]) -> list[str]:
    """Imports of one top-level folder in another that imports it, too."""
    found: dict[tuple[str, str], list[str]] = {}
    for folder, paths in folders.items():
        others = "|".join({*folders} - {folder})
        named = re.compile(rf"^.*\b(?:from|import)\b.*\b(?:{others})\b", re.MULTILINE)
        for path in paths:
            source = path.read_text()
            for node in nodes_of(source) if named.search(source) else ():
                names = [node.module] if isinstance(node, ast.ImportFrom) else []
                names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
                roots = {str(name).partition(".")[0] for name in names}
                for other in roots & {*folders} - {folder}:
                    found.setdefault((folder, other), []).append(f"{path} imports {other}")
    return sorted(line for (a, b), lines in found.items() if (b, a) in found for line in lines)


def more_than_names(source: str, alone: bool) -> list[str]:
    """Statements of an ``__init__`` that do more than name what its package gives out.

    Args:
        alone: whether the package has no other module: then ``__init__`` is its module.
    """
    return [
        ast.unparse(node).partition("\n")[0]
        for node in tree_of(source).body
        if not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
        and not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))
        and not alone
    ]


def test_each_room_is_a_folder_on_one_floor_and_no_file_lies_beside_them() -> None:
    named = [name for names in FLOORS for name in names]
    assert len(named) == len(set(named))
    assert all((ROOT / "internsp" / name.replace(".", "/")).is_dir() for name in named)
    assert {room(module) for module in sources()} - {"", "app"} == set(named)
    loose = [path.name for name in ("", "app") for path in (ROOT / "internsp" / name).glob("*.py")]
    assert sorted(loose) == ["__init__.py", "__init__.py", "__main__.py"]


def test_a_package_only_names_what_it_gives_out() -> None:
    known = sources()
    packages = {
        module: sum(below(name, module) for name in known) == 1
        for module in known
        if (ROOT / module.replace(".", "/") / "__init__.py").exists() and module != "internsp"
    }
    assert len(packages) > 25
    found = {module: more_than_names(known[module], alone) for module, alone in packages.items()}
    assert {module: lines for module, lines in found.items() if lines} == {}
    source = '"""x"""\nfrom x import y\n__all__ = []\ndef f(): ...\nz = 1\nf()'
    assert more_than_names(source, alone=False) == ["def f():", "z = 1", "f()"]


def test_parallelize_loads_neither_the_application_nor_sequences_and_few_lines() -> None:
    code = (
        "import sys, internsp\n"
        "assert 'torch' not in sys.modules\n"
        "internsp.parallelize\n"
        "assert 'torch._dynamo' not in sys.modules  # a second of each program's start\n"
        "for name, module in sorted(sys.modules.items()):\n"
        "    if name.partition('.')[0] == 'internsp': print(name, module.__file__)\n"
    )
    words = [sys.executable, "-c", code]
    shown = subprocess.run(words, check=True, cwd=ROOT, text=True, capture_output=True).stdout
    loaded = dict(line.split(maxsplit=1) for line in shown.splitlines())
    assert {"internsp.wp.perform", "internsp.schedule.queue"} <= set(loaded)
    assert [n for n in loaded if below(n, "internsp.app") or below(n, "internsp.sp")] == []
    assert sum(Path(file).read_text().count("\n") for file in loaded.values()) <= MOST_LINES


def test_heads_in_parts_are_loaded_over_gloo_alone() -> None:
    """In a process whose attention is attached and run over two ranks that are not there."""
    code = (
        "import sys, torch, torch.distributed as dist\n"
        "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
        "import internsp.layers, internsp.model_zoo.llama, internsp.parallel.sequences\n"
        "from internsp.sp import DistributedAttention\n"
        "dist.init_process_group('fake', rank=0, world_size=2, store=FakeStore())\n"
        "for backend in ('cuda:nccl', 'cpu:gloo,cuda:gloo'):\n"
        "    dist.get_backend_config = lambda _: backend\n"
        "    attend = DistributedAttention(2, 2, 4)\n"
        "    attend.attach(dist.group.WORLD, in_parts=True)\n"
        "    if backend == 'cuda:nccl': attend(*torch.ones(3, 1, 3, 2, 4))\n"
        "    print(*(name for name in sys.modules if name.startswith('internsp.sp.')))\n"
    )
    words = [sys.executable, "-c", code]
    shown = subprocess.run(words, check=True, cwd=ROOT, text=True, capture_output=True).stdout
    nccl, gloo = (line.split() for line in shown.splitlines())
    assert "internsp.sp.attention" in nccl
    assert "internsp.sp.gloo" not in nccl
    assert "internsp.sp.gloo" in gloo


def test_the_schedule_names_no_process_group() -> None:
    known = {name: text for name, text in sources().items() if below(name, "internsp.schedule")}
    assert len(known) > 10
    assert {name for name, text in known.items() if process_groups(text)} == set()
    assert process_groups("from torch import distributed as d") == ["torch.distributed"]
    assert process_groups("def f(group: dist.ProcessGroup): ...") == ["ProcessGroup"]


def process_groups(source: str) -> list[str]:
    """What ``source`` names of torch's process groups; words of a docstring do not count."""
    found = []
    for node in nodes_of(source):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found += ["torch.distributed" for name in names if below(name, "torch.distributed")]
        name = getattr(node, "id", getattr(node, "attr", ""))
        found += [name for part in ("ProcessGroup", "DeviceMesh") if part == name]
    return found


def test_a_communicator_and_its_parts_are_whole_when_made() -> None:
    """No file sets an attribute of them from outside."""
    known = sources()
    assert {n: found for n, text in known.items() if (found := set_from_outside(text))} == {}
    source = "communicator.plain = 1\nself._chunk.a, b = x\nc.state.consumer.y += 1\nself.state = z"
    found = ["c.state.consumer.y", "communicator.plain", "self._chunk.a"]
    assert sorted(set_from_outside(source)) == found


def set_from_outside(source: str) -> list[str]:
    """Attributes that ``source`` sets on a communicator, or on parts of it."""
    shared = (
        "communicator", "_communicator", "state", "_state", "chunk", "_chunk", "events", "_events",
        "queue", "_queue", "order", "replicated", "_replicated", "consumer", "accumulation",
    )  # fmt: skip
    return [
        ast.unparse(node)
        for node in nodes_of(source)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value).rpartition(".")[2] in shared
    ]  # fmt: skip


def test_tools_and_tests_do_not_import_each_other_in_a_circle(tmp_path: Path) -> None:
    def files(root: Path) -> dict[str, Iterator[Path]]:
        return {name: (root / name).rglob("*.py") for name in ("tools", "tests", "examples")}

    assert circle_of_folders(files(ROOT)) == []
    for name, text in (("tools", "import tests.support"), ("tests", "from tools.x import y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text(text)
    assert len(circle_of_folders(files(tmp_path))) == 2


def test_the_picture_of_the_house_is_that_of_now() -> None:
    text = rooms.DOCUMENT.read_text()
    assert rooms.floors() == FLOORS
    assert text == rooms.written(text), "python -m tools.docs.rooms --write"


def test_imports_point_one_way() -> None:
    assert upward_imports(sources()) == []


def test_no_imports_go_round_in_a_circle() -> None:
    assert cycle(sources()) == []


def test_wp_and_sp_do_not_know_each_other_and_the_zoo_knows_layers_sp_and_config_alone() -> None:
    assert forbidden_imports(sources()) == []


def test_only_the_factory_table_and_that_of_public_names_name_the_zoo() -> None:
    assert zoo_names(sources()) == ["internsp", "internsp.app.models.factory"]


def test_only_one_file_calls_torch_distributed_for_weights_and_gradients() -> None:
    users = {
        module: calls
        for module, source in sources().items()
        if any(below(module, package) for package in WEIGHT_SIDE)
        and module != "internsp.wp.collectives"
        and (calls := distributed_calls(source))
    }
    assert users == {}


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        (
            "internsp.wp.slots",
            "def late():\n    from ..modules.hooks import x",
            ["internsp.wp.slots imports internsp.modules.hooks"],
        ),
        ("internsp.mesh", "import internsp", ["internsp.mesh imports internsp"]),
        ("internsp.wp.contents", "from internsp.wp.communicator import x", []),
        ("internsp.sp.loss", "import internsp.wp", ["internsp.sp.loss imports internsp.wp"]),
        ("internsp.app.train.trainer", "from internsp import wp, mesh", []),
    ],
)
def test_an_upward_import_is_found(module: str, source: str, found: list[str]) -> None:
    names = [
        "internsp",
        "internsp.wp",
        "internsp.wp.communicator",
        "internsp.mesh",
        "internsp.modules.hooks",
    ]
    known = dict.fromkeys(names, "")
    assert upward_imports({**known, module: source}) == found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("internsp.wp.communicator", "from internsp.sp import SequenceLayout"),
        ("internsp.sp.exchange", "from internsp.wp.collectives import Gather"),
        ("internsp.sp.exchange", "from internsp.app.config import Config"),
        ("internsp.model_zoo.llama", "from internsp.wp import ISPCommunicator"),
        ("internsp.model_zoo.llama", "import internsp"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert len(forbidden_imports({module: source})) == 1


def test_a_circle_and_a_named_zoo_are_found() -> None:
    known = {"internsp.a": "from internsp import b", "internsp.b": "import internsp.a"}
    assert cycle(known) == ["internsp.a", "internsp.b", "internsp.a"]
    table = {"internsp.x": 'T = {"llama": "model_zoo.llama"}', "internsp.y": '"""a model_zoo"""'}
    assert zoo_names(table) == ["internsp.x"]


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "from torch import distributed\ndistributed.all_reduce(x)",
        "import torch\ntorch.distributed.all_reduce(x)",
        "from torch.distributed import all_reduce as add\nadd(x)",
        "import torch.distributed._functional_collectives as f\nf.all_reduce(x)",
    ],
)
def test_a_collective_is_found_under_every_name(source: str) -> None:
    assert distributed_calls(source) == ["all_reduce"]
    assert distributed_calls(source.replace("all_reduce", "get_rank")) == []
