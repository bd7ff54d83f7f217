"""Units below blocks, pure: how a block is divided, its bytes, one order on all ranks."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor, nn

from internsp.app.config import Config
from internsp.app.plan.screen import print_plan
from internsp.app.plan.step import make_plan
from internsp.config import WeightParallelConfig
from internsp.errors import ConfigError, StructureError
from internsp.mesh.shape import MeshShape
from internsp.schedule.chunk import ChunkLayout
from internsp.schedule.simulate import BatchUsage, simulate
from internsp.structure.assign import plan_sharding
from internsp.structure.blocks import read_structure
from internsp.structure.units import chunk_layout
from tests.support.models import Tiny


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(6, 13), nn.Linear(13, 6)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.feed, self.attention, self.gate = Part(), Part(), nn.Linear(6, 60)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


EACH = {"match": ["layers.*.attention", "layers.*.feed"], "unit": "each"}
MORE = {"match": ["layers.*.attention.w?", "layers.*.feed"], "unit": "each"}


def plan(*rules: dict[str, Any], recomputed: Sequence[int] = (), layers: int = 3,
         split: bool = False, **options: Any) -> ChunkLayout:  # fmt: skip
    settings = {"min_shard_elements": 20, "coalesce_bytes": 0, "gather_before": "qkv", **options}
    config = WeightParallelConfig.model_validate({**settings, "rules": list(rules)})
    model = Tiny(Layer, layers=layers)
    structure = read_structure(
        model, config.gather_before, config.blocks, config.gather_before_modules, config.rules
    )
    found = plan_sharding(model, structure, config)
    return chunk_layout(found, structure, config, MeshShape(2, 2), set(recomputed), split)


def test_units_of_a_block_come_in_the_order_of_the_patterns_or_of_registration() -> None:
    def names(*rules: dict[str, Any]) -> list[str]:
        return [unit.name for unit in plan(*rules, layers=2).blocks]

    assert names(EACH) == [f"layers.{i}.{n}" for i in (0, 1) for n in ("attention", "feed")]
    two = [{"match": f"layers.*.{n}", "unit": "each"} for n in ("attention", "feed")]
    assert names(*two) == [f"layers.{i}.{n}" for i in (0, 1) for n in ("feed", "attention")]


def test_what_no_unit_has_is_the_rest_of_its_block_with_slots_of_its_own() -> None:
    made = plan(EACH)
    assert [each.name for each in made.enclosing] == ["layers.0", "layers.1", "layers.2"]
    assert [[w.name for w in each.rest.weights] for each in made.enclosing] == [
        [f"layers.{i}.gate.weight"] for i in range(3)
    ]
    slots = [each.rest.slot for each in made.enclosing]
    assert slots == [slots[0], slots[0] + 1, slots[0]]
    unit, gate, embedding, head = 1024, 1536, 512, 512  # multiples of 256; biases are replicated
    assert made.slots() == [unit, unit, embedding, head, gate, gate]
    assert plan().slots()[:2] == [2 * unit + gate] * 2
    lowest = plan(EACH, prefetch_depth=0)
    assert lowest.slots() == [unit, embedding, head, gate]
    assert sum(lowest.slots()) == made.min_slot_bytes() < plan().min_slot_bytes()
    last = plan({"match": ["layers.1.attention", "layers.1.feed"], "unit": "each"})
    assert len(last.slots()) == 5  # one unit for the others: no reuse


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([{"match": "layers.1", "unit": "each"}], "layers.1 is a unit already"),
        ([{"match": "head", "unit": "each"}], "head lies in no block (they are layers.0"),
        ([{"match": "layers.0.gate.weight", "unit": "each"}], "gate.weight is a parameter"),
        (
            [EACH, {"match": "layers.0.feed", "unit": "each"}],
            "unit of layers.0.feed is set twice",
        ),
        (
            [{"match": ["layers.0.feed", "layers.0.feed.w1"], "unit": "each"}],
            "layers.0.feed.w1 lies inside layers.0.feed",
        ),
        (
            [EACH, {"match": "layers.0.feed", "gather_before": "out_proj"}],
            "no prefetch trigger 'out_proj' in block layers.0.feed",
        ),
    ],
)
def test_units_that_cannot_be_are_refused(rules: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(StructureError) as caught:
        plan(*rules)
    assert words in str(caught.value)


def test_compiled_blocks_and_split_backwards_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers\.0 has a unit .*compile"):
        plan(EACH, compile=True)
    with pytest.raises(ConfigError, match="a backward computed in two parts"):
        plan(EACH, split=True)


@pytest.mark.parametrize("rule", [EACH, MORE], ids=["two units", "three units"])
@pytest.mark.parametrize("recomputed", [(), (0, 1, 2), (1,)], ids=str)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_ranks_whose_data_skip_blocks_launch_in_the_order_of_the_others(
    rule: dict[str, Any], recomputed: Sequence[int], depth: int
) -> None:
    made = plan(rule, recomputed=recomputed, prefetch_depth=depth)
    together = replace(made, policy=replace(made.policy, one_order=True))
    for kinds, chunk in ((("AG",), made), (("RS",), made), (("AG", "RS"), together)):
        wanted = simulate(chunk, 2).lines(kinds)
        for count in (1, 2, 3):
            for chosen in combinations(chunk.enclosing, count):
                skipped = [i for each in chosen for i in range(each.first, each.last + 1)]
                data = BatchUsage(without_gradient=frozenset(skipped), head_gradient=count < 3)
                assert simulate(chunk, 2, data=[data, BatchUsage()]).lines(kinds) == wanted
        idle = BatchUsage(
            uses={w.name: 0 for u in chunk.units for w in u.weights if "w1" in w.name}
        )
        assert simulate(chunk, 2, data=[BatchUsage(), idle]).lines(kinds) == wanted


def test_every_weight_of_every_unit_is_gathered_for_each_pass_and_reduced_once() -> None:
    made = plan(EACH, recomputed=(0, 2), prefetch_depth=0)
    schedule = simulate(made, 1)
    names = sorted(w.name for unit in made.units for w in unit.weights)
    reduced = [a.weight for a in schedule.actions if a.kind == "RS"]
    assert sorted(reduced) == names
    gathered = {a.weight for a in schedule.actions if a.kind == "AG"}
    assert gathered == set(names)


@pytest.mark.thorough(1)
def test_the_printed_plan_shows_units_and_the_lowest_peak() -> None:
    sections: dict[str, Any] = {
        "model": {"hidden_size": 16, "layers": 4, "heads": 2, "intermediate_size": 48},
        "data": {"sequence_length": 32},
        "parallel": {"weight": 2},
        "weight_parallel": {"min_shard_elements": 64},
    }
    whole = make_plan(Config.model_validate(sections), 2).chunk
    rule = {"match": ["layers.*.attention", "layers.*.feed_forward"], "unit": "each"}
    sections["weight_parallel"]["rules"] = [rule]
    config = Config.model_validate(sections)
    chunk = make_plan(config, 2).chunk
    assert len(chunk.blocks) == 8
    assert chunk.min_slot_bytes() < whole.min_slot_bytes()
    text = io.StringIO()
    print_plan(config, 2, Console(file=text, soft_wrap=True))
    assert 'layers.*.attention, layers.*.feed_forward: unit = "each"' in text.getvalue()
    line = next(x for x in text.getvalue().splitlines() if "units are gathered in turn" in x)
    assert line.startswith("8 units are gathered in turn, the largest layers.0.feed_forward (")
    assert f"{sum(chunk.slots()) / 1024:.1f} KiB" in line
    assert f"{chunk.min_slot_bytes() / 1024:.1f} KiB" in line
