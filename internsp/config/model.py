"""The section of a model of the zoo: its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    model_validator,
)

from internsp.config import hf_folder
from internsp.config.keys import ProgramOnly
from internsp.config.sections import Dropped, Few, Section, Size, Text, Tiny


class ModelConfig(Section):
    """The model: its shape, or the folder of one of transformers' models."""

    family: Literal["llama", "internlm2", "mixtral", "deepseek", "hf"] = "llama"
    """Family of the model zoo; hf: the causal model of transformers in path."""
    path: Text | None = None
    """Folder of a model of transformers: config.json, which decides all sizes, and safetensors."""
    vocab_size: Size = 257
    """Number of token ids; 257 is 256 bytes and the end of a document."""
    hidden_size: Size = 256
    """Width of the residual stream, in features."""
    layers: Few = 4
    """Number of transformer blocks."""
    heads: Size = 4
    """Number of query heads."""
    kv_heads: Size | None = None
    """Number of key/value heads; none: as many as query heads."""
    head_dim: Size | None = None
    """Features of one head; none: hidden_size / heads."""
    intermediate_size: Size | None = None
    """Width of the feed-forward network, in features; none: 8/3 of hidden_size, up to a 32nd."""
    rope_theta: Annotated[float, Field(ge=1, le=1e15)] = 10000.0
    """Base of the rotary embedding's wavelengths."""
    norm_eps: Tiny = 1e-5
    """Added to the mean square inside every norm."""
    tie_embeddings: bool = False
    """Let the head use the embedding's weight."""
    qkv_bias: bool = False
    """Bias in the query, key and value projections."""
    bias: Annotated[bool, ProgramOnly] = False
    """Bias in all other linear layers."""
    norm: Literal["torch", "apex", "auto"] = "torch"
    """Implementation of the norm; apex is NVIDIA's, auto takes it where it is importable."""
    attention: Literal["auto", "sdpa", "flash", "varlen"] = "auto"
    """Attention kernel; auto takes the fastest one present and logs its choice."""
    init_std: Annotated[float, Field(ge=1e-12, le=100)] = 0.02
    """Standard deviation of the initial weights."""
    dropout: Dropped = 0.0
    """Share of what attention and feed-forward add that training drops, the same on any mesh."""

    experts: Size = 8
    """Number of experts of a block, of mixtral and deepseek."""
    top_k: Size = 2
    """Experts that each token passes."""
    expert_size: Annotated[Size | None, ProgramOnly] = None
    """Width of an expert, in features; none: intermediate_size, of deepseek over top_k + 1."""
    auxiliary: Annotated[float, Field(ge=0, le=100), ProgramOnly] = 0.0
    """Factor of the loss that balances the experts; 0 for none."""
    z_loss: Annotated[float, Field(ge=0, le=100), ProgramOnly] = 0.0
    """Factor of the loss of large router logits; 0 for none."""
    capacity_factor: Annotated[float, Field(ge=0, le=1000), ProgramOnly] = 0.0
    """Times an equal share that an expert takes of a rank's tokens; others drop. 0: none drop."""
    balance_rate: Annotated[float, Field(ge=0, le=1), ProgramOnly] = 0.001
    """Each step moves the bias of an overloaded expert down by this, of others up; 0: no bias."""
    shared_size: Annotated[int | None, Field(ge=0, le=1 << 24), ProgramOnly] = None
    """Width of the experts that all tokens of deepseek pass; none: that of one expert; 0: none."""
    dense_layers: Annotated[int, Field(ge=0, le=1 << 24), ProgramOnly] = 1
    """The first blocks of deepseek, which have a plain feed forward and no experts."""
    latent_size: Annotated[Size | None, ProgramOnly] = None
    """Features of the latent vector of deepseek's keys and values; none: four times head_dim."""
    rotary_size: Annotated[Size | None, ProgramOnly] = None
    """Features of a head of deepseek that are rotated; none: a half of head_dim."""

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.head_dim or self.hidden_size // self.heads

    @property
    def dense_width(self) -> int:
        """Features within a feed-forward network without experts."""
        return self.intermediate_size or -(-self.hidden_size * 8 // 3 // 32) * 32

    @property
    def expert_width(self) -> int:
        """Features within an expert: by default a token passes as many as in a dense block.

        Of deepseek these are ``top_k`` experts and the shared one, up to a 32nd; an expert of
        mixtral is a dense feed forward.
        """
        wide = self.dense_width
        if self.family == "deepseek":
            wide = -(-wide // (self.top_k + 1) // 32) * 32
        return self.expert_size or wide

    @property
    def mixtures(self) -> int:
        """Number of blocks with experts."""
        first = {"mixtral": 0, "deepseek": self.dense_layers}.get(self.family, self.layers)
        return max(0, self.layers - first)

    @model_validator(mode="before")
    @classmethod
    def _read_folder_sizes(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("path") in (None, "none"):
            return data
        family = str(data.get("family", "llama"))
        found, _ = hf_folder.sizes(str(data["path"]), family)  # mistakes are reported by the checks
        return {**found, **data}
