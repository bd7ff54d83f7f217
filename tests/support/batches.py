"""Batches of the training text by their place in its order."""

from __future__ import annotations

from internsp.app.data.batches import Batch, DataSource


def train_batch(source: DataSource, taken: int, rows: slice = slice(None)) -> Batch:
    """The global batch after ``taken`` rows, or only its rows ``rows``."""
    return source.batch(range(taken, taken + source.global_batch)[rows])
