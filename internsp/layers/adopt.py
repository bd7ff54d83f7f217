"""Make any module take its parameters by :mod:`internsp.layers.parameters`.

``torch.nn`` layers of a user's model become our layers in place (their identity, hooks and names
stay). Any other module with parameters gets hooks around its call, within which each of its own
parameters, once read, is one tensor to compute with, kept for the backward of the module's output.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from internsp.autograd import Given, given, own, refuse_compiled, tensors, transforming
from internsp.errors import StructureError
from internsp.layers.linear import ParallelEmbeddingWithCommExt, ParallelLinearWithCommExt
from internsp.layers.norm import ParallelLayerNorm, ParallelRMSNorm
from internsp.layers.parameters import Weights, leave

_OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: ParallelLinearWithCommExt,
    nn.Embedding: ParallelEmbeddingWithCommExt,
    nn.LayerNorm: ParallelLayerNorm,
    nn.RMSNorm: ParallelRMSNorm,
}


def adopt(name: str, module: nn.Module, scope: bool = False) -> None:
    """Prepare ``module`` (its own parameters only, not its children's), once.

    Args:
        scope: it is a block, or the model: its forward keeps its parameters by itself
            (:func:`internsp.layers.parameters.enclose`).
    """
    if getattr(type(module), "takes_whole", False):
        return
    # Pruned and normalised layers have other parameters, from which a hook makes the weight.
    if type(module) in _OURS and set(module._parameters) <= {"weight", "bias"}:
        if module._parameters.get("weight") is not None:
            module.__class__ = _OURS[type(module)]
            return
    if not scope:
        _Around(name, module)


class _Around:
    """The hooks around the call of a module that knows nothing of communicators."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._given: Given = {}
        module.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._end, with_kwargs=True, always_call=True)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        held = module._parameters
        if type(held) is not Weights:  # within a block that takes all its weights at its entry
            return
        if torch.compiler.is_compiling():
            refuse_compiled(self._name)
        if not transforming():  # else the block keeps them
            held.taken = {}
            self._given = given((args, kwargs))

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        held = module._parameters
        if type(held) is not Weights or held.taken is None:
            return None
        taken, held.taken = held.taken, None
        before, self._given = self._given, {}
        if not taken:
            return None
        if output is None and sys.exc_info()[1] is not None:  # a forward that failed
            for site in taken:
                if site.guarded:
                    site.release()
            return None
        if torch.is_grad_enabled() and any(site.guarded for site in taken):
            if not own(output, before) and not any(True for _ in tensors(output)):
                raise StructureError(
                    f"{self._name} returns a {type(output).__name__}, in which no tensor can be "
                    "found, so that its weights could not be kept for its backward: return "
                    "tensors, or tuples, lists, mappings or dataclasses of them"
                )
        return leave(taken, output, before)
