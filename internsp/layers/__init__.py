"""Model layers that can meet a weight communicator."""

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
