"""The number of tiles that ``activation_checkpoint.tiles = "auto"`` means."""

from __future__ import annotations

from internsp.app.config import Config
from internsp.config import ActivationCheckpointConfig

MIN_TILE_TOKENS = 1024
"""Minimum of a tile that the plan chooses: smaller products are not worth one more launch."""


def tile_count(config: Config, data: int) -> int:
    """The number of tiles that ``activation_checkpoint.tiles`` means for a data degree of ``data``.

    With ``"auto"``, tiles have as many tokens as the model has features, and at least
    :data:`MIN_TILE_TOKENS`, so that the activations of a tile grow with the weights and not with
    the sequence. A single tile means no tiling.
    """
    chosen = config.activation_checkpoint.tiles
    if chosen != "auto":
        return chosen
    parallel, train = config.parallel, config.train
    rows = train.global_batch // (train.micro_batches * data)
    tokens = max(rows, 1) * config.data.sequence_length // parallel.sequence
    return max(tokens // tile_tokens(config), 1)


def tile_tokens(config: Config) -> int:
    """Minimum number of tokens of a tile that the plan chooses."""
    return max(config.model.hidden_size, MIN_TILE_TOKENS)


def with_tile_count(config: Config, data: int) -> ActivationCheckpointConfig:
    """The activation checkpoint section of ``config``, with the number of tiles instead of auto."""
    return config.activation_checkpoint.model_copy(update={"tiles": tile_count(config, data)})
