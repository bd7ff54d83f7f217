"""Layers for the zoo and for models of one's own: linear, norm, rotary, dropout, experts."""

from internsp.layers.experts import MixtureOfExperts as MixtureOfExperts
from internsp.layers.linear import (
    ColumnParallelLinearWithCommExt as ColumnParallelLinearWithCommExt,
)
from internsp.layers.linear import GroupedLinearWithCommExt as GroupedLinearWithCommExt
from internsp.layers.linear import ParallelEmbeddingWithCommExt as ParallelEmbeddingWithCommExt
from internsp.layers.linear import ParallelLinearWithCommExt as ParallelLinearWithCommExt
from internsp.layers.linear import RowParallelLinearWithCommExt as RowParallelLinearWithCommExt
from internsp.layers.router import Router as Router
from internsp.layers.router import balance_experts as balance_experts
from internsp.layers.router import router_loss as router_loss
