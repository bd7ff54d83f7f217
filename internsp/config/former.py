"""Keys of earlier releases: where each is now, or what is written instead of it.

A line a key: in :data:`MOVED` if another name says the same, in :data:`GONE` if none does. The old
name is answered in a file, on a command line and in a program, and read from the configuration that
a run has kept. A line stays for one release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from internsp.base.names import plain


class Gone(NamedTuple):
    """What is told of a key that has gone.

    Attributes:
        usual: the default that it had, as JSON: a kept configuration with it says nothing.
        instead: what to write, or that nothing is to be written; completes "unknown key; ...".
        needed: a run that had another value cannot be read.
    """

    usual: Any
    instead: str
    needed: bool = False


INSTRUCTION = (
    "rows of two columns are chats of two messages now; convert them once: jq -c '{messages: "
    "[{role: \"user\", content: .prompt}, {role: \"assistant\", content: .completion}]}' "
    'OLD.jsonl > NEW.jsonl, and write format = "chat"'
)
"""What is written instead of ``format = "instruction"`` and the names of its columns."""
_RULE = "write a rule, [[weight_parallel.rules]] with"

MOVED = {
    "weight_parallel.cuts_own_sequences": "sequence.own_attention",
    "weight_parallel.exchange_in_parts": "sequence.exchange_in_parts",
    "weight_parallel.ring_form": "sequence.ring_form",
    "weight_parallel.inner_ring": "sequence.inner_ring",
    "weight_parallel.head_output": "sequence.head_output",
    "weight_parallel.trigger": "weight_parallel.gather_before",
    "weight_parallel.prefetch_triggers": "weight_parallel.gather_before_modules",
    "weight_parallel.experts": "weight_parallel.expert_parameters",
    "weight_parallel.plan": "weight_parallel.rules",
    "weight_parallel.reshard_after_forward": "weight_parallel.near_ranks",
    "weight_parallel.pending_blocks": "weight_parallel.reductions_in_flight",
    "weight_parallel.reduce_near_ranks": "weight_parallel.reduce",
    "parallel.ring": "sequence.ring",
    "parallel.near": "sequence.fast_links",
    "parallel.balance": "sequence.balance",
    "parallel.zero": "parallel.optimizer_ranks",
    "data.index_dir": "data.cache_dir",
    "activation_checkpoint.tiled": "activation_checkpoint.tiled_modules",
    "optimizer.rest": "optimizer.other",
    "train.tokens": "train.stop_after_tokens",
    "train.compare_replicas": "train.compare_replicas_every",
    "weight_parallel.rules.trigger": "weight_parallel.rules.gather_before",
    "weight_parallel.rules.prefetch_triggers": "weight_parallel.rules.gather_before_modules",
    "weight_parallel.rules.reshard_after_forward": "weight_parallel.rules.near_ranks",
}
"""``section.key``, or ``section.list.key`` of the tables in a list, by the former name. A list is
named as it is now."""

GONE = {
    "model.embedding_dropout": Gone(0.0, "it has gone; model.dropout drops in every block"),
    "data.index": Gone(
        "auto",
        "tokens of paths of 64 MiB or more are kept on disk, and with data.cache_dir those of all",
    ),
    **{
        f"data.{table}{key}_field": Gone(key, INSTRUCTION)
        for table in ("", "mixture.", "evaluation.")
        for key in ("prompt", "completion")
    },
    "optimizer.rest_lr": Gone(
        None,
        'write [[optimizer.groups]] with match = ["embed", "head", "**.*norm*"] (what '
        "optimizer.other steps) and lr",
    ),
    "optimizer.whole_matrix": Gone(
        None,
        "adafactor and muon say it themselves; for a class of your own make the optimizer in a "
        "program, Trainer(optimizer = ...)",
        needed=True,
    ),
    "optimizer.loss_scale_growth_interval": Gone(
        1000, "it is 1000 steps; for another number make the optimizer in a program"
    ),
    "train.early_stop": Gone(
        0, "it is gone: in a program, call trainer.stop() in a callback's on_evaluation"
    ),
    "train.eval_average": Gone(
        False, "it is gone: metrics.jsonl and the report have the loss of each text"
    ),
    "train.loss_spike": Gone(
        2.0, "it is gone: twice the median of 50 steps is a spike now (report.alert)"
    ),
    "train.norm_spike": Gone(
        10.0, "it is gone: 10 times the median of 50 steps is a spike now (report.alert)"
    ),
    **{
        f"train.sample_{key}": Gone(usual, "it is gone: internsp generate RUN continues a text")
        for key, usual in (("tokens", 200), ("bytes", 200), ("prompt", "def "))
    },
    "train.torch_profile": Gone(
        None, 'it is train.profile = "torch" and train.profile_steps now'
    ),
    "train.memory_snapshot": Gone(
        False, 'it is train.profile = "memory" and train.profile_steps now'
    ),
    "launch.threads": Gone(
        1, "it is the environment variable OMP_NUM_THREADS now, as under torchrun; 1 without it"
    ),
    "report.wandb_mode": Gone(
        "offline", "it is the environment variable WANDB_MODE now; offline without it"
    ),
    "report.wandb_project": Gone(
        "internsp", "it is the environment variable WANDB_PROJECT now"
    ),
    "report.wandb_entity": Gone(None, "it is the environment variable WANDB_ENTITY now"),
    "weight_parallel.quantize_min_elements": Gone(
        16384,
        "quantize takes what is larger than coalesce_bytes; for other weights "
        f'{_RULE} match = "NAME" and quantize = "none" (or "int8", "fp8")',
    ),
    "weight_parallel.embedding_cut": Gone(
        "vocabulary",
        f'for "hidden" {_RULE} match = "embed" (the name of the embedding) and shard_dim = 1',
    ),
    "weight_parallel.own_dtype": Gone(
        [],
        f'{_RULE} match = "**.norm.*" (names of parameters, not of their modules) and '
        'compute_dtype = "none" (and reduce_dtype = "none" beside a weight_parallel.reduce_dtype)',
    ),
    "weight_parallel.rules.replicate_below": Gone(
        None, "it is min_shard_elements now, also in a rule: elements, not bytes", needed=True
    ),
    "checkpoint.peer": Gone(
        False,
        "leave it out: no rank keeps copies for another, and torchrun's restarts go on from the "
        "newest whole checkpoint (checkpoint.every says how often one is saved)",
    ),
}
"""By the same names."""


def answer(section: str, key: str) -> str | None:
    """What became of ``key``; ``None`` if no release had it.

    Args:
        section: ``section``, or ``section.list`` of a table, where it is written; empty: any.
    """
    former = (old.rpartition(".") for old in (*MOVED, *GONE))
    found = [f"{at}.{old}" for at, _, old in former if old == plain(key) and section in ("", at)]
    if not found:
        return None
    name = found[0]
    if name in GONE:
        return GONE[name].instead
    before, (now, _, key) = name.rpartition(".")[0], MOVED[name].rpartition(".")
    if now == before:
        return f"it is {key} now"
    program = f"; in a program, sequence = SequenceConfig({key} = ...)"
    return f"it is {now}.{key} now{program * (before == 'weight_parallel')}"


def translated(saved: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration that a run has kept, under today's names, and its keys that have gone.

    Returns:
        The sections, without what has gone; and what of that had another value than its default,
        by name.
    """
    found = {name: dict(v) if isinstance(v, Mapping) else v for name, v in saved.items()}
    for old, new in MOVED.items():
        key, (to, _, name) = old.rpartition(".")[2], new.rpartition(".")
        for holder in _holders(found, old):
            if key in holder:
                there = holder if to == old.rpartition(".")[0] else found.setdefault(to, {})
                if isinstance(there, dict):
                    there.setdefault(name, holder.pop(key))
    train = found.get("train")
    if isinstance(train, dict) and isinstance(train.get("profile"), bool):
        del train["profile"]  # it has words for values now
    weights = found.get("weight_parallel")
    if isinstance(weights, dict) and weights.get("compare_ranks") is True:
        del weights["compare_ranks"]  # a program's alone now, and the default
    lost = {}
    for old, gone in GONE.items():
        key = old.rpartition(".")[2]
        for holder in _holders(found, old):
            if key in holder and (value := holder.pop(key)) != gone.usual:
                lost[old] = value
    for name in ("data.format", "data.mixture.format", "data.evaluation.format"):
        for holder in _holders(found, name):
            if holder.get("format") == "instruction":  # its rows are chats now, of the same tokens
                holder["format"] = "chat"
    return found, lost


def _holders(found: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """The section that holds a key, or each table of the list."""
    section, key, *inner = name.split(".")
    values = found.get(section)
    if not isinstance(values, dict):
        return
    if not inner:
        yield values
        return
    if isinstance(values.get(key), list | tuple):
        tables = values[key] = [dict(t) if isinstance(t, Mapping) else t for t in values[key]]
        yield from (table for table in tables if isinstance(table, dict))
