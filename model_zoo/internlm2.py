"""InternLM2 (arXiv 2403.17297): Llama with one fused projection for query, key and value.

Its rows are interleaved by key/value head: for each key/value head, the query heads that share it,
then the key, then the value, so that a split by key/value heads is a split of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from internsp.config.model import ModelConfig
from internsp.layers import ParallelLinearWithCommExt
from internsp.layers.rotary import RotaryTables, apply_rotary
from internsp.model_zoo.common import CausalLM, Device, Sizes, split_heads
from internsp.sp import DistributedAttention, SequenceLayout


class InternLM2Attention(nn.Module):
    """Causal attention whose ``wqkv`` has rows ``[kv_heads, heads / kv_heads + 2, head_dim]``."""

    def __init__(self, config: ModelConfig, device: Device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.sizes = sizes = Sizes.of(config)
        query = sizes.heads * sizes.head_dim
        fused = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        self.wqkv = ParallelLinearWithCommExt(sizes.hidden, fused, config.qkv_bias, device, dtype)
        self.attend = DistributedAttention(
            sizes.heads, sizes.kv_heads, sizes.head_dim, kernel=config.attention
        )
        self.wo = ParallelLinearWithCommExt(query, sizes.hidden, config.bias, device, dtype)

    def forward(self, x: Tensor, rotary: RotaryTables, layout: SequenceLayout | None) -> Tensor:
        """``[B, s, hidden]`` to ``[B, s, hidden]``."""
        share = self.sizes.heads // self.sizes.kv_heads
        heads = split_heads(self.wqkv(x), self.sizes.head_dim)
        groups = heads.unflatten(2, (self.sizes.kv_heads, share + 2))
        q = apply_rotary(groups[:, :, :, :share].flatten(2, 3), rotary)
        k = apply_rotary(groups[:, :, :, share], rotary)
        v = groups[:, :, :, share + 1]
        out: Tensor = self.wo(self.attend(q, k, v, layout).flatten(-2))
        return out


class InternLM2(CausalLM):
    """``embed, layers.N.{attention.{wqkv,wo}, feed_forward.{w1,w3,w2}}, norm, head``."""

    attention = InternLM2Attention
