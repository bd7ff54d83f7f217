"""The zoo's families with experts as transformers' Mixtral, ERNIE 4.5 and DeepSeek-V3.

A Mixtral whose experts a bias chooses is an ERNIE 4.5 without shared experts: that family adds a
bias to softmax scores, too, and rotates neighboring features of a head, so that rows of queries
and keys are in another order. Each expert is written under its own names, as the authors' folders
have it. What is not in a block with experts has the names of Llama (:mod:`.llama_form`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor

from internsp.config.model import ModelConfig
from internsp.model_zoo import llama_form
from internsp.model_zoo.common import Sizes
from internsp.model_zoo.deepseek import rotary_size
from internsp.model_zoo.llama_form import ExportedTensor, Rows, identity

_DEEPSEEK = {
    "attention.wq": "self_attn.q_proj", "attention.wkv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.latent_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_up": "self_attn.kv_b_proj",
    "feed_forward.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "feed_forward.shared_experts.w3": "mlp.shared_experts.up_proj",
    "feed_forward.shared_experts.w2": "mlp.shared_experts.down_proj",
}  # fmt: skip
# Whose rows are in another order where neighboring features are rotated.
_TURNED = {"attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj"}
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# By model_type: the module of the experts, those of an expert, the bias of their choice.
_NAMES: dict[str, tuple[str, tuple[str, str, str], str | None]] = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2"), None),
    "ernie4_5_moe": ("mlp", _PROJECTIONS, "moe_statics.e_score_correction_bias"),
    "deepseek_v3": ("mlp", _PROJECTIONS, "gate.e_score_correction_bias"),
}


def kind_of(config: ModelConfig) -> str:
    """``model_type`` of the exported model."""
    if config.family == "deepseek":
        return "deepseek_v3"
    return "ernie4_5_moe" if config.balance_rate else "mixtral"


def why_not(config: ModelConfig) -> str:
    """Why this model is none of transformers' families; empty if it is one."""
    if config.qkv_bias or config.bias:
        return "its linear layers have biases (model.qkv_bias, model.bias)"
    shared = config.expert_width if config.shared_size is None else config.shared_size
    if config.family == "deepseek" and (not shared or shared % config.expert_width):
        return f"its shared experts ({shared} features) are no multiple of {config.expert_width}"
    return llama_form.why_not(config)


def exported_tensors(
    config: ModelConfig, shapes: dict[str, tuple[int, ...]], kind: str | None = None
) -> Iterator[ExportedTensor]:
    """Every tensor of a folder with this model; arguments as :func:`.llama_form.exported_tensors`.

    Args:
        shapes: with those of the routers' biases, if ``kind`` has them.
        kind: ``model_type`` of the folder; ``None``: as the model is exported.
    """
    kind = kind or kind_of(config)
    inside, _, bias = _NAMES[kind]
    llama: dict[str, tuple[int, ...]] = {}
    for source, shape in shapes.items():
        block, module, leaf = _split(source)
        mixture = f"{block}{inside}"
        if module == "feed_forward.experts":
            yield from _experts(kind, f"{mixture}.experts", leaf, source, shape)
        elif source.endswith("feed_forward.router.weight"):
            yield ExportedTensor(f"{mixture}.gate.weight", source, shape, identity)
            own = source.removesuffix("weight") + "bias"
            if bias is not None:
                size = (1, shape[0]) if kind == "ernie4_5_moe" else shape[:1]
                chooses = own if own in shapes else None
                yield ExportedTensor(f"{mixture}.{bias}", chooses, size, methodcaller("view", size))
        elif module == "feed_forward.router":
            continue  # the bias, told with its weight
        elif kind == "deepseek_v3" and module in _DEEPSEEK:
            yield ExportedTensor(f"{block}{_DEEPSEEK[module]}.{leaf}", source, shape, identity)
        elif kind == "ernie4_5_moe" and module in _TURNED:
            name, order = f"{block}{_TURNED[module]}.{leaf}", _neighbors(config, shape[0])
            yield ExportedTensor(name, source, shape, itemgetter(order))
        else:
            llama[source] = shape
    yield from llama_form.exported_tensors(config, llama)


