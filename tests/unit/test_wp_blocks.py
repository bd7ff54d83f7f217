"""WP-7: blocks and prefetch triggers are found by patterns.

If none matches, the error lists candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn

from internsp.config import PlanRule, WeightParallelConfig
from internsp.errors import StructureError
from internsp.layers import RowParallelLinearWithCommExt
from internsp.structure.assign import plan_sharding, require_patterns_matched
from internsp.structure.blocks import read_structure, trigger_position
from tests.support.models import Block, Tiny


class Odd(nn.Module):
    """Blocks and parts with unusual names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.tower = nn.ModuleList(
            nn.ModuleDict({"mix": nn.Linear(4, 4), "fold": nn.Linear(4, 4)}) for _ in range(2)
        )
        self.unembed = nn.Linear(4, 5)


def test_usual_names_are_found_without_configuration() -> None:
    structure = read_structure(Tiny(layers=3))
    assert [b.name for b in structure.blocks] == ["layers.0", "layers.1", "layers.2"]
    assert [b.trigger_name for b in structure.blocks] == ["wo"] * 3
    assert structure.embedding is not None
    assert structure.embedding[0] == "embed"
    assert structure.head is not None
    assert structure.head[0] == "head"
    assert [b.trigger_name for b in read_structure(Tiny(), "mlp").blocks] == ["w1"] * 4
    assert [b.trigger_module for b in read_structure(Tiny(), "qkv").blocks] == [None] * 4


def test_patterns_find_blocks_and_prefetch_triggers_with_any_name() -> None:
    # As the error proposes.
    structure = read_structure(Odd(), blocks=("tower.*",), gather_before_modules=("fo*",))
    assert [b.name for b in structure.blocks] == ["tower.0", "tower.1"]
    assert [b.trigger_name for b in structure.blocks] == ["fold", "fold"]
    assert structure.head is not None
    assert structure.head[0] == "unembed"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (partial(read_structure, Odd()), ["no transformer blocks", "tower.*", "ModuleDict"]),
        (
            partial(read_structure, Odd(), blocks=("towr.*",)),
            ["weight_parallel.blocks: 'towr.*' matches no module (did you mean 'tower.*'?); "],
        ),
        (
            partial(read_structure, Odd(), blocks=("x/y",)),
            ["'x/y' matches no module; candidates: tower.*"],
        ),
        (
            partial(read_structure, Odd(), blocks=("tower.*",)),
            ["no prefetch trigger", "tower.0", "mix", "fold"],
        ),
        (
            partial(read_structure, Odd(), blocks=("tower.*",), gather_before_modules=("fald",)),
            ["no prefetch trigger", "fald (did you mean 'fold'?)", "mix", "fold"],
        ),
        (
            partial(
                read_structure, Odd(), blocks=("tower.*",), gather_before_modules=("fold", "mixx")
            ),
            ["weight_parallel.gather_before_modules: 'mixx' matches no module of any block "
             "(did you mean 'mix'?)"],
        ),
        (
            partial(require_patterns_matched, ["layers.0.mlp.experts.0.w1", "layers.0.wo"],
                    WeightParallelConfig(expert_parameters=("experts", "expert"))),
            ["weight_parallel.expert_parameters: 'expert' matches no parameter (did you mean "
             "'experts'?)",
             "candidates: layers.*, layers.*.mlp.experts.*"],
        ),
        (partial(read_structure, Tiny(), blocks=("layers", "layers.*")), ["layers.0 lies inside"]),
        (partial(read_structure, Tiny(), "attention"), ["'attention'", "layers.0", "q, wo"]),
        (partial(read_structure, nn.Linear(2, 2)), ["no module list in this model"]),
        (
            partial(read_structure, Tiny(), gather_before_modules=("w2",),
                    rules=[PlanRule(match="layers.0", gather_before="attention")]),
            ["in block layers.0", "set gather_before_modules in its rule, candidates: norm, q, wo"],
        ),
        (
            partial(read_structure, Tiny(), blocks=("layers.*", "head")),
            ["in block head",
             "it has none: set gather_before = 'qkv', its entry, in a rule for it"],
        ),
    ],
)
def test_what_matches_nothing_or_too_much_is_refused_with_candidates(
    call: Callable[[], Any], words: list[str]
) -> None:
    with pytest.raises(StructureError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_every_parameter_has_one_place_and_shared_ones_one_assignment() -> None:
    model = Tiny(layers=2, tied=True)
    model.layers[1].wo = RowParallelLinearWithCommExt(6, 6)  # type: ignore[operator]
    config = WeightParallelConfig(min_shard_elements=36)
    structure = read_structure(model, rules=[PlanRule(match="embed", shard_dim=1)])
    found = {a.name: a for a in plan_sharding(model, structure, config)}
    assert set(found) == {name for name, _ in model.named_parameters()}
    tied = found["embed.weight"]
    assert [o.full_name for o in tied.owners] == ["embed.weight", "head.weight"]
    assert (tied.unit, tied.block, tied.dim) == ("embed", -1, 1)
    assert (found["layers.1.wo.weight"].unit, found["layers.1.wo.weight"].dim) == ("layers.1", 1)
    assert found["layers.0.w1.weight"].dim == 0
    assert found["layers.0.w1.bias"].unit is None
    assert found["norm.weight"].unit is None
    small = plan_sharding(model, read_structure(model), WeightParallelConfig(min_shard_elements=37))
    assert next(a for a in small if a.name == "layers.0.q.weight").unit is None


def test_a_weight_shared_between_blocks_is_a_unit_beside_them() -> None:
    model = Tiny()
    model.layers[3].q.weight = model.layers[0].q.weight  # type: ignore[union-attr]
    found = plan_sharding(model, read_structure(model), WeightParallelConfig(min_shard_elements=20))
    shared = {a.name: (a.unit, a.block) for a in found if len(a.owners) > 1}
    assert shared == {"layers.0.q.weight": ("layers.0.q.weight", -1)}
    assert all(a.block == 3 for a in found if a.unit and a.name.startswith("layers.3."))


@pytest.mark.parametrize(
    ("trigger", "owners", "position"),
    [
        ("out_proj", ["q", "wo", "w1"], 1),
        ("out_proj", ["attention.q", "attention.wo", "mlp.w1"], 1),
        ("out_proj", ["q", "w1"], 2),  # a small out-projection: after all sharded weights
        ("mlp", ["q", "wo", "w1", "w2"], 2),
        ("qkv", ["q", "wo"], -1),
    ],
)
def test_the_prefetch_trigger_lies_before_the_first_weight_used_after_it(
    trigger: str, owners: list[str], position: int
) -> None:
    class Named(Block):
        pass

    block = read_structure(Tiny(Named), trigger).blocks[0]
    assert trigger_position(block, owners) == position
