"""Attach the sequence group to a ``transformers`` model, in place."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from internsp.config import WeightParallelConfig
from internsp.hf.around import Around
from internsp.hf.attention import Kernel
from internsp.hf.examine import attentions, finds_documents, outermost, own_positions
from internsp.hf.forward import Entry
from internsp.mesh import ParallelMesh
from internsp.sp.exchange import Channel
from internsp.trace import Trace


def attach(
    model: nn.Module, mesh: ParallelMesh, trace: Trace, mean: bool, config: WeightParallelConfig
) -> None:
    """Cut what a ``transformers`` model inside ``model`` is given, from its next forward on.

    The model gets configs of its own, in which the attention has a name of its own; other models
    that were made from the same config are left alone. Does nothing to other models, and where the
    mesh cuts no sequences.
    """
    inner = outermost(model)
    if inner is None or mesh.sequence == 1:
        return
    _own_configs(model)
    channel = Channel.of(mesh.sequence_group, trace)
    by_kernel: dict[str, dict[nn.Module, str]] = {}
    for module, name in attentions(model).items():
        own: Any = module.config
        by_kernel.setdefault(own._attn_implementation, {})[module] = name
    around = None
    if mesh.ring_group is not None and mesh.ring > 1:
        ring = Channel.of(mesh.ring_group, trace)
        around = Around(ring, config.ring_form, config.inner_ring)
    shared = mesh.sequence > mesh.ring
    heads = Channel.of(mesh.heads_group, trace) if shared and mesh.heads_group else None
    kernels = [Kernel(names, kernel, heads, around) for kernel, names in by_kernel.items()]
    keys = {kernel.kernel: kernel.key for kernel in kernels}
    for own in _configs(model):
        now = own._attn_implementation_internal
        own._attn_implementation_internal = keys.get(now, now)
    of, finds = own_positions(inner), finds_documents(inner)
    Entry(inner, kernels, channel, mesh.sequence_axes, mean, of, finds, mesh.device)


def _configs(model: nn.Module) -> list[Any]:
    """Every config that a module holds, and those inside it."""
    from transformers import PretrainedConfig

    found = {id(c): c for m in model.modules() for c in vars(m).values()
             if isinstance(c, PretrainedConfig)}  # fmt: skip
    for config in list(found.values()):
        inside = {id(c): c for c in vars(config).values() if isinstance(c, PretrainedConfig)}
        found |= inside
    return list(found.values())


def _own_configs(model: nn.Module) -> None:
    from transformers import PretrainedConfig

    memo: dict[int, Any] = {}
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, PretrainedConfig):
                setattr(module, attribute, copy.deepcopy(value, memo))