def joined_tensors(
    config: ModelConfig, shapes: dict[str, tuple[int, ...]], kind: str
) -> dict[str, Rows | list[Rows]]:
    """The zoo's tensors that are made of several of a folder's, or of other rows; by name.

    Of experts, a list of rows for each, whose matrix is transposed; arguments as
    :func:`exported_tensors`.
    """
    inside, (gate, up, down), _ = _NAMES[kind]
    found: dict[str, Rows | list[Rows]] = {}
    for source, shape in shapes.items():
        block, module, leaf = _split(source)
        if module == "feed_forward.experts":
            names = (gate, up) if leaf == "gate_up" else (down,)
            rows = shape[2] // len(names)
            found[source] = [
                [(f"{block}{inside}.experts.{number}.{name}.weight", 0, rows) for name in names]
                for number in range(shape[0])
            ]
        elif kind == "ernie4_5_moe" and module in _TURNED:
            name, order = f"{block}{_TURNED[module]}.{leaf}", _neighbors(config, shape[0])
            found[source] = [(name, row, row + 1) for row in order.argsort().tolist()]
    return found


def _split(source: str) -> tuple[str, str, str]:
    """The block's name in a folder, the module within it, and the name of its tensor."""
    _, _, inner = source.partition("layers.")
    number, _, module = inner.partition(".")
    name, _, leaf = module.rpartition(".")
    return f"model.layers.{number}.", name, leaf


def _experts(
    kind: str, to: str, leaf: str, source: str, shape: tuple[int, ...]
) -> Iterator[ExportedTensor]:
    gate, up, down = _NAMES[kind][1]
    features = shape[2] // 2 if leaf == "gate_up" else shape[2]
    parts = {gate: 0, up: 1} if leaf == "gate_up" else {down: 0}
    for number in range(shape[0]):
        for name, part in parts.items():
            yield ExportedTensor(
                f"{to}.{number}.{name}.weight", source, (features, shape[1]),
                partial(_expert, number, part * features, features),
            )  # fmt: skip


def _neighbors(config: ModelConfig, rows: int) -> Tensor:
    """Which row of the zoo's queries or keys each row is where neighbors are rotated together."""
    numbers = torch.arange(rows).view(-1, 2, Sizes.of(config).head_dim // 2)
    return numbers.transpose(1, 2).flatten()


def _expert(number: int, first: int, count: int, weight: Tensor) -> Tensor:
    """One expert's columns of ``[experts, in, out]`` as ``[count, in]``."""
    return weight[number, :, first : first + count].t()


def exported_config(config: ModelConfig, dtype: str, positions: int) -> dict[str, Any]:
    """``config.json`` of the exported model; arguments as :func:`.llama_form.exported_config`."""
    made, kind = llama_form.exported_config(config, dtype, positions), kind_of(config)
    del made["mlp_bias"]
    if kind == "mixtral":
        return made | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "intermediate_size": config.expert_width,
            "num_local_experts": config.experts,
            "num_experts_per_tok": config.top_k,
            "router_aux_loss_coef": config.auxiliary,
            "sliding_window": None,
        }
    if kind == "ernie4_5_moe":
        return made | {
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "model_type": kind,
            "use_bias": False,
            "moe_intermediate_size": config.expert_width,
            "moe_num_experts": config.experts,
            "moe_k": config.top_k,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 1,
            "moe_layer_end_index": -1,
            "router_aux_loss_coef": config.auxiliary,
        }
    head_dim, turned = Sizes.of(config).head_dim, rotary_size(config)
    shared = config.expert_width if config.shared_size is None else config.shared_size
    return made | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "moe_intermediate_size": config.expert_width,
        "n_routed_experts": config.experts,
        "n_shared_experts": shared // config.expert_width,
        "num_experts_per_tok": config.top_k,
        "first_k_dense_replace": config.dense_layers,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": None,
        "kv_lora_rank": config.latent_size or 4 * head_dim,
        "qk_nope_head_dim": head_dim - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": head_dim,
        "head_dim": turned,
        "rope_interleave": False,
    }
