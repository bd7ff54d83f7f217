"""Llama 2 (arXiv 2307.09288) and Llama 3 (arXiv 2407.21783).

They differ in sizes alone: Llama 3 has fewer key/value heads than heads and ``rope_theta = 5e5``.
With ``qkv_bias`` it is the attention of Qwen 2. Llama 3.1's rescaled wavelengths are not supported.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from internsp.config.model import ModelConfig
from internsp.layers import ParallelLinearWithCommExt
from internsp.layers.rotary import RotaryTables, rotation
from internsp.model_zoo.common import CausalLM, Device, Sizes
from internsp.sp import DistributedAttention, SequenceLayout
from internsp.sp.heads import NO_ROTATION


class LlamaAttention(nn.Module):
    """Causal attention with separate projections and optionally grouped key/value heads."""

    def __init__(self, config: ModelConfig, device: Device, dtype: torch.dtype | None) -> None:
        super().__init__()
        sizes = Sizes.of(config)
        hidden = sizes.hidden
        query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.wq = ParallelLinearWithCommExt(hidden, query, config.qkv_bias, device, dtype)
        self.wk = ParallelLinearWithCommExt(hidden, key, config.qkv_bias, device, dtype)
        self.wv = ParallelLinearWithCommExt(hidden, key, config.qkv_bias, device, dtype)
        self.attend = DistributedAttention(
            sizes.heads, sizes.kv_heads, sizes.head_dim, kernel=config.attention
        )
        self.wo = ParallelLinearWithCommExt(query, hidden, config.bias, device, dtype)

    def forward(self, x: Tensor, rotary: RotaryTables, layout: SequenceLayout | None) -> Tensor:
        """``[B, s, hidden]`` to ``[B, s, hidden]``."""
        turned = rotation(rotary)
        # Under sequence parallelism, parts of each product are sent while the next is computed.
        return self.attend.sublayer(
            x, (self.wq, self.wk, self.wv), (turned, turned, NO_ROTATION), self.wo, layout
        )


class Llama(CausalLM):
    """``embed, layers.N.{attention.{wq,wk,wv,wo}, feed_forward.{w1,w3,w2}}, norm, head``."""

    attention = LlamaAttention
