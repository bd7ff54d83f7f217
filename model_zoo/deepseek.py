"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437): latent attention, shared experts.

Keys and values are made from one latent vector of a token (``model.latent_size`` features, with a
norm) and from ``model.rotary_size`` channels that carry the position and that all heads share.
The first ``model.dense_layers`` blocks have a plain feed forward; the others route every token to
``model.top_k`` experts by sigmoid scores, and all tokens to the shared experts.

Unlike theirs, queries are projected at once, a head's values are as wide as its keys
(``head_dim``), and experts are in one group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from internsp.config.model import ModelConfig
from internsp.errors import LayoutError
from internsp.layers import ParallelLinearWithCommExt
from internsp.layers.norm import RMSNorm
from internsp.layers.rotary import RotaryTables, apply_rotary
from internsp.model_zoo.common import CausalLM, Device, Sizes, experts_of, split_heads
from internsp.sp import DistributedAttention, SequenceLayout

LATENT_EPS = 1e-6  # theirs, whatever the other norms' is


class LatentAttention(nn.Module):
    """Causal attention whose keys and values come from one latent vector of each token.

    ``wkv_down`` has rows ``[latent_size | rotary_size]``, ``wkv_up`` rows ``[heads, head_dim -
    rotary_size | head_dim]``: a head's part of the key without position, and its value.
    """

    def __init__(self, config: ModelConfig, device: Device, dtype: torch.dtype | None) -> None:
        super().__init__()
        sizes = Sizes.of(config)
        latent = config.latent_size or 4 * sizes.head_dim
        heads, dim, hidden = sizes.heads, sizes.head_dim, sizes.hidden
        if sizes.kv_heads != heads:
            raise LayoutError(
                f"model.kv_heads = {sizes.kv_heads}, but every one of the {heads} heads of latent "
                "attention has its own key: leave it out"
            )
        turned = rotary_size(config)
        self.head_dim, self.split = dim, (latent, turned)
        self.parts = (dim - turned, dim)
        self.wq = ParallelLinearWithCommExt(hidden, heads * dim, config.qkv_bias, device, dtype)
        self.wkv_down = ParallelLinearWithCommExt(
            hidden, latent + turned, config.qkv_bias, device, dtype
        )
        self.latent_norm = RMSNorm(latent, LATENT_EPS, config.norm, device, dtype)
        self.wkv_up = ParallelLinearWithCommExt(
            latent, heads * sum(self.parts), config.bias, device, dtype
        )
        self.attend = DistributedAttention(heads, heads, dim, kernel=config.attention)
        self.wo = ParallelLinearWithCommExt(heads * dim, hidden, config.bias, device, dtype)

    def forward(self, x: Tensor, rotary: RotaryTables, layout: SequenceLayout | None) -> Tensor:
        """``[B, s, hidden]`` to ``[B, s, hidden]``."""
        still, turned = split_heads(self.wq(x), self.head_dim).split(
            (self.parts[0], self.split[1]), dim=-1
        )
        q = torch.cat((still, apply_rotary(turned, rotary)), dim=-1)
        latent, position = self.wkv_down(x).split(self.split, dim=-1)
        made = split_heads(self.wkv_up(self.latent_norm(latent)), sum(self.parts))
        still, v = made.split(self.parts, dim=-1)
        position = apply_rotary(position[:, :, None], rotary).expand(*still.shape[:3], -1)
        k = torch.cat((still, position), dim=-1)
        out: Tensor = self.wo(self.attend(q, k, v.contiguous(), layout).flatten(-2))
        return out


def rotary_size(config: ModelConfig) -> int:
    """Channels of a head that carry the position; by default a half of ``head_dim``.

    Raises:
        LayoutError: it is odd, or more than a head has.
    """
    dim = Sizes.of(config).head_dim
    found = config.rotary_size or dim // 4 * 2
    if found % 2 or not 0 < found <= dim:
        raise LayoutError(
            f"model.rotary_size = {found} of {dim} features a head: choose an even number, 2 to "
            f"{dim // 2 * 2}"
        )
    return found


class DeepSeek(CausalLM):
    """``embed, layers.N.{attention, feed_forward}, norm, head``.

    ``attention`` has ``wq, wkv_down, latent_norm, wkv_up, wo``; ``feed_forward`` has
    ``w1, w3, w2`` in the first blocks, then ``router, experts`` and ``shared_experts``.
    """

    attention = LatentAttention

    def __init__(
        self, config: ModelConfig, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device, dtype)
        self.rotary_dim = rotary_size(config)

    def feed_forward(self, number: int, device: Device, dtype: torch.dtype | None) -> nn.Module:
        """See :class:`CausalLM`: the blocks behind the first ``dense_layers`` have experts."""
        config = self.config
        if number < config.dense_layers:
            return super().feed_forward(number, device, dtype)
        shared = config.expert_width if config.shared_size is None else config.shared_size
        return experts_of(config, device, dtype, score="sigmoid", shared=shared)
