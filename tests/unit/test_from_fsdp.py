"""The pages of names have everything public in FSDP, and existing options of internsp."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import fsdp
from torch.distributed.fsdp import _fully_shard, sharded_grad_scaler, wrap

from internsp.fsdp.units import by_mesh
from tests.support.from_fsdp import TEXT, WORDS, Row, code_in, option, rows, wrong_option
from tests.support.versions import since

ROWS = rows(TEXT)
SYSTEMS = ["FSDP2", "FSDP1", "DeepSpeed ZeRO-3", "MindSpeed LayerZeRO", "InternEvo"]
SHORT = {"FullyShardedDataParallel": "FSDP"}


def arguments(function: Any) -> set[str]:
    """Names of a callable's parameters; of those that take any number, the names too."""
    return set(inspect.signature(function).parameters) - {"self", "cls"}


def members(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """(dotted name, argument or "") of everything public in one public name."""
    yield name, ""
    if not inspect.isclass(value):
        yield from ((name, argument) for argument in arguments(value))
        return
    if issubclass(value, enum.Enum):
        public = [member.name for member in value if not member.name.startswith("_")]
        yield from ((f"{name}.{member}", "") for member in public)
        return
    if dataclasses.is_dataclass(value):
        made = {field.name for field in dataclasses.fields(value)}
    elif "__init__" in vars(value):
        made = arguments(value.__init__)
    else:
        made = set()
    yield from ((name, argument) for argument in made if not argument.startswith("_"))
    for key, member in vars(value).items():
        function = getattr(member, "__func__", member)
        if key.startswith("_"):
            continue
        if isinstance(member, property):
            yield f"{name}.{key}", ""
        elif inspect.isfunction(function):
            yield f"{name}.{key}", ""
            yield from ((f"{name}.{key}", argument) for argument in arguments(function))


def installed(system: str) -> set[tuple[str, str]]:
    """What the installed torch has of FSDP2 or FSDP1."""
    new = set(_fully_shard.__all__)
    if system == "FSDP2":
        names = {name: getattr(fsdp, name) for name in new}
    else:
        public = {n for n in dir(fsdp) if n[0] != "_" and callable(getattr(fsdp, n))}
        names = {
            name: getattr(fsdp, name) for name in public | set(fsdp.__all__) if name not in new
        }
        names |= {name: getattr(wrap, name) for name in wrap.__all__}
        names["ShardedGradScaler"] = sharded_grad_scaler.ShardedGradScaler
    return {pair for name, value in names.items() for pair in members(SHORT.get(name, name), value)}


def documented(found: list[Row]) -> set[tuple[str, str]]:
    """The contents of the column "theirs", in the same form."""
    pairs = set()
    for row in found:
        for code in code_in(row.theirs):
            named = re.fullmatch(r"([\w.]+)(?:\(([\w, ]*)\))?", code)
            if named is not None:
                pairs |= {(named[1], argument) for argument in re.findall(r"\w+", named[2] or "")}
                parts = named[1].split(".")
                pairs |= {(".".join(parts[: n + 1]), "") for n in range(len(parts))}
    return pairs


def of(system: str) -> list[Row]:
    return [row for row in ROWS if row.system == system]


@pytest.mark.parametrize("system", ["FSDP2", "FSDP1"])
def test_every_public_name_and_argument_of_the_installed_fsdp_has_a_row(system: str) -> None:
    missing = installed(system) - documented(of(system))
    assert not missing, f"docs/reference/names/fsdp.md has no row for {sorted(missing)}"


@pytest.mark.parametrize("system", ["FSDP2", "FSDP1"])
def test_no_row_is_about_something_that_torch_has_not(system: str) -> None:
    stated = re.search(r"What torch (\d+\.\d+),", TEXT)
    assert stated is not None
    if not since(stated[1]):
        pytest.skip(f"the page is about torch {stated[1]}, this is {torch.__version__}")
    main = re.sub(r"\nBeside it:.*?(?=\n## |\Z)", "", TEXT, flags=re.DOTALL)
    stale = documented([row for row in rows(main) if row.system == system]) - installed(system)
    assert not stale, f"torch {torch.__version__} has no {sorted(stale)}"


def test_what_is_looked_for_is_found() -> None:
    new, old = installed("FSDP2"), installed("FSDP1")
    assert {("fully_shard", "mp_policy"), ("FSDPModule.unshard", "async_op"),
            ("MixedPrecisionPolicy", "output_dtype"), ("UnshardHandle.wait", ""),
            ("CPUOffloadPolicy", "pin_memory"), ("OffloadPolicy", "")} <= new  # fmt: skip
    assert {("FSDP", "use_orig_params"), ("FSDP.summon_full_params", "with_grads"),
            ("ShardingStrategy.NO_SHARD", ""), ("FSDP.module", ""), ("FlatParameter", ""),
            ("ModuleWrapPolicy", "module_classes"), ("ShardedGradScaler.scale", "outputs"),
            ("FullStateDictConfig", "rank0_only")} <= old  # fmt: skip
    assert not new & old

    class Newer:
        def set_more(self, depth: int, *, recurse: bool = True) -> None: ...

    assert set(members("Newer", Newer)) == {
        ("Newer", ""), ("Newer.set_more", ""), ("Newer.set_more", "depth"),
        ("Newer.set_more", "recurse"),
    }  # fmt: skip


def test_every_row_says_what_to_write_or_why_there_is_nothing() -> None:
    assert {row.system for row in ROWS} == set(SYSTEMS)
    for row in ROWS:
        assert code_in(row.theirs), f"{row} names nothing"
        if row.here not in WORDS:
            assert code_in(row.here), f"{row}: code, or one of {WORDS}"
            assert re.sub(r"`[^`]+`|,| ", "", row.here) == "", f"{row}: words belong into the note"
    for row in ROWS:
        reason = row.note or row.here != "none"
        assert reason, f"{row} does not say why there is none"


def test_options_exist_and_take_the_values_that_the_page_gives_them() -> None:
    codes = dict.fromkeys(code for row in ROWS for code in row.codes)
    options = [code for code in codes if option(code) is not None]
    assert len(options) > 60
    assert [wrong for code in options if (wrong := wrong_option(code))] == []


def test_options_that_a_note_or_the_text_names_exist() -> None:
    text = TEXT[: TEXT.index("\n## FSDP2")] + " ".join(row.note for row in ROWS)
    options = [code for code in code_in(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
               if option(code) is not None]  # fmt: skip
    assert len(options) > 10
    assert [wrong for code in options if (wrong := wrong_option(code))] == []


@pytest.mark.parametrize(
    "code",
    ["weight_parallel.overlaps", "weight_parallel.overlap = 3", "train.dtype = \"int8\"",
     "optimizer.learning_rate = 1.0"],
)  # fmt: skip
def test_a_wrong_option_is_found(code: str) -> None:
    assert wrong_option(code)


def test_the_ranks_of_a_mesh_are_asked_for_once() -> None:
    """torch computes them anew each time, which took a tenth of the first forward's set-up."""
    mesh = mock.Mock()
    ranks = type(mesh).mesh = mock.PropertyMock(return_value=torch.arange(2))
    info, size = mock.Mock(mesh=mesh), mock.Mock(size=lambda: 2)
    params = [mock.Mock(mesh_info=info, _spmd_mesh=size) for _ in range(4)]
    unit: Any = mock.Mock(groups=[mock.Mock(fsdp_params=params)])
    assert by_mesh([unit]) == [params]
    assert ranks.call_count == 1
