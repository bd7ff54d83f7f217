"""The zoo's families as transformers' Llama: the names of its tensors, and its config.

InternLM2's fused projection has the rows of Llama's three projections in another order, so that
both families are exported as Llama. The folders of InternLM2's authors have the fused projection,
and other names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from internsp.config.model import ModelConfig
from internsp.model_zoo.common import Sizes

_NAMES = {
    "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}  # fmt: skip

Rows = list[tuple[str, int, int]]
"""The parts of a concatenated tensor, in order: ``(name of a tensor, first row, end)``."""


class ExportedTensor(NamedTuple):
    """A tensor of the exported model.

    Attributes:
        name: its name in transformers.
        source: the tensor's name in the zoo's model; ``None``: zeros, if the zoo has no such bias.
        shape: its shape.
        convert: makes it from the unsharded source.
    """

    name: str
    source: str | None
    shape: tuple[int, ...]
    convert: Callable[[Tensor], Tensor]


def why_not(config: ModelConfig) -> str:
    """Why this model is no Llama of transformers; empty if it is one."""
    sizes = Sizes.of(config)
    if sizes.hidden % sizes.heads:
        return f"its {sizes.heads} heads do not divide its hidden_size = {sizes.hidden}"
    return ""


def exported_tensors(
    config: ModelConfig, shapes: dict[str, tuple[int, ...]], kind: str = "llama"
) -> Iterator[ExportedTensor]:
    """Every tensor of a folder with this model.

    Args:
        shapes: the shapes of the zoo's tensors, by name.
        kind: ``model_type`` of the folder; an ``internlm2`` is not exported, but read.
    """
    if kind == "internlm2":  # as its authors name them
        own = {"embed": "model.tok_embeddings", "head": "output"}
        for source, shape in shapes.items():
            module, _, leaf = source.rpartition(".")
            name = f"{own.get(module, f'model.{module}')}.{leaf}"
            yield ExportedTensor(name, source, shape, identity)
        return
    sizes = Sizes.of(config)
    for source, shape in shapes.items():
        module, _, leaf = source.rpartition(".")
        if module == "head" and config.tie_embeddings:
            continue
        block = ""
        if module.startswith("layers."):
            _, number, module = module.split(".", 2)
            block = f"model.layers.{number}."
        if module == "attention.wqkv":
            for which, short in enumerate("qkv"):
                heads = sizes.heads if short == "q" else sizes.kv_heads
                cut = (heads * sizes.head_dim, *shape[1:])
                name = f"{block}self_attn.{short}_proj.{leaf}"
                yield ExportedTensor(name, source, cut, partial(_rows_of, which, sizes))
        else:
            yield ExportedTensor(f"{block}{_NAMES[module]}.{leaf}", source, shape, identity)
    if config.qkv_bias != config.bias:  # Llama has one switch for both
        for layer in range(config.layers):
            for linear in ("wo",) if config.qkv_bias else ("wq", "wk", "wv"):
                heads = sizes.kv_heads if linear in ("wk", "wv") else sizes.heads
                rows = sizes.hidden if linear == "wo" else heads * sizes.head_dim
                name = f"model.layers.{layer}.{_NAMES[f'attention.{linear}']}.bias"
                yield ExportedTensor(name, None, (rows,), identity)


def joined_tensors(
    config: ModelConfig, shapes: dict[str, tuple[int, ...]], kind: str
) -> dict[str, Rows]:
    """The fused projections of the zoo's model, by name, from rows of Llama's three tensors.

    Arguments as :func:`exported_tensors`; an ``internlm2`` has them as they are.
    """
    sizes = Sizes.of(config)
    share, size = sizes.heads // sizes.kv_heads, sizes.head_dim
    found: dict[str, Rows] = {}
    for name in shapes if kind == "llama" else ():
        block, fused, leaf = name.partition("attention.wqkv.")
        if fused:
            stored = [f"model.{block}self_attn.{short}_proj.{leaf}" for short in "qkv"]
            found[name] = [
                (one, group * rows, (group + 1) * rows)
                for group in range(sizes.kv_heads)
                for one, rows in zip(stored, (share * size, size, size), strict=True)
            ]
    return found


def identity(tensor: Tensor) -> Tensor:
    """``tensor``."""
    return tensor


def _rows_of(which: int, sizes: Sizes, tensor: Tensor) -> Tensor:
    """Query, key or value (0, 1, 2) of rows ``[kv_heads, heads / kv_heads + 2, head_dim]``."""
    share = sizes.heads // sizes.kv_heads
    groups = tensor.unflatten(0, (sizes.kv_heads, share + 2, sizes.head_dim))
    return (groups[:, :share], groups[:, share : share + 1], groups[:, share + 1 :])[which].flatten(
        0, 2
    )


def exported_config(config: ModelConfig, dtype: str, positions: int) -> dict[str, Any]:
    """``config.json`` of the exported model.

    Args:
        dtype: of the model's tensors.
        positions: length of the longest sequence of the training.
    """
    sizes = Sizes.of(config)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias or config.bias,
        "mlp_bias": config.bias,
        "initializer_range": config.init_std,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
    }
