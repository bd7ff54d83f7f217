"""The training data on all ranks: rank 0 makes the tokens of large texts, then all open them."""

from __future__ import annotations

import time
from typing import Any

from internsp.app.config import Config
from internsp.app.data.batches import DataSource, vocabulary_mistake
from internsp.app.data.tokenizer import Tokenizer, load_tokenizer
from internsp.app.data.tokens import Read, prepare
from internsp.failure.objects import Objects
from internsp.mesh import ParallelMesh

_LOOK_SECONDS = 5.0  # between messages to the ranks that wait for tokens


def open_source(config: Config, mesh: ParallelMesh) -> DataSource:
    """Open the training data of a run. Collective.

    Raises:
        ConfigError: on every rank: see :meth:`DataSource.create`; or the text has ids that the
            model's vocabulary lacks.
        InternspError: on every rank: a rank cannot see tokens that rank 0 made.
    """
    loaded: list[Tokenizer] = []
    Objects().on_every(lambda: loaded.append(load_tokenizer(config.data.tokenizer)))
    (tokenizer,) = loaded
    if tokenizer.vocab_size > config.model.vocab_size:
        raise vocabulary_mistake(config, tokenizer)
    prepared = _prepare_tokens(config, tokenizer, mesh)
    made: list[DataSource] = []

    def create() -> None:
        own = DataSource.create(
            config.data, global_batch=config.train.global_batch, seed=config.train.seed,
            tokenizer=tokenizer, prepared=prepared,
        )  # fmt: skip
        made.append(own)

    Objects().on_every(create)
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
