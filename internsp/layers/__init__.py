"""Layers for the zoo and for models of one's own: linear, norm, rotary, dropout, experts."""

from internsp.layers.experts import MixtureOfExperts
from internsp.layers.linear import (
    ColumnParallelLinearWithCommExt,
    GroupedLinearWithCommExt,
    ParallelEmbeddingWithCommExt,
    ParallelLinearWithCommExt,
    RowParallelLinearWithCommExt,
)
from internsp.layers.router import Router, balance_experts, router_loss

__all__ = [
    "ColumnParallelLinearWithCommExt",
    "GroupedLinearWithCommExt",
    "MixtureOfExperts",
    "ParallelEmbeddingWithCommExt",
    "ParallelLinearWithCommExt",
    "Router",
    "RowParallelLinearWithCommExt",
    "balance_experts",
    "router_loss",
]
