"""A sequence sharded over ranks: layout, head plan, exchange, ring, attention, token loss.

Imports nothing from :mod:`internsp.wp`: the two parallel degrees are independent.
"""

from internsp.sp.attention import DistributedAttention
from internsp.sp.checkpointing import checkpoint_context_fn
from internsp.sp.exchange import ExchangeGroup, PendingExchange, start_exchange
from internsp.sp.heads import HeadPlan
from internsp.sp.kernels import AttentionMask
from internsp.sp.layout import IGNORE_INDEX, Documents, SequenceLayout
from internsp.sp.loss import token_loss
from internsp.sp.vocabulary import gather_logits, vocabulary_parallel_cross_entropy

__all__ = [
    "IGNORE_INDEX",
    "AttentionMask",
    "ExchangeGroup",
    "DistributedAttention",
    "Documents",
    "HeadPlan",
    "PendingExchange",
    "SequenceLayout",
    "checkpoint_context_fn",
    "gather_logits",
    "start_exchange",
    "token_loss",
    "vocabulary_parallel_cross_entropy",
]
