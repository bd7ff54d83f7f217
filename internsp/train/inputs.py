"""The data of a run on all its ranks: indices are made by one of them, all open what it made."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from internsp.config import Config
from internsp.data.batches import DataSource, vocabulary_mistake
from internsp.data.index import prepare
from internsp.data.tokenizer import Tokenizer, load_tokenizer
from internsp.mesh import ParallelMesh
from internsp.train.agreement import from_first, on_every_rank

_LOOK_SECONDS = 5.0  # between messages to those that wait for an index


def open_source(config: Config, mesh: ParallelMesh) -> DataSource:
    """The batches of a run. Collective.

    Raises:
        ConfigError: on every rank: see :meth:`DataSource.create`; or the text has ids that the
            model's vocabulary lacks.
        InternspError: on every rank: an index is not seen by a rank.
    """
    loaded: list[Tokenizer] = []
    on_every_rank(lambda: loaded.append(load_tokenizer(config.data.tokenizer)))
    tokenizer = loaded[0]
    if tokenizer.vocab_size > config.model.vocab_size:
        raise vocabulary_mistake(config, tokenizer)
    indices, notes = _prepared(config, tokenizer, mesh)
    made: list[DataSource] = []

    def opened() -> None:
        made.append(
            DataSource.create(
                config.data,
                global_batch=config.train.global_batch,
                seed=config.train.seed,
                tokenizer=tokenizer,
                indices=indices,
            )
        )

    on_every_rank(opened)
    source = made[0]
    source.notes = tuple(notes)
    return source


def _prepared(config: Config, tokenizer: Tokenizer, mesh: ParallelMesh) -> Any:
    """Rank 0 makes what indices are wanted; the others are told that it still does, so that none
    waits longer in a collective than its timeout, however large the data are."""
    work = prepare(config.data, tokenizer) if dist.get_rank() == 0 else None
    pause = min(_LOOK_SECONDS, mesh.timeout_seconds / 4)

    def some() -> Any:
        assert work is not None, "rank 0 alone is asked"
        end = time.monotonic() + pause
        while time.monotonic() < end:
            try:
                next(work)
            except StopIteration as done:
                return done.value
        return None

    found = None
    while found is None:
        found = from_first(some)
    return found
