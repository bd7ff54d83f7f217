"""Nothing set does nothing (WP-17): every option acts, or is refused by name with a remedy.

The tables below list every field. A field without an entry fails, so that a new option is asked:
can it be set and do nothing?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import nn

from internsp.config import (
    ActivationCheckpointConfig,
    PlanRule,
    SequenceConfig,
    WeightParallelConfig,
)
from internsp.config.combinations import mistakes, require_none
from internsp.errors import ConfigError, StructureError
from internsp.mesh.shape import MeshShape
from internsp.parallel.parallelize import recomputed_blocks
from internsp.schedule.chunk import ChunkLayout
from internsp.structure.assign import plan_sharding, require_patterns_matched
from internsp.structure.blocks import read_structure
from internsp.structure.units import chunk_layout
from tests.support.models import CUT, Tiny

TWO, EXPERTS = MeshShape(2, weight=2), MeshShape(2, weight=2, expert_weight=1)
WHOLE = {"min_shard_elements": 1 << 40}  # nothing is sharded
IN_BLOCK = "layers.0.w1"


@dataclass(frozen=True)
class Refused:
    """A setting without an effect; with ``remedy`` in its place it has one."""

    settings: Mapping[str, Any]
    words: str
    remedy: Mapping[str, Any] = field(default_factory=dict)
    shape: MeshShape = TWO
    remedy_shape: MeshShape | None = None
    own: bool = False


@dataclass(frozen=True)
class Acts:
    """Why an option always has an effect, or where else a test shows its refusal."""

    why: str


Entries = Mapping[str, list[Refused] | Acts]

SMALL_BLOCKS = [{"match": "layers", "min_shard_elements": 9999}]
NO_SHARDS = "no parameter of the model is sharded: lower min_shard_elements"
OF_OWN = "has no effect: a communicator of your own decides when"


def of_sharded(key: str, value: Any, *more: Refused) -> list[Refused]:
    return [Refused({key: value, **WHOLE}, NO_SHARDS, {key: value}), *more]


def of_order(key: str, value: Any, *more: Refused) -> list[Refused]:
    return of_sharded(key, value, Refused({key: value}, OF_OWN, own=True), *more)


WEIGHTS: Entries = {
    "overlap": Acts("off: gathers, reductions and exchanges are waited for where they start"),
    "memory_pool": of_order("memory_pool", False),
    "prefetch_depth": of_order("prefetch_depth", 2),
    "gather_before": [
        Refused({"gather_before": "mlp"}, OF_OWN, own=True),
        Refused({"gather_before": "mlp", "gather_before_modules": ["w2"]},
                'weight_parallel.gather_before: "mlp" is unused with gather_before_modules',
                {"gather_before": "attention", "gather_before_modules": ["wo"]}),
    ],
    "granularity": of_order("granularity", "module"),
    "gather_before_modules": of_order(
        "gather_before_modules", ["w2"],
        Refused({"gather_before_modules": ["w2"], "gather_before": "rolling"},
                'weight_parallel.gather_before_modules: unused with gather_before = "rolling"'),
        Refused({"gather_before_modules": ["w3"]}, "none of its modules is named w3"),
    ),
    "blocks": [Refused({"blocks": ["blocks.*"]}, "'blocks.*' matches no module",
                       {"blocks": ["layers.*"]})],
    "expert_parameters": [
        Refused({"expert_parameters": ["wo"]}, "the mesh has no axis for experts",
                {"expert_parameters": ["wo"]},
                remedy_shape=EXPERTS),
        Refused({"expert_parameters": ["moe"]}, "'moe' matches no parameter"),
    ],
    "rules": Acts("each key of each rule is in RULES"),
    "near_ranks": of_order(
        "near_ranks", 2,
        Refused({"near_ranks": 2, "keep_unsharded": "all"},
                "all blocks stay unsharded", {"near_ranks": 2},
                remedy_shape=MeshShape(4, weight=4)),
        Refused({"near_ranks": 2, "rules": SMALL_BLOCKS},
                "no block has a sharded parameter"),
    ),
    "reduce": of_order(
        "reduce", 2,
        Refused({"reduce": 2}, "the weight group has 2 ranks, all of them near"),
    ),
    "keep_unsharded": of_order(
        "keep_unsharded", 1,
        Refused({"keep_unsharded": "1 KiB"}, "it holds none of the blocks, the smallest of which",
                {"keep_unsharded": "1 MiB"}),
        Refused({"keep_unsharded": 2, "rules": [{"match": "layers.*", "keep_unsharded": False}]},
                "rules decide it for every block"),
        Refused({"keep_unsharded": 2, "rules": SMALL_BLOCKS}, "no block has a sharded parameter"),
    ),
    "accumulation": Acts("of a step of several micro-batches, whose number the loop decides"),
    "min_shard_elements": Acts("a threshold: what it leaves replicated, or shards, is its effect"),
    "coalesce_bytes": [
        Refused({"coalesce_bytes": 100, "granularity": "module"},
                'unused with granularity = "module"', {"coalesce_bytes": 100}),
    ],
    "reductions_in_flight": of_order("reductions_in_flight", 3),
    "unexpected_order": [Refused({"unexpected_order": "learn"}, OF_OWN, own=True)],
    "compare_ranks": Acts("off: the first values are not read"),
    "compile": Acts("every model has blocks"),
    "reduction": Acts("sums are divided by the number of ranks"),
    "reduce_dtype": of_sharded("reduce_dtype", "float64"),
    "quantize": of_sharded(
        "quantize", "int8",
        Refused({"quantize": "int8", "coalesce_bytes": 65536}, "no sharded weight of a block",
                {"quantize": "int8"}),
        Refused({"quantize": "int8", "coalesce_bytes": 336},  # of 14 rows, one of them padding
                "the largest is layers.0.w1.weight (312 B)",
                {"quantize": "int8", "coalesce_bytes": 335}),
        Refused({"quantize": "int8", "rules": [{"match": "layers", "quantize": "fp8"}]},
                "rules or classes say what every weight of the blocks is gathered as"),
        Refused({"quantize": "int8", "rules": SMALL_BLOCKS}, "no block has a sharded parameter"),
        Refused({"quantize": "int8", "coalesce_bytes": 320, "rules": [
            {"match": "layers.*.w1", "quantize": "fp8"}]}, "the largest is layers.0.w2.weight"),
    )[1:],
    "compute_dtype": Acts("floating inputs are cast to it, whatever the weights are"),
    "cast_inputs": [
        Refused({"cast_inputs": False}, "nothing is cast without weight_parallel.compute_dtype",
                {"cast_inputs": False, "compute_dtype": "bfloat16"}),
    ],
    "grad_dtype": [
        Refused({"grad_dtype": "float32"}, "no parameter is narrower", {"grad_dtype": "float64"}),
    ],
    "offload": of_sharded("offload", ["weights"]),
}  # fmt: skip

HAS_NONE = "has no effect: what the rule matches is not"
KEEPS_ALL = [{"match": "layers", "keep_unsharded": True}]


def rule(words: str, key: str, value: Any, match: str = "norm", *, remedy: Any = IN_BLOCK,
         more: Mapping[str, Any] | None = None, **others: Any) -> Refused:  # fmt: skip
    """A rule of one key for ``match``; the remedy is the same key of another match, or a rule."""
    bad = {"rules": [{"match": match, key: value, **(more or {})}]}
    good = remedy if isinstance(remedy, dict) else {"match": remedy, key: value}
    return Refused(bad, words, {"rules": [good]} if good else {}, **others)


def of_block(key: str, value: Any, *more: Refused) -> list[Refused]:
    plan = [{"match": "layers.0", key: value}]
    return [
        rule(f"{HAS_NONE} a block", key, value, remedy="layers.0"),
        Refused({"rules": plan}, OF_OWN, own=True),
        *more,
    ]


def of_weight(key: str, value: Any, *more: Refused) -> list[Refused]:
    return [rule(f"{key} {HAS_NONE} a sharded parameter", key, value), *more]


NO_PARAMETER = "activation"  # a module without any
RULES: Entries = {
    "match": [rule("'layers.9' matches no module", "shard_dim", 0, "layers.9")],
    "unit": [
        rule("unit is for modules", "unit", "each", "layers.0.w1.weight"),
        rule("is a unit already", "unit", "each", "layers.0"),
    ],
    "ignore": [rule(f"{HAS_NONE} a parameter", "ignore", True, NO_PARAMETER, remedy="norm")],
    "min_shard_elements": [
        rule(f"{HAS_NONE} a parameter", "min_shard_elements", 9, NO_PARAMETER),
    ],
    "shard_dim": of_weight("shard_dim", 1),
    "axis": of_weight(
        "axis", "dense",
        rule('axis = "experts" has no effect: the mesh has no axis', "axis", "experts", IN_BLOCK,
             remedy_shape=EXPERTS),
    ),
    "coalesce_bytes": of_weight(
        "coalesce_bytes", 99,
        rule("what rules quantize or pack", "coalesce_bytes", 99, IN_BLOCK,
             more={"quantize": "int8"}),
        Refused({"rules": [{"match": "layers.0", "quantize": "int8"},
                          {"match": IN_BLOCK, "coalesce_bytes": 9}]}, "what rules quantize"),
    ),
    "compute_dtype": Acts("inputs of the matched modules are cast to it, if they hold no weight"),
    "reduce_dtype": of_weight("reduce_dtype", "float64"),
    "grad_dtype": [
        rule(f"{HAS_NONE} a parameter", "grad_dtype", "float64", NO_PARAMETER),
        rule('grad_dtype = "float32" has no effect: no parameter that the rule matches',
             "grad_dtype", "float32", IN_BLOCK,
             remedy={"match": IN_BLOCK, "grad_dtype": "float64"}),
    ],
    "output_dtype": [rule("is for modules", "output_dtype", "float64", "norm.weight")],
    "cast_inputs": [rule("is for modules", "cast_inputs", False, "norm.weight")],
    "quantize": of_weight(
        "quantize", "int8", rule("a sharded parameter in a block", "quantize", "int8", "head"),
    ),
    "pre_all_gather": [
        rule(f"{HAS_NONE} a sharded parameter", "pre_all_gather", "torch:neg",
             more={"post_all_gather": "torch:neg"}, remedy={}),
    ],
    "post_all_gather": [
        rule("post_all_gather need each other: give both", "post_all_gather", "torch:neg",
             IN_BLOCK, remedy={}),
    ],
    "offload": of_weight("offload", ["weights"]),
    "near_ranks": of_weight(
        "near_ranks", 2,
        Refused({"rules": [{"match": "layers", "near_ranks": 2}],
                 "keep_unsharded": "all"}, "the blocks stay unsharded, so that no gather follows"),
        Refused({"rules": [{"match": IN_BLOCK, "near_ranks": 2}, *KEEPS_ALL]},
                "the blocks stay unsharded"),
        Refused({"rules": [{"match": IN_BLOCK, "near_ranks": 2}]}, OF_OWN, own=True,
                shape=MeshShape(4, weight=4)),
    )[1:],
    "keep_unsharded": of_block(
        "keep_unsharded", True,
        Refused({"rules": [
            {"match": "layers.0", "keep_unsharded": True, "min_shard_elements": 9999},
        ]}, "the blocks have no sharded parameter"),
    ),
    "prefetch_depth": of_block("prefetch_depth", 2),
    "forward_prefetch": of_block("forward_prefetch", 2),
    "backward_prefetch": of_block(
        "backward_prefetch", 2,
        rule("no block comes after the matched one", "backward_prefetch", 2, "layers.0",
             remedy="layers.1"),
    )[2:],
    "gather_before": of_block(
        "gather_before", "mlp",
        rule("gather_before has no effect beside", "gather_before", "mlp", "layers.0",
             more={"gather_before_modules": ["w2"]}, remedy="layers.0"),
        Refused({"rules": [{"match": "layers.0", "gather_before_modules": ["w2"]},
                           {"match": "layers.{0-0}", "gather_before": "mlp"}]},
                "gather_before has no effect"),
    ),
    "gather_before_modules": of_block("gather_before_modules", ["w2"]),
}  # fmt: skip

NONE_RECOMPUTES = "no block recomputes"
FULL = {"mode": "full"}
RECOMPUTE: Entries = {
    "mode": [Refused({**FULL, "fraction": 0.0}, 'recomputes no block then; set mode = "none", or '
                     "raise it", {**FULL, "fraction": 0.5})],
    "fraction": [
        Refused({"fraction": 0.5}, f"fraction: {NONE_RECOMPUTES}", {"fraction": 0.5, **FULL}),
        Refused({**FULL, "fraction": 0.5, "blocks": (1,)}, "fraction: unused where"),
        Refused({**FULL, "fraction": 0.1}, "fraction: 0.1 of 3 blocks is less than one",
                {**FULL, "fraction": 0.2}),
    ],
    "blocks": [
        Refused({"blocks": (1,)}, f"blocks: {NONE_RECOMPUTES}", {"blocks": (1,), **FULL}),
        Refused({**FULL, "blocks": ()}, 'blocks: "full" recomputes no block then'),
    ],
    "reentrant": [
        Refused({"reentrant": True}, f'reentrant: {NONE_RECOMPUTES}; set mode to "full", or leave',
                {"reentrant": True, **FULL}),
        Refused({"mode": "selective", "reentrant": True}, "cannot be selective"),
    ],
    "offload": [Refused({"offload": 1}, "offload: no block recomputes", {"offload": 1, **FULL})],
    "tiles": Acts("where no feed-forward is found: unit/test_tiles; of fewer positions: one each"),
    "tiled_modules": [
        Refused({"tiled_modules": ["w1"]}, "unused with one tile",
                {"tiled_modules": ["w1"], "tiles": 2}),
    ],
}
SEQUENCE: Entries = {
    "own_attention": Acts("a permission that nothing needs is refused: unit/test_supports"),
    "exchange_in_parts": Acts("off: what NCCL and a group of one do in any case"),
    "ring_form": Acts("without a ring refused: unit/test_config, ranks/test_hf_ring"),
    "inner_ring": [Refused({"inner_ring": 2}, "inner_ring: 2 is of no effect with")],
    "head_output": Acts("without loss_options refused: ranks/test_agreement; one rank: as set"),
}
TABLES: dict[type[BaseModel], Entries] = {
    WeightParallelConfig: WEIGHTS, PlanRule: RULES, SequenceConfig: SEQUENCE,
    ActivationCheckpointConfig: RECOMPUTE,
}  # fmt: skip


def model() -> nn.Module:
    made = Tiny(layers=3)
    made.activation = nn.GELU()  # without parameters
    return made


def plan(
    settings: Mapping[str, Any], shape: MeshShape = TWO, own: bool = False,
    checkpoint: Mapping[str, Any] | None = None, sequence: Mapping[str, Any] | None = None,
) -> ChunkLayout:  # fmt: skip
    """What parallelize() and ``internsp plan`` do before anything runs."""
    base = {"min_shard_elements": CUT}
    if not {"coalesce_bytes", "granularity"} & settings.keys():
        base["coalesce_bytes"] = 0
    config = WeightParallelConfig(**(base | dict(settings)))
    again = ActivationCheckpointConfig(**(checkpoint or {}))
    sections = config, SequenceConfig(**(sequence or {})), again
    require_none(mistakes(*sections, ring=1, pipeline=False, own=own))
    made = model()
    structure = read_structure(
        made, config.gather_before, config.blocks, config.gather_before_modules, config.rules
    )
    require_patterns_matched((name for name, _ in made.named_parameters()), config)
    recomputed_blocks(again, structure.layers)
    shardings = plan_sharding(made, structure, config, shape.expert)
    return chunk_layout(shardings, structure, config, shape, set(), own_communicator=own)


@pytest.mark.parametrize("cls", TABLES, ids=lambda cls: cls.__name__)
def test_every_option_is_asked_whether_it_can_do_nothing(cls: type[BaseModel]) -> None:
    assert TABLES[cls].keys() == cls.model_fields.keys()
    empty = [k for k, e in TABLES[cls].items() if not (e.why if isinstance(e, Acts) else e)]
    assert not empty


CASES = [
    pytest.param(cls, key, case, id=f"{cls.__name__}.{key}-{number}")
    for cls, entries in TABLES.items()
    for key, found in entries.items()
    for number, case in enumerate(found if isinstance(found, list) else ())
]


@pytest.mark.parametrize(("cls", "key", "case"), CASES)
def test_what_has_no_effect_is_refused_by_name_and_its_remedy_is_taken(
    cls: type[BaseModel], key: str, case: Refused
) -> None:
    def run(settings: Mapping[str, Any], shape: MeshShape, own: bool) -> None:
        if cls is ActivationCheckpointConfig:
            plan({}, shape, own, settings)
        elif cls is SequenceConfig:
            plan({}, shape, own, sequence=settings)
        else:
            plan(settings, shape, own)

    with pytest.raises((ConfigError, StructureError)) as refused:
        run(case.settings, case.shape, case.own)
    assert key in str(refused.value)
    assert case.words in str(refused.value)
    remedy_shape = case.remedy_shape or case.shape
    if {"near_ranks", "reduce"} & case.remedy.keys():
        remedy_shape = MeshShape(4, weight=4)  # of four ranks two are near
    run(case.remedy, remedy_shape, False)


@pytest.mark.parametrize("shape", [TWO, MeshShape(1)], ids=["two", "one rank"])
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])
def test_values_that_equal_the_defaults_are_not_set(shape: MeshShape, sharded: bool) -> None:
    given = {name: f.default for name, f in WeightParallelConfig.model_fields.items()}
    given["min_shard_elements"] = CUT if sharded else 1 << 40
    again = {name: f.default for name, f in ActivationCheckpointConfig.model_fields.items()}
    assert plan(given, shape, own=True, checkpoint=again)
    # As files say that were written before its default was "auto".
    assert plan(given | {"reduce": 0}, shape, own=True, checkpoint=again)


@pytest.mark.parametrize(
    "settings",
    [{"quantize": "int8"}, {"near_ranks": 2}, {"reduce": 2},
     {"prefetch_depth": 2, "offload": ["weights"]}, {"reduction": "mean"},
     {"rules": [{"match": "layers.0", "quantize": "int8", "keep_unsharded": True}]}],
)  # fmt: skip
def test_a_configuration_for_many_ranks_runs_on_one(settings: dict[str, Any]) -> None:
    assert plan(settings, MeshShape(1))
    experts = {"expert_parameters": ("wo",), "rules": [{"match": IN_BLOCK, "axis": "experts"}]}
    assert plan(settings | (experts if "plan" not in settings else {}),
                MeshShape(1, expert_weight=1))  # fmt: skip


def test_narrow_parameters_have_wider_gradients() -> None:
    made = model().to(torch.bfloat16)
    config = WeightParallelConfig(grad_dtype="float32", min_shard_elements=CUT)
    structure = read_structure(made)
    shardings = plan_sharding(made, structure, config)
    assert chunk_layout(shardings, structure, config, TWO, set())
