"""Invalid values: every number of a configuration has a lower and an upper bound."""

from __future__ import annotations

import math
import types
import typing
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le, Lt

from internsp.app.config import Config, read_config, sections
from internsp.app.plan.screen import print_plan
from internsp.errors import ConfigError, MeshError
from internsp.mesh import ParallelMesh
from internsp.structure.kept import blocks_within

KEYS = [(name, key) for name, cls in sections().items() for key in cls.model_fields]


def numbers(annotation: Any, metadata: list[Any]) -> list[list[Any]]:
    """Constraints of each number inside the type of a key."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        found = [m for meta in args[1:] for m in getattr(meta, "metadata", [meta])]
        return numbers(args[0], found)
    if origin in (types.UnionType, typing.Union, tuple):
        return [n for a in args if a not in (type(None), Ellipsis) for n in numbers(a, metadata)]
    return [metadata] if annotation in (int, float) else []


@pytest.mark.parametrize(("section", "key"), KEYS, ids=lambda part: part)
def test_every_number_has_both_bounds_and_they_are_kept(section: str, key: str) -> None:
    field = sections()[section].model_fields[key]
    for constraints in numbers(field.annotation, field.metadata):
        assert any(isinstance(c, (Ge, Gt)) for c in constraints), constraints
        most = [c.le if isinstance(c, Le) else c.lt for c in constraints if isinstance(c, (Le, Lt))]
        assert len(most) == 1, constraints
        several = isinstance(field.default, tuple)
        for value in (math.nan, math.inf, -math.inf, 10**400, most[0] * 2 + 1, -1):
            wrong = [value] * len(field.default) if several else value
            with pytest.raises(ConfigError, match=rf"{section}\.{key}: "):
                sections()[section](**{key: wrong})


def told(tmp_path: Any, text: str, world_size: int = 1) -> list[str]:
    (tmp_path / "run.toml").write_text(text)
    return [str(p) for p in read_config(tmp_path / "run.toml", world_size=world_size)[1]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[data]\nsequence_length = 1", "data.sequence_length: must be at least 2, got 1"),
        ("[optimizer]\nlr = inf", "optimizer.lr: must be a finite number, got inf"),
        ("[optimizer]\nbetas = [nan, 0.9]",
         "optimizer.betas: entry 1: must be a finite number, got nan"),
        ("[optimizer]\nloss_scale_init = 1e30",
         "optimizer.loss_scale_init: must be at most 16777216.0, got 1e+30"),
        ("[parallel]\ntimeout_seconds = 10000000000",
         "parallel.timeout_seconds: must be at most 2592000, got 10000000000"),
        ('[train]\nname = "a\\nb"',
         'train.name: must be usable as the name of a folder, got "a\\nb"'),
        ('[data]\ntext_field = "a\\u0000b"',
         'data.text_field: must be a text without a NUL character, got "a\\x00b"'),
        ("[train]\nsteps = " + "9" * 5000, "not valid TOML: Exceeds the limit"),
        ("a = " + "[" * 3000, "not valid TOML: maximum recursion depth"),
        ('["a\\u001b[31m"]\nb = 1', "[a\\x1b[31m]: unknown section; sections: model, data"),
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_what_is_absurd_is_refused_in_one_line(tmp_path, text: str, expected: str) -> None:
    (line,) = told(tmp_path, text)
    assert line.startswith(expected)


def test_a_file_without_an_end_and_one_with_thousands_of_mistakes_are_short_reports(tmp_path):
    assert [str(p) for p in read_config("/dev/zero")[1]] == [
        "more than 1048576 bytes: not a configuration"
    ]
    many = "".join(f"[s{i}]\nk = 1\n" for i in range(3000))
    lines = told(tmp_path, many)
    assert len(lines) == 32
    assert lines[-1] == "and more; no further names are looked at"
    (line,) = told(tmp_path, f"[data]\npaths = {list(range(1000))}")
    assert line == "data.paths: entry 1: expected a text, got 0"
    (line,) = told(tmp_path, f"[data]\ntext_field = {list(range(1000))}")
    assert line.endswith("got [0, 1, 2, 3, 4, 5, 6, 7, ... 992 more]")
    unknown = told(tmp_path, "[train]\n" + "".join(f"{'q' * 60}{i} = 1\n" for i in range(3000)))
    assert {line.partition(": ")[2] for line in unknown[30:]} == {"unknown key"}


def test_a_plan_of_too_many_passes_is_refused_and_not_begun() -> None:
    config = Config.model_validate(
        {"model": {"layers": 2000}, "train": {"micro_batches": 512, "global_batch": 512}}
    )
    with pytest.raises(ConfigError, match="512 micro-batches x 2000 blocks are too many to plan"):
        print_plan(config, 1)
    # Once cubic in the number of blocks.
    assert len(blocks_within([8] * 2000, 1, 8 * 900)) == 900


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf, 1e10, "300"])
def test_a_mesh_with_a_timeout_that_no_clock_holds_is_refused(seconds: Any) -> None:
    with pytest.raises(MeshError, match="must be above 0 and at most 2592000"):
        ParallelMesh.create(timeout_seconds=seconds)
