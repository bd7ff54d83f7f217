"""Casts the inputs and outputs of single modules to the dtypes that rules of the plan set.

The model's own floating inputs are cast to ``weight_parallel.compute_dtype``. A rule with a
``compute_dtype`` makes some modules compute in another dtype than their neighbors. If there is such
a rule, the floating inputs of every block, every matched module and the head are cast to the dtype
in which it computes; the floating outputs of a matched module are cast to the rule's
``output_dtype`` (like FSDP2's ``MixedPrecisionPolicy`` of a module). ``cast_inputs`` turns casts of
inputs off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _apply_to_tensors  # through dataclasses, too

from internsp.config import WeightParallelConfig
from internsp.errors import ConfigError
from internsp.structure.blocks import Structure
from internsp.structure.dtypes import DTYPES

_KEYS = {"compute_dtype", "output_dtype", "cast_inputs"}


@dataclass(frozen=True)
class ModuleCasts:
    """Dtypes to which a module's floating inputs and outputs are cast; ``None``: no cast."""

    name: str
    module: nn.Module
    inputs: torch.dtype | None
    outputs: torch.dtype | None


def find_casts(
    model: nn.Module, structure: Structure, config: WeightParallelConfig
) -> Sequence[ModuleCasts]:
    """The casts of ``model``'s inputs, and those that rules set for its modules; outer ones first.

    Raises:
        ConfigError: a module to cast is inside a compiled block.
    """
    found = []
    if config.compute_dtype is not None and config.cast_inputs:
        found.append(ModuleCasts("", model, DTYPES[config.compute_dtype], None))
    rules = structure.rules
    matched = {
        name: matched_rule
        for matched_rule in rules.matched
        if _KEYS & matched_rule.rule.options().keys()
        for name in matched_rule.outermost()
        if name in matched_rule.modules
    }
    if not matched:
        return found
    blocks = [block.name for block in structure.blocks]
    head = [structure.head[0]] if structure.head is not None else []
    for name, module in model.named_modules():
        if name not in matched and name not in blocks and name not in head:
            continue
        if config.compile and any(name.startswith(f"{block}.") for block in blocks):
            raise ConfigError(
                f"{matched[name]}: inputs and outputs of {name} are cast inside a block that "
                "weight_parallel.compile compiles, where no hook of ours may run (WP-13): cast in "
                "the module's own forward, or set compile = false"
            )
        own = rules.of_module(name).options_for([name], _KEYS)
        takes = own.get("cast_inputs", config.cast_inputs)
        output = own.get("output_dtype")
        found.append(
            ModuleCasts(
                name,
                module,
                _compute_dtype(name, module, structure, config) if takes else None,
                DTYPES[output] if output else None,
            )
        )
    return [casts for casts in found if casts.inputs or casts.outputs]


def _compute_dtype(
    name: str, module: nn.Module, structure: Structure, config: WeightParallelConfig
) -> torch.dtype | None:
    """Dtype in which a module's weights are gathered: a rule's, the option's, or their only one."""
    options = structure.rules.options_for([name], {"compute_dtype"})
    named = options.get("compute_dtype", config.compute_dtype)
    if named:
        return DTYPES[named]
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else None


def register_casts(found: Sequence[ModuleCasts]) -> None:
    """Register the hooks that cast, outside of those of
    :func:`internsp.modules.hooks.register_hooks`.

    They run outside of a checkpoint, so that a recompute starts from inputs that are already cast.
    """
    for casts in found:
        if casts.inputs is not None:
            before = partial(_cast_inputs, casts.inputs)
            casts.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        if casts.outputs is not None:
            after = partial(_cast_outputs, casts.outputs)
            casts.module.register_forward_hook(after)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _apply_to_tensors(partial(_cast, dtype), (args, kwargs))


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return _apply_to_tensors(partial(_cast, dtype), output)


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
