"""Inputs and outputs of single modules, cast to what rules of the plan say of them.

A rule with a ``compute_dtype`` has some modules compute in another dtype than those around them.
So where there is one, every block, every matched module and the head take their floating inputs in
the dtype that they compute in, unless ``cast_inputs`` is false; a matched module's floating outputs
take its rule's ``output_dtype`` (as FSDP2's ``MixedPrecisionPolicy`` of each module). Without such
a rule no hook is registered, and the model's own inputs alone are cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from internsp.config import WeightParallelConfig
from internsp.errors import ConfigError
from internsp.plan.blocks import Structure
from internsp.plan.dtypes import DTYPES

_KEYS = {"compute_dtype", "output_dtype", "cast_inputs"}


@dataclass(frozen=True)
class Casts:
    """Of one module: what its floating inputs and outputs are cast to; ``None``: they stay."""

    name: str
    module: nn.Module
    inputs: torch.dtype | None
    outputs: torch.dtype | None


def find_casts(
    model: nn.Module, structure: Structure, config: WeightParallelConfig
) -> Sequence[Casts]:
    """What rules say of the modules of ``model``; outer modules first.

    Raises:
        ConfigError: of a module inside a compiled block.
    """
    rules = structure.rules
    matched = {
        name: caught
        for caught in rules.caught
        if _KEYS & caught.rule.said().keys()
        for name in caught.outermost()
        if name in caught.modules
    }
    if not matched:
        return ()
    blocks = [name for block in structure.blocks for name, _ in block.modules]
    beside = [structure.head[0]] if structure.head is not None else []
    found = []
    for name, module in model.named_modules():
        if name not in matched and name not in blocks and name not in beside:
            continue
        if config.compile and any(name.startswith(f"{block}.") for block in blocks):
            raise ConfigError(
                f"{matched[name]}: inputs and outputs of {name} are cast inside a block that "
                "weight_parallel.compile compiles, where no hook of ours may run (WP-13): cast in "
                "the module's own forward, or set compile = false"
            )
        own = rules.of_module(name, _KEYS)
        takes = own.get("cast_inputs", config.cast_inputs)
        output = own.get("output_dtype")
        found.append(
            Casts(
                name,
                module,
                _computes_in(name, module, structure, config) if takes else None,
                DTYPES[output] if output else None,
            )
        )
    return [casts for casts in found if casts.inputs or casts.outputs]


def _computes_in(
    name: str, module: nn.Module, structure: Structure, config: WeightParallelConfig
) -> torch.dtype | None:
    """What a module's weights are gathered in, by rule, by option or as they are, if all alike."""
    said = structure.rules.say([name], {"compute_dtype"})
    named = said.get("compute_dtype", config.compute_dtype)
    if named:
        return DTYPES[named]
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else None


def register_casts(found: Sequence[Casts]) -> list[RemovableHandle]:
    """Register their hooks, around those that :func:`internsp.wp.hooks.register_hooks` has made.

    Outside of a checkpoint, so that a recompute starts from inputs that are cast already.
    """
    handles: list[RemovableHandle] = []
    for casts in found:
        if casts.inputs is not None:
            before = partial(_cast_inputs, casts.inputs)
            handles.append(
                casts.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            )
        if casts.outputs is not None:
            after = partial(_cast_outputs, casts.outputs)
            handles.append(casts.module.register_forward_hook(after))
    return handles


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(Tensor, partial(_cast, dtype), (args, kwargs))


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return tree_map_only(Tensor, partial(_cast, dtype), output)


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
