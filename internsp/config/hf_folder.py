"""Model sizes from the ``config.json`` of a model's folder, read without transformers.

The folder is a model of transformers itself (family ``hf``), or gives a model of the zoo its sizes
and weights. For the zoo it is a Llama, or an InternLM2 as its authors publish it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
_ZOO = {"llama": ("llama",), "internlm2": ("llama", "internlm2")}


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
        content = json.loads(path.read_text())
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
    return {
        **_numbers(content),
        "qkv_bias": bool(content.get("attention_bias")),
    }


def _numbers(content: dict[str, Any]) -> dict[str, float]:
    """The numbers that are in a sensible range."""
    theta = _rope(content).get("rope_theta", content.get("rope_theta", 10000.0))
    found = {
        "rope_theta": _number(theta, 1, 1e15),
        "norm_eps": _number(content.get("rms_norm_eps", 1e-6), 1e-30, 1),
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
    }  # fmt: skip
    why = next((text for text, applies in wrong.items() if applies), None)
    return why and f'{why}; set model.family = "hf"'


def _first(parts: list[dict[str, Any]], names: tuple[str, ...]) -> int | bool | None:
    """The first value that is a sensible number: not a list (one for each layer) or a null."""
    found = (part[name] for part in parts for name in names if name in part)
    return next((v for v in found if isinstance(v, int) and (v is False or 1 <= v < 1 << 24)), None)


def missing(found: Mapping[str, Any]) -> dict[str, str]:
    """Keys of ``[model]`` that the user must set because ``config.json`` lacks them."""
    return {key: " or ".join(_NAMES[key]) for key in _NEEDED if key not in found}
