"""Kinds of blocks: later blocks may differ from the first, as experts do from what is dense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from internsp.app.config import Config


def block_kinds(config: Config, model: Any) -> tuple[int, ...]:
    """For each block, the first one of its kind, which has the same modules and shapes.

    Blocks of transformers' models are taken to be of one kind.

    Args:
        model: that of the configuration.
    """
    if config.model.family == "hf":
        return (0,) * config.model.layers
    first: dict[object, int] = {}
    kinds = []
    for number, block in enumerate(model.layers):
        modules = tuple((name, type(module)) for name, module in block.named_modules())
        weights = tuple((name, weight.shape) for name, weight in block.named_parameters())
        kinds.append(first.setdefault((modules, weights), number))
    return tuple(kinds)


def shown_kinds(kinds: Sequence[int]) -> tuple[int, ...]:
    """Those of a step that stands for one of blocks of these kinds: each of them once, the last
    block's at the end, and two at least."""
    found = tuple(dict.fromkeys(reversed(kinds)))[::-1]
    return found if len(found) > 1 else 2 * found
