"""The plan's rules: which weights they match, their settings, every way to write one wrong."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from internsp.app.config import Config, read_config
from internsp.app.models.factory import build_model
from internsp.app.plan.screen import print_plan
from internsp.config import PlanRule, WeightParallelConfig
from internsp.errors import ConfigError, LayoutError, StructureError
from internsp.mesh.shape import MeshShape
from internsp.schedule.chunk import ChunkLayout, WeightLayout
from internsp.structure.assign import plan_sharding
from internsp.structure.blocks import read_structure
from internsp.structure.units import chunk_layout
from tests.support.models import Tiny

CUT = {"min_shard_elements": 20}


class WithRules(Tiny):
    """A model with its own rules."""

    def weight_parallel_plan(self) -> list[dict[str, Any]]:
        return [{"match": "layers.*.w1", "shard_dim": 1, "coalesce_bytes": 1}]


def plan(*rules: dict[str, Any], model: nn.Module | None = None, **settings: Any) -> ChunkLayout:
    config = WeightParallelConfig.model_validate({**CUT, **settings, "rules": list(rules)})
    model = model or Tiny()
    structure = read_structure(
        model, config.gather_before, config.blocks, config.gather_before_modules, config.rules
    )
    shape = MeshShape(2, 2)
    shardings = plan_sharding(model, structure, config, shape.expert)
    return chunk_layout(shardings, structure, config, shape, set())


def weights(made: ChunkLayout) -> dict[str, WeightLayout]:
    return {w.name: w for unit in made.units for w in unit.weights}


def dims(*rules: dict[str, Any], model: nn.Module | None = None) -> dict[str, int]:
    model = model or Tiny()
    config = WeightParallelConfig.model_validate({**CUT, "rules": list(rules)})
    structure = read_structure(model, rules=config.rules)
    return {a.name: a.dim for a in plan_sharding(model, structure, config) if a.unit is not None}


def refused(kind: type[Exception], *rules: dict[str, Any], **options: Any) -> str:
    with pytest.raises(kind) as caught:
        plan(*rules, **options)
    return str(caught.value)


def test_a_rule_holds_for_what_it_matches_and_all_below_and_for_nothing_else() -> None:
    found = dims({"match": ["layers.{1-2}.w?", "layers.0.wo.weight"], "shard_dim": -1})
    turned = {f"layers.{i}.w{n}.weight" for i in (1, 2) for n in (1, 2, "o")} | {
        "layers.0.wo.weight"
    }
    assert {name for name, dim in found.items() if dim} == turned
    assert {n for n, d in dims({"match": "layers.1", "shard_dim": 1}).items() if d} == {
        f"layers.1.{n}.weight" for n in ("q", "wo", "w1", "w2")
    }


def test_what_is_small_enough_is_replicated_whatever_its_dimensions() -> None:
    size = 6 * 13  # of w1
    below = weights(plan({"match": "layers.*", "min_shard_elements": size + 1}))
    assert set(below) == {"embed.weight", "head.weight"}
    above = weights(plan({"match": "layers.0", "min_shard_elements": 6}))
    assert {n for n in above if n.startswith("layers.0")} == {
        n for n, _ in Tiny().named_parameters() if n.startswith("layers.0")
    }


def test_ignored_parameters_are_none_of_the_plans_and_shared_ones_are_ignored_as_one() -> None:
    kept = {n for n, _ in Tiny().named_parameters()}
    model = Tiny()
    structure = read_structure(model, rules=[PlanRule(match=("layers.1", "norm"), ignore=True)])
    found = {a.name for a in plan_sharding(model, structure, WeightParallelConfig(**CUT))}
    assert found == {n for n in kept if not n.startswith(("layers.1.", "norm."))}
    tied = Tiny(tied=True)
    structure = read_structure(tied, rules=[PlanRule(match=("head",), ignore=True)])
    shardings = plan_sharding(tied, structure, WeightParallelConfig())
    assert "embed.weight" not in {a.name for a in shardings}


def test_how_weights_travel_is_said_for_some_of_them_alone() -> None:
    made = weights(
        plan(
            {"match": "layers.{0-1}.w1", "quantize": "int8"},
            {"match": "layers.0.w2", "reduce_dtype": "float64"},
            {"match": "layers.0.q", "coalesce_bytes": 0},
            reduce_dtype="bfloat16",
        )
    )
    assert {n for n, w in made.items() if w.encoding} == {f"layers.{i}.w1.weight" for i in (0, 1)}
    wide = {n for n, w in made.items() if w.dtypes.reduce == torch.float64}
    assert wide == {"layers.0.w2.weight"}
    alone = {n for n, w in made.items() if not w.coalesced}
    assert alone == {"layers.0.w1.weight", "layers.1.w1.weight", "layers.0.q.weight"}
    back = weights(plan({"match": "layers.0.w2", "reduce_dtype": "none"}, reduce_dtype="bfloat16"))
    wide = {n for n, w in back.items() if w.dtypes.reduce == torch.float32}
    assert wide == {"layers.0.w2.weight"}
    some = plan({"match": "**.w1", "quantize": "none"}, quantize="fp8", coalesce_bytes=0)
    assert not any(w.encoding for n, w in weights(some).items() if ".w1." in n)
    assert any(w.encoding for w in weights(some).values())


def test_gradients_are_kept_wide_by_rule() -> None:
    model = Tiny().bfloat16()
    rule = PlanRule(match=("**.wo", "norm"), grad_dtype="float32")
    structure = read_structure(model, rules=[rule])
    shardings = plan_sharding(model, structure, WeightParallelConfig(**CUT))
    found = {a.name: a.dtypes.grad for a in shardings}
    wide = {name for name, dtype in found.items() if dtype == torch.float32}
    assert wide == {"norm.weight", *(f"layers.{i}.wo.weight" for i in range(4))}


@pytest.mark.parametrize(
    ("keep", "rules", "kept"),
    [
        (None, [("layers.{1-2}", True)], {1, 2}),
        ("all", [("layers.0", False)], {1, 2, 3, 4, 5}),
        (2, [("layers.0", True), ("layers.5", False)], {0, 1, 3}),  # of the other four, two
        ("1 GiB", [("layers.{0-4}", False)], {5}),
    ],
)
def test_blocks_stay_unsharded_by_rule_and_the_number_is_of_the_others(
    keep: Any, rules: Sequence[tuple[str, bool]], kept: set[int]
) -> None:
    said = [{"match": name, "keep_unsharded": value} for name, value in rules]
    made = plan(*said, model=Tiny(layers=6), keep_unsharded=keep)
    assert made.policy.kept == kept
    assert len(made.slots()) == 2 + made.policy.slots  # embedding and head


def test_each_block_has_its_own_trigger() -> None:
    made = plan(
        {"match": "layers.0", "gather_before": "qkv"},
        {"match": "layers.1", "gather_before": "mlp"},
        {"match": "layers.2", "gather_before_modules": ["w2"]},
    )
    assert [unit.trigger_at for unit in made.blocks] == [-1, 2, 3, 1]
    back = plan({"match": "layers.0", "gather_before": "out_proj"}, gather_before_modules=["w2"])
    assert [unit.trigger_at for unit in back.blocks] == [1, 3, 3, 3]


def test_blocks_gather_ahead_as_far_as_is_said_of_each() -> None:
    made = plan({"match": "layers.1", "prefetch_depth": 2}, prefetch_depth=0)
    assert made.policy.depths == (0, 2, 0, 0)
    assert made.policy.slots == 3
    none = plan({"match": "layers.*", "prefetch_depth": 0})
    assert (none.policy.depths, none.policy.depth, none.policy.slots) == ((), 0, 1)
    ahead = {"match": "layers.1", "prefetch_depth": 2}
    assert "rolling" in refused(ConfigError, ahead, gather_before="rolling")
    assert 'granularity = "block"' in refused(ConfigError, ahead, granularity="module")


def test_a_model_brings_rules_and_the_configurations_go_before_them() -> None:
    turned = {n for n, d in dims(model=WithRules()).items() if d}
    assert turned == {f"layers.{i}.w1.weight" for i in range(4)}
    assert {n for n, d in dims({"match": "layers.0.w1", "shard_dim": 0}, model=WithRules()).items()
            if d} == turned - {"layers.0.w1.weight"}  # fmt: skip
    small = {n for n, w in weights(plan(model=WithRules())).items() if w.coalesced}
    assert not any(".w1." in n for n in small)
    assert any(".w2." in n for n in small)

    class Listed(Tiny):
        weight_parallel_plan = (PlanRule(match=("head",), shard_dim=1),)

    assert dims(model=Listed())["head.weight"] == 1
    # A rule without an effect is not an error of the configuration.
    assert plan(model=WithRules(), min_shard_elements=10_000).blocks


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"match": "head", "shard_dim": 1}, "is a dict"),
        ("head", "is a str"),
        ([{"match": "head", "sharddim": 1}], "did you mean shard_dim?"),
        ([{"match": "heads", "shard_dim": 1}], "the model's own weight_parallel_plan: 'heads'"),
    ],
)
def test_a_models_own_rules_are_checked_as_well(own: Any, words: str) -> None:
    model = Tiny()
    model.weight_parallel_plan = own
    assert words in refused(StructureError, model=model)


def test_what_a_blocks_trigger_gathers_is_said_for_each_direction() -> None:
    def targets(*rules: dict[str, Any], **options: Any) -> list[list[list[int]]]:
        policy = plan(*rules, **options).policy
        phases = ("forward", "backward")
        return [[policy.targets(block, phase) for block in range(4)] for phase in phases]

    by_depth = [[[1], [2], [3], [4]], [[], [0], [1], [2]]]
    assert targets() == by_depth
    named = {"match": "layers.1", "forward_prefetch": 2}
    assert targets(named) == [[[1], [2, 3], [3], [4]], by_depth[1]]
    head = {"match": "layers.2", "forward_prefetch": 2}
    assert targets(head)[0] == [[1], [2], [3, 4], [4]]
    last = {"match": "layers.3", "forward_prefetch": 0}  # the head is gathered with it at last
    assert targets(last) == by_depth
    back = {"match": "layers.*", "backward_prefetch": 9, "forward_prefetch": 0}
    assert targets(back) == [[[], [], [], [4]], [[], [0], [1, 0], [2, 1, 0]]]
    assert plan(back).policy.slots == 4
    assert plan(named, prefetch_depth=0).policy.slots == 3
    none = {"match": "layers.*", "backward_prefetch": 0, "forward_prefetch": 0}
    assert plan(none).policy.slots == 1  # and not two, as configured for blocks without a rule


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (
            [
                {"match": "layers.0", "forward_prefetch": 2},
                {"match": "layers", "prefetch_depth": 1},
            ],
            ["forward_prefetch and prefetch_depth of layers.0 are both set"],
        ),
        (
            [{"match": "layers.0.w1", "backward_prefetch": 2}],
            ["backward_prefetch has no effect", "is not a block"],
        ),
        (
            [{"match": "norm.weight", "cast_inputs": False}],
            ["is for modules, and the rule matches none"],
        ),
        (
            [{"match": "layer.*", "keep_unsharded": True}],
            ["weight_parallel.rules: 'layer.*' matches no module", "did you mean 'layers.{*}'?"],
        ),
        (
            [{"match": ["layers.0", "layers.{4-9}"], "keep_unsharded": True}],
            ["'layers.{4-9}' matches no module and no parameter"],
        ),
        ([{"match": "xyz", "shard_dim": 1}], ["candidates: embed, layers, layers.{*}"]),
        (
            [
                {"match": "layers.*", "shard_dim": 1},
                {"match": "layers.{*}.w1", "shard_dim": 0, "coalesce_bytes": 0},
            ],
            ["shard_dim of layers.0.w1.weight is set twice",
             "the rule for 'layers.*' and by the rule for 'layers.{*}.w1'"],
        ),
        (
            [
                {"match": "layers.0", "gather_before": "qkv"},
                {"match": "layers", "gather_before": "qkv"},
            ],
            ["gather_before of layers.0 is set twice"],
        ),
        (
            [{"match": "layers.0.w1", "keep_unsharded": True}],
            ["keep_unsharded has no effect", "is not a block", "blocks are layers.0, layers.1"],
        ),
        (
            [{"match": "layers.*.norm", "shard_dim": 0}],
            ["shard_dim has no effect", "is not a sharded parameter"],
        ),
        (
            [{"match": "head", "quantize": "int8"}],
            ["quantize has no effect", "sharded parameter in a block"],
        ),
        (
            [{"match": "layers.0.w1", "ignore": True, "reduce_dtype": "float32"}],
            ["reduce_dtype has no effect"],
        ),
        (
            [{"match": "layers.*", "gather_before_modules": ["wo", "w3"]}],
            ["'w3' matches no module of any block"],
        ),
    ],
)  # fmt: skip
def test_a_rule_that_was_not_understood_is_refused(
    rules: list[dict[str, Any]], words: list[str]
) -> None:
    told = refused(StructureError, *rules)
    assert [word for word in words if word not in told] == []


def test_a_dimension_that_is_not_there_and_options_that_exclude_each_other_are_refused() -> None:
    told = refused(LayoutError, {"match": "layers.0.w1", "shard_dim": 2, "min_shard_elements": 50})
    assert "cannot shard dimension 2 of layers.0.w1.weight, of shape [13, 6]" in told
    early = {"match": "layers.0", "gather_before": "qkv"}
    rolling = refused(ConfigError, early, gather_before="rolling")
    assert "the rule for 'layers.0'" in rolling
    assert "rolling" in rolling
    alone = {"match": "layers.0", "coalesce_bytes": 100}
    assert 'granularity = "block"' in refused(ConfigError, alone, granularity="module")
    ahead = {"match": "layers.0", "forward_prefetch": 2}
    assert "sets forward_prefetch" in refused(ConfigError, ahead, gather_before="rolling")
    assert "sets forward_prefetch" in refused(ConfigError, ahead, granularity="module")


KEYS = st.fixed_dictionaries(
    {},
    optional={
        "ignore": st.booleans(),
        "min_shard_elements": st.integers(0, 1 << 40),
        "shard_dim": st.integers(-64, 63),
        "axis": st.sampled_from(["dense", "experts"]),
        "reduce_dtype": st.sampled_from([None, "float32"]),
        "compute_dtype": st.sampled_from([None, "bfloat16"]),
        "quantize": st.sampled_from(["none", "int8", "fp8"]),
        "forward_prefetch": st.sampled_from([0, 2, 3]),
        "keep_unsharded": st.booleans(),
        "gather_before_modules": st.just(("a.*",)),
    },
).filter(bool)


@pytest.mark.thorough(1)
@given(st.lists(KEYS, max_size=4))
def test_rules_are_written_and_read_again_as_they_were_given(rules: list[dict[str, Any]]) -> None:
    made = [{"match": ("layers.{0-3}",), **rule} for rule in rules]
    config = WeightParallelConfig.model_validate({"rules": made})
    assert [rule.options() for rule in config.rules] == rules
    again = WeightParallelConfig.model_validate(config.model_dump())
    assert again == config
    assert [rule.options() for rule in again.rules] == rules


def test_rules_of_a_file_have_all_their_mistakes_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        '[[weight_parallel.rules]]\nmatch = "layers.0"\nquantise = "int8"\n'
        '[[weight_parallel.rules]]\nmatch = ["layers.{9-3}"]\nkeep_unsharded = 3\n'
        '[[weight_parallel.rules]]\nshard_dim = 1\n'
        '[[weight_parallel.rules]]\nmatch = "a"\n'
        '[[weight_parallel.rules]]\nmatch = "a"\npre_all_gather = "a:b"\n'
        '[[weight_parallel.rules]]\nmatch = "a"\nprefetch_depth = 1\nforward_prefetch = 1\n'
    )
    config, problems = read_config(path)
    assert config is None
    told = [str(problem) for problem in problems]
    assert told == [
        "weight_parallel.rules: rule 1: quantise: unknown key; did you mean quantize?",
        "weight_parallel.rules: rule 2: match: entry 1: 'layers.{9-3}' has {9-3}: write the "
        'smaller number first, 10000 at the most, got "layers.{9-3}"',
        "weight_parallel.rules: rule 2: keep_unsharded: expected true or false, got 3",
        "weight_parallel.rules: rule 3: match: is missing",
        "weight_parallel.rules: rule 4: a rule needs at least one pattern in match, and one "
        "more key",
        "weight_parallel.rules: rule 5: pre_all_gather: is for programs alone, as an argument of "
        'its class, got "a:b"',
        "weight_parallel.rules: rule 6: forward_prefetch: is for programs alone, as an argument "
        "of its class, got 1",
    ]
    path.write_text('[weight_parallel.rules]\nmatch = "layers.0"\n')
    assert "write [[weight_parallel.rules]]" in str(read_config(path)[1][0])
    path.write_text('[[weight_parallel.rules]]\nmatch = "a"\nignore = true\n')
    assert "internsp train steps all parameters" in str(read_config(path)[1][0])


@pytest.mark.parametrize("stages", [1, 2])
def test_the_printed_plan_shows_what_each_rule_has_caught(stages: int) -> None:
    sections = {
        "model": {"hidden_size": 16, "layers": 4, "heads": 2, "intermediate_size": 48},
        "data": {"sequence_length": 32},
        "parallel": {"weight": 2, "pipeline": stages},
        "train": {"micro_batches": 2, "global_batch": 8},
        "weight_parallel": {
            "min_shard_elements": 64,
            "rules": [
                {"match": ["layers.{2-3}", "layers.2.attention"], "keep_unsharded": True},
                {"match": "head", "reduce_dtype": "none"},
            ],
        },
    }
    text = io.StringIO()
    print_plan(Config.model_validate(sections), 2 * stages, Console(file=text, soft_wrap=True))
    lines = text.getvalue().splitlines()
    at = lines.index("Rules of the plan")
    block = build_model(Config.model_validate(sections)).get_submodule("layers.1")
    size = 2 * sum(p.numel() * p.element_size() for p in block.parameters())
    assert lines[at + 1 : at + 5] == [
        "  1. layers.{2-3}, layers.2.attention: keep_unsharded = true",
        f"     matches layers.{{2-3}} (18 parameters, {size / 1024:.1f} KiB)",
        '  2. head: reduce_dtype = "none"',
        f"     matches head (1 parameters, {257 * 16 * 4 / 1024:.1f} KiB)",
    ]
    kept = [line for line in lines if "stay unsharded" in line]
    assert len(kept) == stages  # of a pipeline, each rank's own blocks
    assert all(any(f"layers.{i}" in line for line in kept) for i in (2, 3))
