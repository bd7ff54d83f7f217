"""The common code of the families: sizes, feed forward, block, and the model around the blocks.

It is single-device code: without a communicator every layer is an ordinary layer, and without a
group attention runs on this rank alone. ``internsp.parallelize`` attaches communication to the
layers and to ``attend``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from internsp.config.model import ModelConfig
from internsp.errors import LayoutError
from internsp.layers import (
    MixtureOfExperts,
    ParallelEmbeddingWithCommExt,
    ParallelLinearWithCommExt,
)
from internsp.layers.dropout import Dropout, block_keys, token_keys
from internsp.layers.norm import RMSNorm, resolve_norm
from internsp.layers.rotary import RotaryTables, rotary_tables
from internsp.sp import SequenceLayout, token_loss

Device = torch.device | str | None


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, with the defaults of those that a :class:`ModelConfig` leaves out."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    @classmethod
    def of(cls, config: ModelConfig) -> Sizes:
        """The sizes of ``config``.

        Defaults are as many key/value heads as heads, ``hidden / heads`` channels a head, and
        ``8 / 3 * hidden`` rounded up to a multiple of 32 in the feed forward.

        Raises:
            LayoutError: the heads do not divide the hidden size, or the key/value heads the heads.
        """
        kv_heads = config.key_value_heads
        if config.heads % kv_heads:
            raise LayoutError(
                f"model.heads = {config.heads} is not a multiple of model.kv_heads = {kv_heads}"
            )
        if config.head_dim is None and config.hidden_size % config.heads:
            raise LayoutError(
                f"model.hidden_size = {config.hidden_size} is not a multiple of model.heads = "
                f"{config.heads}; change one of them or set model.head_dim"
            )
        return cls(
            hidden=config.hidden_size,
            heads=config.heads,
            kv_heads=kv_heads,
            head_dim=config.head_size,
            intermediate=config.dense_width,
        )


class FeedForward(nn.Module):
    """``w2(silu(w1(x)) * w3(x))`` (SwiGLU, arXiv 2002.05202): w1 gate, w3 up, w2 down."""

    def __init__(self, config: ModelConfig, device: Device, dtype: torch.dtype | None) -> None:
        super().__init__()
        sizes = Sizes.of(config)
        hidden, wide, options = sizes.hidden, sizes.intermediate, (config.bias, device, dtype)
        self.w1 = ParallelLinearWithCommExt(hidden, wide, *options)
        self.w3 = ParallelLinearWithCommExt(hidden, wide, *options)
        self.w2 = ParallelLinearWithCommExt(wide, hidden, *options)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, s, hidden]`` to ``[B, s, hidden]``."""
        gate: Tensor = self.w1(x)
        up: Tensor = self.w3(x)
        down: Tensor = self.w2(F.silu(gate) * up)
        return down


def experts_of(
    config: ModelConfig, device: Device, dtype: torch.dtype | None, **options: Any
) -> MixtureOfExperts:
    """The experts of a block, with the sizes and the balance of ``config``.

    Args:
        options: of :class:`MixtureOfExperts`, beside those.
    """
    return MixtureOfExperts(
        config.hidden_size, config.expert_width, config.experts, config.top_k,
        auxiliary=config.auxiliary, z_loss=config.z_loss, balance_rate=config.balance_rate,
        capacity_factor=config.capacity_factor, device=device, dtype=dtype, **options,
    )  # fmt: skip


