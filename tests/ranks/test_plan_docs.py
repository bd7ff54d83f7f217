"""The examples of docs/howto/rules.md do what the page says."""

from __future__ import annotations

import io
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from internsp.app.config import load_config
from internsp.app.plan.screen import print_plan
from internsp.config import PlanRule
from tests.support.ranks import run_ranks

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
PAGE = HOWTO / "rules.md"
MODEL = """
import torch
import internsp
from torch import nn

class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.wide, self.out_proj = nn.Linear(size, 64), nn.Linear(64, size)

    def forward(self, x):
        return x + self.out_proj(torch.relu(self.wide(self.norm(x))))

class Model(nn.Sequential):
    def weight_parallel_plan(self):
        return [{"match": "layers.*.wide", "shard_dim": 1}]

mesh = internsp.ParallelMesh.create(weight=2, device_type="cpu")
torch.manual_seed(0)
model = Model(nn.Embedding(100, 32))
model.layers = nn.Sequential(*[Block(32) for _ in range(4)])
model.head = nn.Linear(32, 100)
"""


def blocks(language: str, page: Path = PAGE) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_file_of_the_page_prints_what_the_page_shows(tmp_path: Path) -> None:
    (source, *_), (shown,) = blocks("toml"), blocks("text")
    path = tmp_path / "plan.toml"
    path.write_text(
        f"{source}\n[model]\nlayers = 8\n[parallel]\nweight = 2\n[launch]\nprocesses = 2\n"
    )
    text = io.StringIO()
    print_plan(load_config(path), 2, Console(file=text, soft_wrap=True))
    assert shown in text.getvalue()


def example(
    rank: int, world_size: int, source: str
) -> tuple[dict[str, int], list[bool], dict[str, bool]]:
    """Runs the page's Python on a model with a rule: shards, triggers in blocks, fp64 gradients."""
    variables: dict[str, Any] = {}
    exec(compile(source, "rules.md", "exec"), variables)
    torch, communicator = variables["torch"], variables["communicator"]
    communicator.prefetch_all()
    communicator.unshard(variables["model"].head)
    variables["model"](torch.randint(0, 100, (8,))).sum().backward()
    cut = {w.name: w.layout.dim for w in communicator.replicated.sharded}
    communicator.reshard(variables["model"])
    wide = {w.name: w.reduce_dtype == torch.float64 for w in communicator.replicated.sharded}
    return cut, [unit.trigger_at >= 0 for unit in communicator.blocks], wide


@pytest.mark.thorough(1)
def test_the_python_of_the_page_runs_and_its_rules_hold() -> None:
    (source,) = blocks("python")
    source = MODEL + source
    for cut, triggers, wide in run_ranks(example, 2, source):
        assert {name for name, dim in cut.items() if dim} == {
            f"layers.{i}.wide.weight" for i in range(3)
        }
        assert {name for name, is_wide in wide.items() if is_wide} == {"head.weight"}
        assert triggers == [False, False, True, True]


def test_the_other_rules_of_the_page_are_rules() -> None:
    _, *others = (*blocks("toml"), *blocks("toml", HOWTO / "memory.md"))
    assert len(others) == 3
    rules = [rule for text in others for rule in tomllib.loads(text)["weight_parallel"]["rules"]]
    variables: dict[str, Any] = {"torch": torch}
    (functions,) = blocks("py")
    exec(compile(functions, "rules.md", "exec"), variables)
    rules += variables["rules"]
    assert all(PlanRule.model_validate(rule).options() for rule in rules)
    shard = torch.randn(3, 4, dtype=torch.float64)
    sent = variables["pre"](shard)
    out = torch.full((1, 3, 4), torch.nan, dtype=torch.float64)
    variables["post"](tuple(part[None] for part in sent), out)
    torch.testing.assert_close(out[0], shard, rtol=0.07, atol=0.02)  # fp8 has three bits


def test_the_page_names_every_key_and_no_other() -> None:
    table = PAGE.read_text().partition("## Keys")[2].partition("\n## ")[0]
    named = {key for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
             for key in re.findall(r"`(\w+)`", row)}  # fmt: skip
    assert named == set(PlanRule.model_fields) - {"match"}
