"""Attach the sequence group to a ``transformers`` model, in place."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from internsp.mesh import ParallelMesh
from internsp.sp.exchange import ExchangeGroup
from internsp.sp.hf.attention import SequenceParallelKernel
from internsp.sp.hf.examine import attentions, find_pretrained_model
from internsp.sp.hf.forward import ForwardHooks
from internsp.sp.ring import RingGroup


def attach(
    model: nn.Module, mesh: ParallelMesh, mean: bool, group: ExchangeGroup,
    heads: ExchangeGroup | None, ring: RingGroup | None,
) -> None:  # fmt: skip
    """Shard the inputs of a ``transformers`` model in ``model``, from its next forward on.

    The model gets copies of its configs, which name an attention implementation of this model
    alone; other models made from the same config do not change. Does nothing without a
    ``transformers`` model.

    Args:
        mean: gradients are averaged over ranks later, not summed.
        group: the sequence group.
        heads, ring: see :class:`SequenceParallelKernel`.
    """
    inner = find_pretrained_model(model)
    if inner is None:
        return
    configs = copy_configs(model)
    by_kernel: dict[str, dict[nn.Module, str]] = {}
    for module, name in attentions(model).items():
        own: Any = module.config
        by_kernel.setdefault(own._attn_implementation, {})[module] = name
    kernels = [
        SequenceParallelKernel(names, kernel, heads, ring) for kernel, names in by_kernel.items()
    ]
    keys = {kernel.plain_name: kernel.registered_name for kernel in kernels}
    for own in configs:
        now = own._attn_implementation_internal
        own._attn_implementation_internal = keys.get(now, now)
    ForwardHooks(inner, kernels, group, mesh, mean)


def copy_configs(model: nn.Module) -> list[Any]:
    """Give ``model`` configs of its own, so that what is set there changes no other model; returns
    these and the configs inside them."""
    from transformers import PretrainedConfig

    memo: dict[int, Any] = {}
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, PretrainedConfig):
                setattr(module, attribute, copy.deepcopy(value, memo))
    return [config for config in memo.values() if isinstance(config, PretrainedConfig)]
