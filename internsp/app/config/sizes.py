"""Sizes of a run's model and batch, checked against what any machine has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from internsp.app.config.errors import Problem

if TYPE_CHECKING:
    from internsp.app.config import Config

LARGEST_RANK = 1 << 46
"""Bytes (64 TiB) that no rank has, neither on a GPU nor in host memory."""

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def block_elements(config: Config) -> int:
    """Number of elements of one block's large weights."""
    model = config.model
    head = model.head_dim or max(1, model.hidden_size // model.heads)
    wide = model.intermediate_size or 8 * model.hidden_size // 3
    heads = 2 * model.heads + 2 * (model.kv_heads or model.heads)
    return model.hidden_size * (heads * head + 3 * wide)


def elements(config: Config) -> int:
    """Number of elements of the model's large weights."""
    tables = 1 if config.model.tie_embeddings else 2
    outside = tables * config.model.vocab_size * config.model.hidden_size
    model = config.model
    experts = model.mixtures * (model.experts - 1) * 3 * model.hidden_size * model.expert_width
    return model.layers * block_elements(config) + experts + outside


def moments(config: Config) -> int:
    """Values that the optimizer keeps per element of a weight; of an imported class, two.

    For adafactor 0: it keeps rows and columns only. muon's are those of matrices in blocks.
    """
    known = {"sgd": int(config.optimizer.momentum_used > 0), "muon": 1, "adafactor": 0}
    return known.get(config.optimizer.name, 2)


def too_large(config: Config, world_size: int) -> Iterator[Problem]:
    """Problems of sizes that no rank could hold: its part of the weights, or one block's inputs.

    Degrees that do not fit ``world_size`` are checked elsewhere.
    """
    model, parallel, train = config.model, config.parallel, config.train
    item = ITEM_BYTES[train.dtype]
    cut = elements(config) * item // (parallel.weight * parallel.pipeline)
    held = max(cut, block_elements(config) * item)
    if held > LARGEST_RANK:
        sizes = ("vocab_size", "hidden_size", "layers", "heads", "head_dim", "intermediate_size")
        text = (
            f"{elements(config):.3g} parameters take {held / 2**40:.3g} TiB on each rank, more "
            "than any machine has: check hidden_size, layers, heads, head_dim, intermediate_size "
            "and vocab_size, or raise parallel.weight"
        )
        yield Problem(("model", *(f"model.{key}" for key in sizes)), text)
    data = max(1, world_size // (parallel.pipeline * parallel.sequence))
    rows = max(1, train.global_batch // (train.micro_batches * data))
    length = -(-config.data.sequence_length // parallel.sequence)
    inputs = rows * length * model.hidden_size * item
    if inputs > LARGEST_RANK:
        text = (
            f"{rows} sequences of {length} tokens and {model.hidden_size} features take "
            f"{inputs / 2**40:.3g} TiB on each rank, more than any machine has: lower it or "
            "train.global_batch, or raise train.micro_batches or parallel.sequence"
        )
        keys = ("data.sequence_length", "train.global_batch", "train.micro_batches")
        yield Problem((*keys, "parallel.sequence", "model.hidden_size"), text)
