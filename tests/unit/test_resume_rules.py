"""Effect of a changed setting on a resumed run: accepted, refused or irrelevant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from internsp.app.config import Config, load_config, sections
from internsp.app.config.resume import RULES, Rule, compare, parse_saved, saved_config
from internsp.config.former import GONE, MOVED
from internsp.errors import ConfigError


def changed(world_size: int = 1, **changes: dict[str, Any]) -> tuple[list[str], ...]:
    """The settings of a run resumed from the default configuration, as JSON, with ``changes``."""
    saved = Config().model_dump(mode="json")
    return compare(saved, Config.model_validate(changes), world_size, world_size)


def test_every_key_of_the_configuration_has_a_rule_and_no_rule_is_of_a_key_that_is_gone() -> None:
    keys = {f"{name}.{key}" for name, cls in sections().items() for key in cls.model_fields}
    assert keys == RULES.keys()
    assert set(RULES.values()) == set(Rule)


@pytest.mark.parametrize(
    ("section", "values", "line"),
    [
        ("model", {"heads": 8}, "model.heads: 4 in the checkpoint, 8 now"),
        ("model", {"rope_theta": 5e5}, "model.rope_theta: 10000.0 in the checkpoint, 500000.0 now"),
        ("model", {"norm_eps": 1e-6}, "model.norm_eps: 1e-05 in the checkpoint, 1e-06 now"),
        ("model", {"tie_embeddings": True}, "model.tie_embeddings: false in the checkpoint, true"),
        ("train", {"seed": 1}, "train.seed: 0 in the checkpoint, 1 now"),
        ("train", {"dtype": "bfloat16"}, 'train.dtype: "float32" in the checkpoint, "bfloat16"'),
        ("data", {"sequence_length": 64}, "data.sequence_length: 1024 in the checkpoint, 64 now"),
        ("optimizer", {"name": "sgd"}, 'optimizer.name: "adamw" in the checkpoint, "sgd" now'),
    ],
)
def test_a_fixed_key_is_refused_with_both_values(
    section: str, values: dict[str, Any], line: str
) -> None:
    refused, _ = changed(**{section: values})
    assert any(found.startswith(line) for found in refused), refused


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("optimizer", {"lr": 1e-4}),
        ("optimizer", {"betas": (0.8, 0.9)}),
        ("optimizer", {"weight_decay": 0.0}),
        ("optimizer", {"warmup_steps": 3}),
        ("optimizer", {"max_grad_norm": None}),
        ("train", {"steps": 200}),
        ("train", {"global_batch": 16}),
        ("parallel", {"weight": 2}),
        ("weight_parallel", {"quantize": "int8"}),
    ],
)
def test_a_key_that_is_taken_over_is_told_with_both_values(
    section: str, values: dict[str, Any]
) -> None:
    refused, taken = changed(**{section: values})
    ((key, _),) = values.items()
    assert refused == []
    assert [line.partition(":")[0] for line in taken] == [f"{section}.{key}"]
    assert taken[0].endswith("from now on")


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("quantize_min_elements", 9000, {"match": "layers", "quantize": "int8"}),
        ("embedding_cut", "hidden", {"match": "embed", "shard_dim": 1}),
        ("own_dtype", ["norm"], {"match": "**.norm.*", "compute_dtype": "none"}),
    ],
)
def test_a_key_that_has_gone_since_is_told_and_its_rule_is_taken_over(
    key: str, value: Any, rule: dict[str, Any]
) -> None:
    saved = Config().model_dump(mode="json")
    saved["weight_parallel"][key] = value
    now = Config.model_validate({"weight_parallel": {"rules": [rule]}})
    refused, taken = compare(saved, now, 1, 1)
    assert refused == []
    assert taken[0] == (
        f"weight_parallel.{key}: {json.dumps(value)} in the checkpoint; "
        f"{GONE[f'weight_parallel.{key}'].instead}"
    )
    assert [line.partition(":")[0] for line in taken[1:]] == ["weight_parallel.rules"]
    usual = {**saved, "weight_parallel": {key: GONE[f"weight_parallel.{key}"].usual}}
    assert compare(usual, Config(), 1, 1) == ([], [])
    assert compare(usual, now, 1, 1)[0][0].startswith("weight_parallel.rules: []")


def test_a_run_of_before_goes_on_whatever_it_said_of_profiles_and_spikes() -> None:
    saved = Config().model_dump(mode="json")
    for profile in (True, False):
        saved["train"] |= {"profile": profile, "torch_profile": None, "early_stop": 3}
        refused, (told,) = compare(saved, Config(), 1, 1)
        assert refused == []
        assert told.startswith("train.early_stop: 3 in the checkpoint; it is gone")


@pytest.mark.parametrize("key", ["sample_tokens", "sample_bytes", "sample_prompt"])
def test_the_sample_of_before_is_told_by_name_and_hinders_no_resume(key: str) -> None:
    """``sample_bytes`` was the name before that."""
    saved = Config().model_dump(mode="json")
    saved["train"][key] = "x" if key == "sample_prompt" else 0
    refused, (told,) = compare(saved, Config(), 1, 1)
    assert (refused, "internsp generate RUN continues a text" in told) == ([], True)
    with pytest.raises(ConfigError, match=rf"train\.{key}: unknown key; it is gone: internsp gen"):
        load_config({"train": {key: saved["train"][key]}})


def test_a_kept_configuration_is_read_under_the_names_that_its_run_knew() -> None:
    own = Config.model_validate({
        "parallel": {"sequence": 4, "optimizer_ranks": 1},
        "sequence": {"own_attention": True, "ring": 4, "ring_form": "double", "inner_ring": 2},
        "optimizer": {"other": "adamw"},
        "weight_parallel": {"rules": [{"match": ["layers"], "near_ranks": 2}]},
    })  # fmt: skip
    saved = own.model_dump(mode="json")
    for old, new in reversed(MOVED.items()):
        (section, key, *inner), (to, name, *now) = old.split("."), new.split(".")
        for table in saved[section][key] if inner else ():
            if now[0] in table:
                table[inner[0]] = table.pop(now[0])
        if not inner and name in saved[to]:  # two lines may lead to one key
            saved[section][key] = saved[to].pop(name)
    assert Config.model_validate(parse_saved(saved)) == own
    assert compare(saved, own, 4, 4) == ([], [])


def test_a_kept_configuration_is_refused_by_name_if_only_the_old_release_can_do_it() -> None:
    saved = Config().model_dump(mode="json")
    saved["weight_parallel"]["rules"] = [{"match": ["embed"], "replicate_below": 101}]
    gone = r"weight_parallel\.rules\.replicate_below = 101 has gone"
    with pytest.raises(ConfigError, match=gone):
        parse_saved(saved)


def test_what_a_run_of_today_may_not_combine_is_read_unless_it_describes_no_model() -> None:
    saved = Config().model_dump(mode="json")
    saved["optimizer"]["decay_steps"] = 5  # of no effect: refused since a later release
    with pytest.raises(ValueError, match='unused with schedule = "cosine"'):
        Config.model_validate(saved)
    assert saved_config(saved).model == Config().model
    saved["model"]["heads"] = 3
    with pytest.raises(ConfigError, match=r"its configuration: model\.heads: 3 heads .*; the"):
        saved_config(saved)


@pytest.mark.parametrize("plan", [[3], {"match": "x"}, 3, [{"match": ["x"], "quantize": 3}]])
def test_a_damaged_kept_configuration_is_refused_by_name(plan: Any) -> None:
    with pytest.raises(ConfigError, match=r"its configuration: weight_parallel\.rules: "):
        parse_saved({"weight_parallel": {"rules": plan}, "train": {}})
    with pytest.raises(ConfigError, match="its configuration has no section sequence"):
        parse_saved({"weight_parallel": {"ring_form": "auto"}, "sequence": 3})


def test_what_has_no_bearing_is_not_mentioned() -> None:
    free = changed(
        train={"name": "other", "log_every": 5, "micro_batches": 2},
        weight_parallel={"overlap": False, "prefetch_depth": 2},
        checkpoint={"every": 3},
        parallel={"timeout_seconds": 9},
    )
    assert free == ([], [])
    # Written out, what none stands for is no change; and adamw has no momentum to differ in.
    same = changed(
        model={"kv_heads": 4, "head_dim": 64, "intermediate_size": 704},
        parallel={"optimizer_ranks": 1, "expert_weight": 1},
    )
    assert same == ([], [])
    for name, momentum in (("sgd", 0.0), ("muon", 0.95)):
        plain, written = (
            Config.model_validate({"optimizer": {"name": name, **more}})
            for more in ({}, {"momentum": momentum})
        )
        assert compare(plain.model_dump(mode="json"), written, 1, 1) == ([], [])


def test_the_zero_degree_is_that_of_the_ranks_that_saved() -> None:
    assert changed(world_size=4, parallel={"optimizer_ranks": 4}) == ([], [])
    _, taken = changed(world_size=4, parallel={"optimizer_ranks": 2})
    assert taken == ["parallel.optimizer_ranks: 4 in the checkpoint, 2 from now on"]


def test_momentum_that_begins_is_refused_and_one_that_changes_is_taken_over() -> None:
    def sgd(momentum: float) -> Config:
        return Config.model_validate({"optimizer": {"name": "sgd", "momentum": momentum}})

    saved = sgd(0.9).model_dump(mode="json")
    assert compare(saved, sgd(0.5), 1, 1)[1] == [
        "optimizer.momentum: 0.9 in the checkpoint, 0.5 from now on"
    ]
    assert compare(saved, sgd(0.0), 1, 1)[0] == [
        "optimizer.momentum: 0.9 in the checkpoint, 0.0 now"
    ]


def test_parameters_stay_with_their_optimizer_whose_state_they_have() -> None:
    def muon(**group: Any) -> Config:
        groups = [{"match": "**.wo", **group}] if group else []
        return Config.model_validate({"optimizer": {"name": "muon", "groups": groups}})

    saved = muon().model_dump(mode="json")
    assert compare(saved, muon(optimizer="adamw"), 1, 1)[0] == [
        'optimizer.other: "adamw" in the checkpoint, "adamw, by groups adamw for **.wo" now'
    ]
    assert compare(saved, muon(lr=0.1), 1, 1)[0] == []
    given = muon(optimizer="adamw").model_dump(mode="json")
    assert compare(given, muon(optimizer="adamw", lr=0.1), 1, 1)[0] == []


def test_a_configuration_of_another_version_is_read_as_far_as_it_goes() -> None:
    assert compare({"train": {"seed": 0, "gone": 1}}, Config(), 1, 1) == ([], [])
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        compare({"optimizer": {"lr": "fast"}}, Config(), 1, 1)
    with pytest.raises(ConfigError, match="section train"):
        compare({"train": 3}, Config(), 1, 1)


def test_a_run_with_keys_of_data_that_are_gone_is_read_also_in_its_tables() -> None:
    """Rows of two columns go on as the chats that they are now: the digest of the tokens tells."""
    saved = Config().model_dump(mode="json")
    gone = {"index": "always", "index_dir": "d", "prompt_field": "q", "completion_field": "a"}
    rows = {"source": "jsonl", "paths": ["a.jsonl"], "format": "instruction"}
    table = {"name": "a", **rows, "prompt_field": "q", "completion_field": "a"}
    del saved["data"]["cache_dir"]
    saved["data"] |= gone | {"mixture": [table], "evaluation": [table]}
    found = parse_saved(saved)["data"]
    assert [part["format"] for part in (*found["mixture"], *found["evaluation"])] == ["chat"] * 2
    saved["data"] |= {"mixture": [], "evaluation": [], **rows}
    assert parse_saved(saved)["data"]["format"] == "chat"
    refused, taken = compare(saved, Config(), 1, 1)
    told = [line.partition(":")[0] for line in taken]
    assert (refused, told) == ([], ["data.index", "data.prompt_field", "data.completion_field"])
    assert parse_saved(saved)["data"]["cache_dir"] == "d"
    for damaged in (3, {"mixture": 3}, {"mixture": [3]}):
        with pytest.raises(ConfigError, match="its configuration"):
            parse_saved({**saved, "data": damaged})
