"""Puts ``fully_shard`` in torch's place, for programs whose source one does not want to touch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import wraps
from typing import Any

from torch import nn
from torch.distributed import fsdp as torchs

from internsp.base.replaced import replace_everywhere
from internsp.config import WeightParallelConfig
from internsp.errors import ConfigError
from internsp.fsdp.attach import OPTIONS, attached_to
from internsp.fsdp.module import (
    fully_shard,
    parts_of,
    register_fsdp_forward_method,
    torch_fully_shard,
    torch_register,
)

_CHOOSE = (
    "overlap", "memory_pool", "prefetch_depth", "gather_before", "near_ranks", "reduce",
    "keep_unsharded", "accumulation", "coalesce_bytes", "reductions_in_flight", "unexpected_order",
    "compile", "quantize",
)  # fmt: skip
"""Keys of ``weight_parallel`` that a call of ``fully_shard`` does not decide."""


def options(model: nn.Module, **chosen: Any) -> None:
    """Choose, before the first forward, what FSDP2 has no word for: keys of
    :class:`internsp.WeightParallelConfig`, such as ``prefetch_depth``, ``gather_before``
    (``"qkv"``, the blocks' entry, or ``"rolling"``), ``quantize`` or ``compile``.

    Args:
        model: the root, the module that the program calls.

    Raises:
        ConfigError: a key is unknown, is what ``fully_shard`` says, or comes too late.
    """
    _check(chosen)
    if attached_to(model) is not None:
        raise ConfigError("internsp.fsdp.options: call it before the first forward, which plans")
    vars(model)[OPTIONS] = {**vars(model).get(OPTIONS, {}), **chosen}


def _check(chosen: Mapping[str, Any]) -> None:
    if wrong := sorted(chosen.keys() - {*_CHOOSE}):
        raise ConfigError(
            f"internsp.fsdp.options: {', '.join(wrong)}: fully_shard's arguments and the policies "
            f"say that; the keys are {', '.join(_CHOOSE)}"
        )
    if chosen.get("gather_before", "qkv") not in ("qkv", "rolling"):
        raise ConfigError(
            'internsp.fsdp.options: gather_before is "qkv" (the entry of each unit) or "rolling"'
        )
    WeightParallelConfig(**chosen)


def install(**chosen: Any) -> None:
    """Let ``torch.distributed.fsdp.fully_shard`` be the library's, in all modules that hold it.

    Tells so on the first rank. ``chosen`` are :func:`options` of every model, with its errors.
    """
    _check(chosen)
    uninstall()

    @wraps(torch_fully_shard)
    def installed(module: Any, **given: Any) -> Any:
        made = fully_shard(module, **given)
        for part in parts_of(made):
            part.__dict__.setdefault(OPTIONS, chosen)
        return made

    installed.of_internsp = True  # type: ignore[attr-defined]
    places = [replace_everywhere(old, new) for old, new in _replaced(installed)]
    if os.environ.get("RANK", "0") == "0":
        where = ", ".join(places[0])
        sys.stderr.write(f"internsp.fsdp: fully_shard of {where} is internsp's\n")


def uninstall() -> None:
    """Let torch's ``fully_shard`` be torch's again; does nothing if it is."""
    now: Any = torchs.fully_shard
    if getattr(now, "of_internsp", False):
        for old, new in _replaced(now):
            replace_everywhere(new, old)


def _replaced(installed: Any) -> list[tuple[Any, Any]]:
    """Torch's functions, and what takes their places."""
    from internsp.fsdp.pipelines import input_backward, stage_backward_input  # loads seconds

    return [
        (torch_fully_shard, installed),
        (torch_register, register_fsdp_forward_method),
        (stage_backward_input, input_backward),
    ]
