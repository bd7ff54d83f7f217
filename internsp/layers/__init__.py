"""Model layers whose weights a communicator can shard."""

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
