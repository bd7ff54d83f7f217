"""What ranks are given: one configuration and one text. Rank 0 makes the tokens of large texts."""

from __future__ import annotations

import time
from typing import Any

from internsp.app.config import Config
from internsp.app.data.batches import DataSource, tokenizer_of
from internsp.app.data.tokenizer import Tokenizer
from internsp.app.data.tokens import Read, prepare
from internsp.config.words import in_words
from internsp.errors import ConfigError
from internsp.failure.objects import Objects
from internsp.mesh import ParallelMesh

# What may differ: places of files, whose content is compared, and what no launcher's rank reads.
_OWN = {
    "data.paths", "data.mixture", "data.evaluation", "data.cache_dir", "data.tokenizer",
    "model.path", "launch.processes",
}  # fmt: skip
_LOOK_SECONDS = 5.0  # between messages to the ranks that wait for tokens


def require_same(config: Config) -> None:
    """Check that all ranks have the same configuration: else they wait for each other without an
    end, or train with the mean of two batches, seeds or models. Collective.

    Raises:
        ConfigError: on every rank: it differs.
    """
    dumped = config.model_dump(mode="json").items()
    own = {f"{name}.{key}": value for name, keys in dumped for key, value in keys.items()}
    everyone = Objects().gather({key: value for key, value in own.items() if key not in _OWN})
    for rank, theirs in enumerate(everyone):
        if wrong := [key for key, value in everyone[0].items() if theirs[key] != value]:
            first, other = (in_words(values[wrong[0]]) for values in (everyone[0], theirs))
            raise ConfigError(
                f"{', '.join(wrong[:5])}: {first} on rank 0, {other} on rank {rank}: start every "
                "rank with the same configuration"
            )


def open_source(config: Config, mesh: ParallelMesh) -> DataSource:
    """Open the training data of a run. Collective.

    Raises:
        ConfigError: on every rank: see :class:`DataSource`; or the text has ids that the
            model's vocabulary lacks; or ranks have read other texts.
        InternspError: on every rank: a rank cannot see tokens that rank 0 made.
    """
    loaded: list[Tokenizer] = []
    Objects().on_every(lambda: loaded.append(tokenizer_of(config)))
    (tokenizer,) = loaded
    prepared = _prepare_tokens(config, tokenizer, mesh)
    made: list[DataSource] = []

    def create() -> tuple[str, list[str]]:
        own = DataSource(
            config.data, global_batch=config.train.global_batch, seed=config.train.seed,
            tokenizer=tokenizer, prepared=prepared,
        )  # fmt: skip
        made.append(own)
        evaluated = [s.digest() for rows in own.evaluations.values() for s in rows.documents.stores]
        return own.fingerprint, evaluated

    read = Objects().on_every(create)
    if wrong := [rank for rank, found in enumerate(read) if found != read[0]]:
        raise ConfigError(
            f"data: rank {wrong[0]} has read other text than rank 0 (of {len(read)} ranks, "
            f"{len(wrong)} have): give every rank the same files"
        )
    return made[0]


def _prepare_tokens(config: Config, tokenizer: Tokenizer, mesh: ParallelMesh) -> Any:
    """Make the missing tokens on rank 0. It sends the other ranks a message every few seconds, so
    that none waits in a collective for longer than its timeout, however large the data are."""
    pause, told = min(_LOOK_SECONDS, mesh.timeout_seconds / 4), time.monotonic()

    def telling(read: Read) -> Read:
        nonlocal told
        for piece in read:
            yield piece
            if time.monotonic() - told > pause:
                Objects().on_first(lambda: None)  # taken by the loop of the others, below
                told = time.monotonic()

    found = None
    while found is None:
        found = Objects().on_first(lambda: prepare(config.data, tokenizer, telling))
    return found
