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

    family: Literal["llama", "internlm2", "hf"] = "llama"
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

    @model_validator(mode="before")
    @classmethod
    def _read_folder_sizes(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("path") in (None, "none"):
            return data
        family = str(data.get("family", "llama"))
        found, _ = hf_folder.sizes(str(data["path"]), family)  # mistakes are reported by the checks
        return {**found, **data}