class Block(nn.Module):
    """Normalize, attend, add; normalize, feed forward, add.

    Takes and returns one hidden state, so that it can be checkpointed, compiled or replaced.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: type[nn.Module],
        feed_forward: nn.Module,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        size, eps, norm = config.hidden_size, config.norm_eps, config.norm
        self.attention_norm = RMSNorm(size, eps, norm, device, dtype)
        self.attention = attention(config, device, dtype)
        self.ffn_norm = RMSNorm(size, eps, norm, device, dtype)
        self.feed_forward = feed_forward
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        h: Tensor,
        rotary: RotaryTables,
        layout: SequenceLayout | None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """``h``: ``[B, s, hidden]``; returns the same shape and dtype.

        ``keys``: ``[B, s]`` int64, from which dropout in this block computes its masks.
        """
        h = h + self.dropout(self.attention(self.attention_norm(h), rotary, layout), keys, 0)
        return h + self.dropout(self.feed_forward(self.ffn_norm(h)), keys, 1)


class CausalLM(nn.Module):
    """Embedding, blocks, norm and head; a family chooses attention and feed forward of its blocks.

    Attributes:
        attention: the class of the blocks' attention, made of config, device and dtype.

    ``internsp.parallelize`` sets ``loss_options`` when the head is parallel: keyword arguments of
    :func:`internsp.sp.token_loss`, such as ``output="vocabulary"`` and its ``group``.
    """

    attention: ClassVar[type[nn.Module]]

    def __init__(
        self, config: ModelConfig, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        # Resolved once here, so that the choice of "auto" is logged once and not for every norm.
        config = config.model_copy(update={"norm": resolve_norm(config.norm)})
        self.config = config
        self.sizes = Sizes.of(config)
        self.rotary_dim = self.sizes.head_dim  # channels of a head that are turned
        self.loss_options: dict[str, Any] = {}
        vocabulary, hidden = config.vocab_size, config.hidden_size
        self.embed = ParallelEmbeddingWithCommExt(vocabulary, hidden, device=device, dtype=dtype)
        self.layers = nn.ModuleList(
            Block(config, self.attention, self.feed_forward(number, device, dtype), device, dtype)
            for number in range(config.layers)
        )
        self.norm = RMSNorm(hidden, config.norm_eps, config.norm, device, dtype)
        self.head = ParallelLinearWithCommExt(hidden, vocabulary, False, device, dtype)
        self.tie()

    def feed_forward(self, number: int, device: Device, dtype: torch.dtype | None) -> nn.Module:
        """Make the feed forward of block ``number``, 0 for the first."""
        return FeedForward(self.config, device, dtype)

    def tie(self) -> None:
        """Make the head's weight the embedding's parameter again, if the config ties them.

        Call it after ``Module.to_empty``, which gives every module parameters of its own.
        """
        if self.config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self,
        input_ids: Tensor,
        *,
        layout: SequenceLayout | None = None,
        labels: Tensor | None = None,
        loss_chunk: int = 1024,
        last_only: bool = False,
        start: int = 0,
        row_keys: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits, or with ``labels`` the summed token loss and the number of valid tokens.

        Args:
            input_ids: ``[B, s]`` int64, this rank's shard of the sequences.
            layout: the positions of that shard and the documents; None: whole sequences, one
                document each.
            labels: ``[B, s]`` int64, the token to predict at each position, -100 for none.
            loss_chunk: tokens whose logits exist at once while the loss is computed.
            last_only: return logits of the last position only.
            start: position of the first token when earlier tokens are cached; without layout.
            row_keys: ``[B]`` int64, as ``SequenceLayout.row_keys``; without layout.

        Returns:
            ``[B, s, vocabulary]`` (``[B, 1, vocabulary]`` with ``last_only``), or a pair of
            scalars: the sum in ``promote_types(dtype, float32)``, never divided, and the count.

        Raises:
            LayoutError: ``input_ids`` and ``layout`` differ in shape, or dropout has no row keys.
        """
        h: Tensor = self.embed(input_ids)
        rotary = self.rotary(input_ids, layout, h.dtype, start)
        tokens = self.token_keys(input_ids, layout, row_keys) if self.training else None
        for number, block in enumerate(self.layers, 1):
            # No keys are passed without dropout: a program's own blocks need no such argument.
            keys = () if tokens is None else (block_keys(tokens, number),)
            h = block(h, rotary, layout, *keys)
        h = self.norm(h[:, -1:] if last_only and labels is None else h)
        if labels is None:
            logits: Tensor = self.head(h)
            return logits
        return token_loss(
            h, self.head, labels, chunk_tokens=loss_chunk, layout=layout, **self.loss_options
        )

    def rotary(
        self,
        input_ids: Tensor,
        layout: SequenceLayout | None,
        dtype: torch.dtype,
        start: int = 0,
    ) -> RotaryTables:
        """The rotary tables of this forward, computed once for all blocks."""
        if layout is None:
            steps = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)
            positions = steps.expand(input_ids.shape)
        else:
            positions = layout.positions
            if positions.shape != input_ids.shape:
                raise LayoutError(
                    f"input_ids have shape {tuple(input_ids.shape)}, but the sequence layout is "
                    f"of {tuple(positions.shape)} (rank {layout.rank} of {layout.size}); pass "
                    "layout.input_ids, this rank's part"
                )
        return rotary_tables(positions, self.rotary_dim, self.config.rope_theta, dtype)

    def token_keys(
        self, x: Tensor, layout: SequenceLayout | None, row_keys: Tensor | None = None
    ) -> Tensor | None:
        """``[B, s]`` int64, from which dropout computes its masks; None without dropout.

        Raises:
            LayoutError: there are no row keys, which identify the rows of the data.
        """
        if not self.config.dropout:
            return None
        index = torch.arange(x.shape[1], device=x.device) if layout is None else layout.index
        keys = row_keys if layout is None else layout.row_keys
        if keys is None:
            raise LayoutError(
                "a model with dropout needs to know in training which rows it is given: call "
                "SequenceLayout.create(ids, row_keys=internsp.row_keys(seed, "
                "numbers)) with their numbers in the order of the data, or model.eval()"
            )
        return token_keys(keys, index)

    @torch.no_grad()
    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Initialize one unsharded parameter in place.

        Norms are 1 and biases 0. Other weights are normal with ``init_std``; the projections that
        write to the residual stream (``wo``, ``w2``, experts' ``down``) are smaller by
        ``sqrt(2 * layers)`` (GPT-2).

        The values depend on ``name`` and ``generator.initial_seed()`` only, neither on what was
        initialized before nor on the dtype (drawn in fp32, then rounded), so that they are equal on
        every rank, stage and mesh. They are drawn on the generator's device.

        Args:
            name: fully-qualified, as in ``named_parameters()``; path elements that
                ``torch.compile`` or a checkpoint wrapper inserts are ignored.
            tensor: the unsharded parameter, of any floating dtype, on any device but meta.

        Raises:
            ValueError: ``tensor`` is on the meta device.
        """
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device; give it memory before its values")
        name = canonical_name(name)
        module, _, kind = name.rpartition(".")
        if kind == "bias":
            tensor.zero_()
        elif module.endswith("norm"):
            tensor.fill_(1.0)
        else:
            std = self.config.init_std
            if module.endswith((".wo", ".w2")) or kind == "down":
                std /= (2 * self.config.layers) ** 0.5
            own = torch.Generator(device=generator.device)
            digest = hashlib.sha256(f"{generator.initial_seed()}:{name}".encode()).digest()
            own.manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # it takes 63 bits
            values = torch.empty(tensor.shape, dtype=torch.float32, device=generator.device)
            tensor.copy_(values.normal_(0.0, std, generator=own))


def canonical_name(name: str) -> str:
    """``name`` without the path elements that wrappers insert."""
    wrappers = ("_orig_mod", "_checkpoint_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """``[B, s, heads * head_dim]`` as ``[B, s, heads, head_dim]``, a view."""
    return x.unflatten(-1, (-1, head_dim))
