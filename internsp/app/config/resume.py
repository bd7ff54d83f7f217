"""Whether a run may resume from a checkpoint with other values of configuration keys.

Each key of every section has a rule here. *Taken over*: the current value is used from now on, and
printed if it differs. *Fixed*: a checkpoint with another value is refused, with both values.
*Free*: the key does not affect what is learned. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

from pydantic import ValidationError

from internsp.app.config import Config, sections
from internsp.app.config.checks import combinations
from internsp.app.config.sections import OptimizerConfig
from internsp.config.former import GONE, translated
from internsp.config.model import ModelConfig
from internsp.config.words import mistakes
from internsp.errors import ConfigError


class Rule(Enum):
    """What happens if a key's value differs; see the module's docstring."""

    TAKEN = "taken over"
    FIXED = "fixed"
    FREE = "free"


_KEYS: dict[str, dict[Rule, str]] = {
    # norm and attention choose between implementations of the same function. path: a folder may
    # have moved, and its weights are in the checkpoint now; its sizes are compared.
    "model": {
        Rule.FIXED: "family vocab_size hidden_size layers heads kv_heads head_dim "
        "intermediate_size rope_theta norm_eps tie_embeddings qkv_bias bias init_std "
        "experts top_k expert_size shared_size dense_layers latent_size rotary_size",
        Rule.TAKEN: "dropout auxiliary z_loss capacity_factor balance_rate",
        Rule.FREE: "norm attention path",
    },
    # Files may have moved: their content is compared by the digest of its tokens, which includes a
    # mixture's weights.
    "data": {
        Rule.FIXED: "sequence_length pack held_out",
        Rule.FREE: "source paths text_field format messages_field tokenizer cache_dir mixture "
        "evaluation",
    },
    "parallel": {
        Rule.TAKEN: "weight sequence pipeline optimizer_ranks expert_weight expert fast_links",
        Rule.FREE: "device timeout_seconds",
    },
    "pipeline": {Rule.TAKEN: "chunks schedule"},
    # min_shard_elements only decides what is replicated: a checkpoint holds whole tensors.
    "weight_parallel": {
        Rule.FIXED: "expert_parameters reduction rules",
        Rule.TAKEN: "reduce_dtype quantize compute_dtype cast_inputs",
        Rule.FREE: "overlap memory_pool prefetch_depth gather_before granularity "
        "gather_before_modules blocks min_shard_elements keep_unsharded near_ranks accumulation "
        "coalesce_bytes reductions_in_flight reduce unexpected_order compile "
        "compare_ranks grad_dtype offload",
    },
    "sequence": {
        Rule.TAKEN: "ring fast_links balance",
        Rule.FREE: "own_attention exchange_in_parts ring_form inner_ring head_output",
    },
    "activation_checkpoint": {
        Rule.FREE: "mode fraction blocks reentrant offload tiles tiled_modules",
    },
    # The loss scale itself is restored from the checkpoint; its initial value no longer matters.
    "optimizer": {
        Rule.FIXED: "name options other loss_scale_init",
        Rule.TAKEN: "lr betas eps weight_decay momentum groups max_grad_norm schedule "
        "warmup_steps decay_steps min_lr_ratio",
    },
    # The order of the data depends on the seed, but not on the batch size.
    "train": {
        Rule.FIXED: "seed dtype",
        Rule.TAKEN: "steps stop_after_tokens global_batch batch_tokens",
        Rule.FREE: "name micro_batches eval_every eval_batches "
        "profile profile_steps peak_tflops deterministic log_every loss_chunk max_skipped_steps "
        "compare_replicas_every",
    },
    "checkpoint": {Rule.FREE: "save every keep_last keep_every resume"},
    "report": {Rule.FREE: "writers alert"},
    "launch": {Rule.FREE: "processes"},
}

_SHARDING_KEYS = (
    "ignore", "min_shard_elements", "shard_dim", "axis", "compute_dtype", "reduce_dtype",
    "quantize", "pre_all_gather", "post_all_gather",
)  # fmt: skip

RULES: dict[str, Rule] = {
    f"{section}.{key}": rule
    for section, by_rule in _KEYS.items()
    for rule, keys in by_rule.items()
    for key in keys.split()
}
"""The rule of each key, by ``"section.key"``."""


def compare(
    saved: Mapping[str, Any], config: Config, saved_on: int, world_size: int
) -> tuple[list[str], ...]:
    """Compare a checkpoint's configuration with the one of the run that resumes from it.

    Args:
        saved: the checkpoint's configuration as JSON; missing keys have their defaults. Keys that
            have gone since are told: what they said may be a rule now.
        saved_on: number of ranks of the run that saved it.
        world_size: number of ranks of the run that resumes.

    Returns:
        Differences that forbid resuming, and those that are taken over, one a line.

    Raises:
        ConfigError: ``saved`` is no configuration.
    """
    given = parse_saved(saved), config.model_dump()
    before, now = _resolved(given[0], saved_on), _resolved(given[1], world_size)
    refused, taken = [], []
    lost = translated(saved)[1]
    for key, value in lost.items():
        taken.append(f"{key}: {_text(value)} in the checkpoint; {GONE[key].instead}")
    by_rule = any(key.startswith("weight_parallel.") for key in lost)
    for key, value in now.items():
        old, rule = before[key], RULES[key]
        if by_rule and key == "weight_parallel.rules":  # what it says instead is told, not refused
            rule = Rule.TAKEN
        if old == value or rule is Rule.FREE:
            continue
        section, _, name = key.partition(".")
        if RULES[key] is Rule.TAKEN and given[0][section][name] == given[1][section][name]:
            continue  # the resolved value follows from the world size or from another key
        if key.startswith("optimizer.loss_scale") and None in (old, value):
            continue  # only one run has a loss scale: their dtypes differ, which is reported
        # With optimizer state in only one of the runs, there is nothing to resume from.
        if rule is Rule.FIXED or (key == "optimizer.momentum" and not (old and value)):
            refused.append(f"{key}: {_text(old)} in the checkpoint, {_text(value)} now")
        else:
            taken.append(f"{key}: {_text(old)} in the checkpoint, {_text(value)} from now on")
    return refused, taken


def saved_config(saved: Mapping[str, Any]) -> Config:
    """The configuration ``saved``, to read its model; what a run of today may not combine is no
    mistake of a run that has ended.

    Raises:
        ConfigError: see :func:`parse_saved`; or ``[model]`` describes no model.
    """
    config = Config.model_construct(
        None, **{name: sections()[name](**values) for name, values in parse_saved(saved).items()}
    )
    for problem in combinations(config):
        if problem.keys[0].startswith("model."):
            raise ConfigError(f"its configuration: {problem}; the release that wrote it reads it")
    return config


def parse_saved(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """``saved`` by section, with values in the keys' types, under today's names.

    Raises:
        ConfigError: it is no configuration, or says what only an earlier release can do.
    """
    found = {}
    saved, lost = translated(saved)
    for key, value in lost.items():
        if GONE[key].needed:
            told = f"its configuration: {key} = {_text(value)} has gone: {GONE[key].instead}"
            raise ConfigError(f"{told}; the release that wrote it reads it")
    for name, cls in sections().items():
        given = saved.get(name, {})
        if not isinstance(given, Mapping):
            raise ConfigError(f"its configuration has no section {name}")
        known = {key: value for key, value in given.items() if key in cls.model_fields}
        try:
            found[name] = cls.model_validate(known).model_dump()
        except ValidationError as error:
            key, text = next(mistakes(cls, known, error))
            raise ConfigError(f"its configuration: {name}.{key}: {text}") from None
    return found


def _resolved(dumped: dict[str, dict[str, Any]], world_size: int) -> dict[str, Any]:
    """Values by ``"section.key"``, with ``None`` replaced by its meaning and unused keys unset."""
    values = {f"{s}.{k}": v for s, content in dumped.items() for k, v in content.items()}
    model = ModelConfig(**dumped["model"])
    weight, stages = values["parallel.weight"], values["parallel.pipeline"]
    defaults = {
        "model.kv_heads": model.key_value_heads,
        "model.head_dim": model.head_size,
        "model.intermediate_size": model.dense_width,
        "parallel.optimizer_ranks": max(world_size // (weight * stages), 1),
        "parallel.expert_weight": weight,
    }
    for key, default in defaults.items():
        values[key] = default if values[key] is None else values[key]
    # Only the parts of the plan that decide how parameters are sharded and computed.
    rules = [
        {key: rule[key] for key in ("match", *_SHARDING_KEYS) if key in rule}
        for rule in values["weight_parallel.rules"]
    ]
    values["weight_parallel.rules"] = [rule for rule in rules if len(rule) > 1]
    unused = ["pipeline.schedule"] if stages == 1 else []
    optimizer = OptimizerConfig(**dumped["optimizer"])
    name, other = optimizer.name, optimizer.other_name
    values["optimizer.other"], values["optimizer.momentum"] = other, optimizer.momentum_used
    # Optimizer state differs, too, if a group assigns parameters to the other of the two.
    moved = [(g["match"], g["optimizer"]) for g in values["optimizer.groups"] if g["optimizer"]]
    if moved and other != name:
        given = "; ".join(f"{by} for {', '.join(match)}" for match, by in moved)
        values["optimizer.other"] = f"{other}, by groups {given}"
    unused += ["optimizer.betas", "optimizer.eps"] if other != "adamw" else []
    unused += [] if name in ("sgd", "muon") else ["optimizer.momentum"]
    if "float16" not in (values["train.dtype"], values["weight_parallel.compute_dtype"]):
        unused += ["optimizer.loss_scale_init"]
    return {key: None if key in unused else value for key, value in values.items()}


def _text(value: Any) -> str:
    return "none" if value is None else json.dumps(value)
