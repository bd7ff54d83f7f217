"""A sequence sharded over ranks: layout, head plan, exchange, ring, attention, token loss.

Imports nothing from :mod:`internsp.wp`: the two parallel degrees are independent.
"""

from internsp.sp.attention import DistributedAttention as DistributedAttention
from internsp.sp.checkpointing import checkpoint_context_fn as checkpoint_context_fn
from internsp.sp.exchange import ExchangeGroup as ExchangeGroup
from internsp.sp.exchange import PendingExchange as PendingExchange
from internsp.sp.exchange import start_exchange as start_exchange
from internsp.sp.heads import HeadPlan as HeadPlan
from internsp.sp.kernels import AttentionMask as AttentionMask
from internsp.sp.layout import IGNORE_INDEX as IGNORE_INDEX
from internsp.sp.layout import Documents as Documents
from internsp.sp.layout import SequenceLayout as SequenceLayout
from internsp.sp.loss import token_loss as token_loss
from internsp.sp.vocabulary import gather_logits as gather_logits
from internsp.sp.vocabulary import (
    vocabulary_parallel_cross_entropy as vocabulary_parallel_cross_entropy,
)
