"""Layers for the zoo: linear, norm, rotary, dropout."""

from internsp.layers.linear import (
    ColumnParallelLinearWithCommExt,
    GroupedLinearWithCommExt,
    ParallelEmbeddingWithCommExt,
    ParallelLinearWithCommExt,
    RowParallelLinearWithCommExt,
)

__all__ = [
    "ColumnParallelLinearWithCommExt",
    "GroupedLinearWithCommExt",
    "ParallelEmbeddingWithCommExt",
    "ParallelLinearWithCommExt",
    "RowParallelLinearWithCommExt",
]
