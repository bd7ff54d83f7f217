"""Which parameters belong to experts, by patterns of consecutive parts of a name."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from internsp.config import WeightParallelConfig
from internsp.errors import StructureError
from internsp.mesh.shape import MeshShape
from internsp.schedule.chunk import ChunkLayout
from internsp.schedule.simulate import simulate
from internsp.structure.assign import plan_sharding
from internsp.structure.blocks import read_structure
from internsp.structure.units import chunk_layout


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wo = nn.Linear(8, 8)
        self.mlp = nn.ModuleDict(
            {
                "router": nn.Linear(8, 8, bias=False),
                "shared_experts": nn.Linear(8, 16, bias=False),
                "experts": nn.ModuleList(nn.Linear(8, 16) for _ in range(2)),
            }
        )


def model() -> nn.Module:
    made = nn.Module()
    made.layers = nn.ModuleList([Block(), Block()])
    return made


def experts_of(*patterns: str, expert: int = 1) -> tuple[set[str], set[str]]:
    """(experts, the sharded ones among them) in the first block, without its name."""
    config = WeightParallelConfig(min_shard_elements=64, expert_parameters=patterns or ("experts",))
    made = model()
    if expert > 1:
        for layer in made.layers:
            layer.mlp.experts.expert_ranks = expert
    found = [a for a in plan_sharding(made, read_structure(made), config, expert) if a.expert]
    names = {a.name.removeprefix("layers.0.") for a in found if a.name.startswith("layers.0.")}
    cut = {a.name.removeprefix("layers.0.") for a in found if a.unit == "layers.0"}
    return names, cut


LINEARS = {f"mlp.experts.{i}.{name}" for i in (0, 1) for name in ("weight", "bias")}
WEIGHTS = {name for name in LINEARS if name.endswith("weight")}


def test_a_part_named_experts_is_enough_and_a_name_that_only_contains_it_is_not() -> None:
    assert experts_of() == (LINEARS, WEIGHTS)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("mlp.experts", LINEARS),
        ("layers.*.mlp.experts.?", LINEARS),
        ("experts.0.weight", {"mlp.experts.0.weight"}),
        ("*experts", LINEARS | {"mlp.shared_experts.weight"}),
        ("mlp.*.0", {n for n in LINEARS if ".0." in n}),
        ("layers.experts", set()),  # parts follow each other without a gap
        ("layers.1", set()),  # the other block's
        ("wo", {"wo.weight", "wo.bias"}),
    ],
)
def test_patterns_match_consecutive_parts(pattern: str, names: set[str]) -> None:
    assert experts_of(pattern)[0] == names


def test_owned_experts_are_cut_whatever_their_size() -> None:
    assert experts_of(expert=2) == (LINEARS, LINEARS)


@pytest.mark.parametrize(("declared", "expert", "words"), [
    (None, 2, "does not declare that it sends tokens to the owners of layers.0.mlp.experts.0"),
    (1, 2, "does not declare"),
    (4, 2, "declares expert_ranks = 4 for layers.0.mlp.experts.0.weight, but the mesh has expert"),
    (4, 1, "declares expert_ranks = 4"),
    ("four", 2, "declares expert_ranks = 'four'"),
])  # fmt: skip
@pytest.mark.parametrize("where", ["layers.0.mlp", "layers.0.mlp.experts", ""])
def test_a_model_declares_on_how_many_ranks_its_experts_are(
    declared: Any, expert: int, words: str, where: str
) -> None:
    made = model()
    if declared is not None:
        made.get_submodule(where).expert_ranks = declared
    config = WeightParallelConfig()
    with pytest.raises(StructureError) as caught:
        plan_sharding(made, read_structure(made), config, expert)
    assert words in str(caught.value)
    for layer in made.layers:
        layer.mlp.experts.expert_ranks = expert  # the nearest declaration holds
    assert plan_sharding(made, read_structure(made), config, expert)


def plan(shape: MeshShape, **settings: Any) -> ChunkLayout:
    config = WeightParallelConfig(**{"min_shard_elements": 64, "coalesce_bytes": 0, **settings})
    made = model()
    structure = read_structure(made)
    shardings = plan_sharding(made, structure, config, shape.expert)
    return chunk_layout(shardings, structure, config, shape, set())


def test_bytes_of_experts_are_those_of_their_own_groups() -> None:
    by_name = {w.name: w for w in plan(MeshShape(8, 2, expert_weight=4)).blocks[0].weights}
    dense, expert = by_name["layers.0.wo.weight"], by_name["layers.0.mlp.experts.0.weight"]
    assert (dense.gather_bytes, dense.shard_bytes, dense.expert) == (64 * 4 // 2, 128, False)
    assert (expert.gather_bytes, expert.reduce_bytes) == (128 * 4 * 3 // 4, 128 * 4 * 3 // 4)
    assert (expert.shard_bytes, expert.expert) == (128 * 4 // 4, True)
    alone = {w.name: w for w in plan(MeshShape(8, 2, expert_weight=1)).blocks[0].weights}
    assert not alone["layers.0.mlp.experts.0.weight"].needs_gather
    assert alone["layers.0.wo.weight"].needs_gather
    same = plan(MeshShape(8, 2, expert_weight=2))
    assert not any(w.expert for w in same.blocks[0].weights)


def test_small_weights_of_two_axes_do_not_share_a_launch() -> None:
    """A synchronous step waits once for what was launched together."""
    waits = []
    for size in (2, 4):
        chunk = plan(MeshShape(8, 2, expert_weight=size), coalesce_bytes=65536)
        schedule = simulate(chunk, overlap=False)
        assert schedule.count("AG") == schedule.count("RS") == 2 * 5
        waits.append(schedule.count("WAIT"))
    # Two blocks, which stay in their slots for backward: a gather and a reduction of each, or of
    # its dense weights and of its experts.
    assert waits == [2 + 2, 4 + 4]


def test_a_mesh_for_experts_and_a_model_without_any_is_an_error_that_lists_candidates() -> None:
    with pytest.raises(StructureError) as caught:
        plan(MeshShape(8, 2, expert=2), expert_parameters=("moe.*",))
    assert "weight_parallel.expert_parameters = ['moe.*']" in str(caught.value)
    assert "layers.*.mlp.experts.*, layers.*.mlp.router" in str(caught.value)
    stage = plan(MeshShape(8, 2, pipeline=2, expert=2), expert_parameters=("moe.*",))
    assert not any(w.expert for w in stage.blocks[0].weights), "a stage may have none"
