"""The zoo's families with experts as transformers' Mixtral and DeepSeek-V3: tensors and config.

Each expert is written under its own names, as the authors' folders have it. What is not in a block
with experts has the names of Llama (:mod:`.llama_form`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from internsp.config.model import ModelConfig
from internsp.model_zoo import llama_form
from internsp.model_zoo.common import Sizes
from internsp.model_zoo.deepseek import rotary_size
from internsp.model_zoo.llama_form import ExportedTensor

_DEEPSEEK = {
    "attention.wq": "self_attn.q_proj", "attention.wkv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.latent_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_up": "self_attn.kv_b_proj",
    "feed_forward.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "feed_forward.shared_experts.w3": "mlp.shared_experts.up_proj",
    "feed_forward.shared_experts.w2": "mlp.shared_experts.down_proj",
}  # fmt: skip
# Of the experts' gate, up and down projections.
_EXPERT = {"mixtral": ("w1", "w3", "w2"), "deepseek": ("gate_proj", "up_proj", "down_proj")}


def why_not(config: ModelConfig) -> str:
    """Why this model is no Mixtral or DeepSeek-V3 of transformers; empty if it is one."""
    if config.qkv_bias or config.bias:
        return "its linear layers have biases (model.qkv_bias, model.bias)"
    if config.family == "mixtral":
        if config.balance_rate:
            return "a bias chooses its experts (model.balance_rate), which Mixtral's have not"
        return ""
    shared = config.expert_width if config.shared_size is None else config.shared_size
    if not shared or shared % config.expert_width:
        return f"its shared experts ({shared} features) are no multiple of {config.expert_width}"
    return ""


def exported_tensors(
    config: ModelConfig, shapes: dict[str, tuple[int, ...]]
) -> Iterator[ExportedTensor]:
    """Every tensor of the exported model; arguments as :func:`.llama_form.exported_tensors`."""
    llama: dict[str, tuple[int, ...]] = {}
    for source, shape in shapes.items():
        _, _, inner = source.partition("layers.")
        number, _, module = inner.partition(".")
        name, _, kind = module.rpartition(".")
        block = f"model.layers.{number}."
        mixture = f"{block}{'mlp' if config.family == 'deepseek' else 'block_sparse_moe'}"
        if name == "feed_forward.experts":
            yield from _experts(config, f"{mixture}.experts", kind, source, shape)
        elif name == "feed_forward.router":
            to = "gate.weight" if kind == "weight" else "gate.e_score_correction_bias"
            yield ExportedTensor(f"{mixture}.{to}", source, shape, _same)
        elif config.family == "deepseek" and name in _DEEPSEEK:
            yield ExportedTensor(f"{block}{_DEEPSEEK[name]}.{kind}", source, shape, _same)
        else:
            llama[source] = shape
    yield from llama_form.exported_tensors(config, llama)


def _experts(
    config: ModelConfig, to: str, kind: str, source: str, shape: tuple[int, ...]
) -> Iterator[ExportedTensor]:
    gate, up, down = _EXPERT[config.family]
    features = shape[2] // 2 if kind == "gate_up" else shape[2]
    parts = {gate: 0, up: 1} if kind == "gate_up" else {down: 0}
    for number in range(shape[0]):
        for name, part in parts.items():
            yield ExportedTensor(
                f"{to}.{number}.{name}.weight", source, (features, shape[1]),
                partial(_expert, number, part * features, features),
            )  # fmt: skip


def _expert(number: int, first: int, count: int, weight: Tensor) -> Tensor:
    """One expert's columns of ``[experts, in, out]`` as ``[count, in]``."""
    return weight[number, :, first : first + count].t()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def exported_config(config: ModelConfig, dtype: str, positions: int) -> dict[str, Any]:
    """``config.json`` of the exported model; arguments as :func:`.llama_form.exported_config`."""
    made = llama_form.exported_config(config, dtype, positions)
    del made["mlp_bias"]
    if config.family == "mixtral":
        return made | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "intermediate_size": config.expert_width,
            "num_local_experts": config.experts,
            "num_experts_per_tok": config.top_k,
            "router_aux_loss_coef": config.auxiliary,
            "sliding_window": None,
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
