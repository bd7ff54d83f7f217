"""Model sizes from the ``config.json`` of a model's folder, read without transformers.

The folder is a model of transformers itself (family ``hf``), or gives a model of the zoo its sizes
and weights. For the zoo it is a Llama, an InternLM2 as its authors publish it, a Mixtral, an
ERNIE 4.5 whose every block has experts and none shared, or a DeepSeek-V3 as the zoo exports it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from internsp.config.keys import FolderNumber

FILE = "config.json"

# By key of the section model: its names in families of transformers, the usual one first.
_NAMES: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff"),
    "tie_embeddings": ("tie_word_embeddings",),
}
_NEEDED = ("vocab_size", "hidden_size", "layers", "heads")
# Values of model_type that the zoo's families can read.
_ZOO = {
    "llama": ("llama",), "internlm2": ("llama", "internlm2"),
    "mixtral": ("mixtral", "ernie4_5_moe"), "deepseek": ("deepseek_v3",),
}  # fmt: skip
# Sizes that only models with experts have: names in config.json by key of the section model.
_OF_EXPERTS = {
    "mixtral": {"experts": "num_local_experts", "top_k": "num_experts_per_tok"},
    "ernie4_5_moe": {
        "experts": "moe_num_experts", "top_k": "moe_k",
        "intermediate_size": "moe_intermediate_size",  # no block has a dense feed forward
    },
    "deepseek_v3": {
        "experts": "n_routed_experts", "top_k": "num_experts_per_tok",
        "expert_size": "moe_intermediate_size", "dense_layers": "first_k_dense_replace",
        "latent_size": "kv_lora_rank", "rotary_size": "qk_rope_head_dim",
    },
}  # fmt: skip
# Their rope_theta and rms_norm_eps where config.json leaves them out.
_DEFAULTS = {"mixtral": (1e6, 1e-5), "ernie4_5_moe": (5e5, 1e-5)}


def sizes(folder: str, family: str) -> tuple[dict[str, Any], str | None]:
    """Values of keys of ``[model]`` from the folder's ``config.json``, and what is wrong with it.

    Sizes that the file does not have are left out: :func:`missing` lists them.

    Args:
        family: ``model.family``.
    """
    content, mistake = _read(Path(folder) / FILE)
    if mistake is not None:
        return {}, mistake
    inner = content.get("text_config")
    parts = [content, inner] if isinstance(inner, dict) else [content]
    found: dict[str, Any] = {
        key: value
        for key, names in _NAMES.items()
        if (value := _first(parts, names)) is not None
    }
    if family in _ZOO:
        found |= _of_zoo(content)
        mistake = _not_of_zoo(content, family)
    return found, mistake and f"{Path(folder) / FILE}: {mistake}"


def kind(folder: str) -> str:
    """``model_type`` of a folder, which :func:`sizes` has checked."""
    return str(_read(Path(folder) / FILE)[0].get("model_type"))


def _read(path: Path) -> tuple[dict[str, Any], str | None]:
    try:
        content = json.loads(path.read_bytes())
    except (json.JSONDecodeError, RecursionError) as error:
        return {}, f"{path} is no JSON: {error}"
    except (OSError, ValueError) as error:  # not UTF-8, or a NUL in the path
        return {}, f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
    return (content, None) if isinstance(content, dict) else ({}, f"{path} is no JSON object")


def _rope(content: dict[str, Any]) -> dict[str, Any]:
    """Settings of the rotary embedding, from both keys that transformers has used for them."""
    parts = (content.get("rope_parameters"), content.get("rope_scaling"))
    return {k: v for part in parts if isinstance(part, dict) for k, v in part.items()}


def _of_zoo(content: dict[str, Any]) -> dict[str, Any]:
    """Keys that only the zoo's families read; transformers' defaults for missing ones."""
    kind, given = content.get("model_type"), content.get
    found = {**_numbers(content), "qkv_bias": bool(given("attention_bias")), **_of_experts(content)}
    if kind == "ernie4_5_moe":
        found["tie_embeddings"] = given("tie_word_embeddings") is not False
    if kind == "deepseek_v3":
        parts = (given(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
        found["head_dim"] = FolderNumber(sum(part for part in parts if isinstance(part, int)))
        shared = given("n_shared_experts")
        if isinstance(shared, int) and "expert_size" in found:
            found["shared_size"] = FolderNumber(shared * found["expert_size"])
    return found


def _of_experts(content: dict[str, Any]) -> dict[str, FolderNumber]:
    names = _OF_EXPERTS.get(str(content.get("model_type")), {})
    given = {key: content.get(name) for key, name in names.items()}
    return {
        key: FolderNumber(value) for key, value in given.items()
        if type(value) is int and 0 <= value < 1 << 24
    }  # fmt: skip


def _numbers(content: dict[str, Any]) -> dict[str, float]:
    """The numbers that are in a sensible range."""
    base, eps = _DEFAULTS.get(str(content.get("model_type")), (1e4, 1e-6))
    theta = _rope(content).get("rope_theta", content.get("rope_theta", base))
    found = {
        "rope_theta": _number(theta, 1, 1e15),
        "norm_eps": _number(content.get("rms_norm_eps", eps), 1e-30, 1),
    }
    return {key: value for key, value in found.items() if value is not None}


def _number(value: Any, least: float, most: float) -> float | None:
    sensible = isinstance(value, int | float) and least <= value <= most
    return float(value) if sensible else None


def _not_of_zoo(content: dict[str, Any], family: str) -> str | None:
    """Why the folder is no model of this family of the zoo; ``None`` if it is."""
    rope, kinds = _rope(content), _ZOO[family]
    turn = rope.get("rope_type", rope.get("type", "default"))
    wrong = {
        f'model_type is {json.dumps(content.get("model_type"))}, model.family = "{family}" reads '
        f"{' and '.join(kinds)}": content.get("model_type") not in kinds,
        f"hidden_act is {content.get('hidden_act')}, not silu":
            content.get("hidden_act", "silu") != "silu",
        f"its rotary embedding is scaled ({turn})":
            turn != "default" and rope.get("factor") != 1.0,
        "its weights are quantized": content.get("quantization_config") is not None,
        "it has biases in its feed forward": content.get("mlp_bias") or content.get("bias"),
        "it does not say intermediate_size": not isinstance(content.get("intermediate_size"), int),
        "its rope_theta or its rms_norm_eps is no sensible number": len(_numbers(content)) < 2,
        **_not_of_experts(content),
    }  # fmt: skip
    why = next((text for text, applies in wrong.items() if applies), None)
    return why and f'{why}; set model.family = "hf"'


def _not_of_experts(content: dict[str, Any]) -> dict[str, bool]:
    """What a model with experts may not have, each with whether this one has it."""
    kind, given = str(content.get("model_type")), content.get
    found = _of_experts(content)
    wrong = {
        f"it does not say {name}": key not in found
        for key, name in _OF_EXPERTS.get(kind, {}).items()
    }
    if kind == "mixtral":
        wrong["its attention has a sliding window"] = given("sliding_window") is not None
    if kind == "ernie4_5_moe":
        last = (-1, None, (given("num_hidden_layers") or 0) - 1)
        wrong |= {
            "it has biases (use_bias)": bool(given("use_bias")),
            "it has shared experts": given("moe_num_shared_experts") != 0,
            "not each of its blocks has experts": given("moe_layer_start_index") != 0
            or given("moe_layer_interval", 1) != 1 or given("moe_layer_end_index") not in last,
        }  # fmt: skip
    if kind == "deepseek_v3":
        values = given("qk_nope_head_dim"), given("qk_rope_head_dim"), given("v_head_dim")
        nope, rope, value = (v if type(v) is int else 0 for v in values)
        wrong |= {
            "its linear layers have biases": bool(given("attention_bias")),
            "its queries have a latent vector (q_lora_rank)": given("q_lora_rank") is not None,
            "its values are not as wide as its keys": not value or value != nope + rope,
            "its rotary embedding is interleaved": given("rope_interleave") is not False,
            "its experts are in groups": given("n_group") != 1,
            "its shared experts are none, or it does not say their number":
                not isinstance(given("n_shared_experts"), int) or not given("n_shared_experts"),
            "it scales or does not normalize its experts' weights":
                given("routed_scaling_factor") != 1 or given("norm_topk_prob") is False,
        }  # fmt: skip
    return wrong


def _first(parts: list[dict[str, Any]], names: tuple[str, ...]) -> int | bool | None:
    """The first value that is a sensible number: not a list (one for each layer) or a null."""
    found = (part[name] for part in parts for name in names if name in part)
    return next((v for v in found if isinstance(v, int) and (v is False or 1 <= v < 1 << 24)), None)


def missing(found: Mapping[str, Any]) -> dict[str, str]:
    """Keys of ``[model]`` that the user must set because ``config.json`` lacks them."""
    return {key: " or ".join(_NAMES[key]) for key in _NEEDED if key not in found}
