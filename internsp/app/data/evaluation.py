"""Named texts to evaluate on (``[[data.evaluation]]``), in addition to the held-out part of the
training text. Nothing is trained on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from internsp.app.config import DataConfig, EvaluationText
from internsp.app.data.cut import Documents, PackedRows, PaddedRows, Rows
from internsp.app.data.index import Indices, open_stores
from internsp.app.data.store import TokenStore
from internsp.app.data.tokenizer import Tokenizer
from internsp.errors import ConfigError


@dataclass(frozen=True)
class Evaluation:
    """A named text to evaluate on.

    Attributes:
        name: name in metrics.
        rows: its sequences, in the order of its documents.
    """

    name: str
    rows: Rows

    @classmethod
    def create(
        cls,
        given: EvaluationText,
        stores: Sequence[TokenStore],
        data: DataConfig,
        tokenizer: Tokenizer,
    ) -> Evaluation:
        """Cut a text into sequences.

        Raises:
            ConfigError: there is no text, or not enough for one sequence.
        """
        lengths = np.concatenate([store.lengths() for store in stores])
        begins = np.cumsum(lengths) - lengths
        found = Documents.create(stores, begins, lengths, given.format != "text")
        rows = rows_of_documents(found, data, 0, tokenizer)
        if not rows.available:
            least = data.sequence_length if data.pack else 2
            lower = "set data.sequence_length lower, " * data.pack
            where = ", ".join(given.paths) or "the standard library"
            raise ConfigError(
                f"data.evaluation: {given.name!r} has {len(found)} tokens in {where}, and a "
                f"sequence takes {least}: give more text, {lower}or leave the table out"
            )
        return cls(given.name, rows)


def rows_of_documents(found: Documents, data: DataConfig, seed: int, tokenizer: Tokenizer) -> Rows:
    """Sequences of these documents, packed or padded as ``data`` sets."""
    if data.pack:
        return PackedRows(found, data.sequence_length, seed)
    return PaddedRows(found, data.sequence_length, seed, tokenizer.end_of_document)


def evaluations(data: DataConfig, tokenizer: Tokenizer, indices: Indices) -> tuple[Evaluation, ...]:
    """All evaluation texts of a configuration, in its order.

    Raises:
        ConfigError: see :meth:`Evaluation.create`.
    """
    return tuple(
        Evaluation.create(given, open_stores(given, tokenizer, indices), data, tokenizer)
        for given in data.evaluation
    )
