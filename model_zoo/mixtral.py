"""Mixtral (arXiv 2401.04088): Llama whose feed forwards are experts, of which a token passes few.

Every block has ``model.experts`` SwiGLU experts; a softmax over the chosen ones' logits weights
them. Its authors balance the experts by an auxiliary loss (``model.auxiliary``); by default it is
done by a bias (``model.balance_rate``), which needs no loss. There is no sliding window.
"""

from __future__ import annotations

import torch
from torch import nn

from internsp.model_zoo.common import CausalLM, Device, experts_of
from internsp.model_zoo.llama import LlamaAttention


class Mixtral(CausalLM):
    """``embed, layers.N.{attention.{wq,wk,wv,wo}, feed_forward.{router,experts}}, norm, head``."""

    attention = LlamaAttention

    def feed_forward(self, number: int, device: Device, dtype: torch.dtype | None) -> nn.Module:
        """See :class:`CausalLM`: every block has experts."""
        return experts_of(self.config, device, dtype)
