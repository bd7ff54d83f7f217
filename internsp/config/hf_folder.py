"""What the ``config.json`` of a model's folder says of its sizes, read without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "config.json"

# By key of the section model: what families call it, the usual name first.
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


def sizes(folder: str) -> tuple[dict[str, Any], str | None]:
    """Keys of the section ``model`` that the folder's ``config.json`` decides, and what is wrong.

    Sizes that it does not name are left out: :func:`missing` lists them.
    """
    path = Path(folder) / FILE
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        return {}, f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
    except json.JSONDecodeError as error:
        return {}, f"{path} is no JSON: {error}"
    if not isinstance(content, dict):
        return {}, f"{path} is no JSON object"
    inner = content.get("text_config")
    parts = [content, inner] if isinstance(inner, dict) else [content]
    return {
        key: value
        for key, names in _NAMES.items()
        if (value := _first(parts, names)) is not None
    }, None


def _first(parts: list[dict[str, Any]], names: tuple[str, ...]) -> int | bool | None:
    """The first that is one sensible number: a list has one for each layer, a null says nothing."""
    found = (part[name] for part in parts for name in names if name in part)
    return next((v for v in found if isinstance(v, int) and (v is False or 1 <= v < 1 << 24)), None)


def missing(found: Mapping[str, Any]) -> dict[str, str]:
    """Keys of ``model`` that must be given, because ``config.json`` has no such name."""
    return {key: " or ".join(_NAMES[key]) for key in _NEEDED if key not in found}
