"""Make any module take its parameters through :func:`internsp.layers.access.whole`.

``torch.nn`` layers of a user's model become our layers in place (their identity, hooks and names
stay); any other module with parameters gets a subclass whose parameter attributes answer, inside
its own forward, with the tensor to compute with.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from internsp.errors import StructureError
from internsp.layers.access import guard_sites, sites, whole
from internsp.layers.linear import ParallelEmbeddingWithCommExt, ParallelLinearWithCommExt
from internsp.layers.norm import ParallelLayerNorm, ParallelRMSNorm
from internsp.wp.communicator import tensors

_IN_USE = "_weights_in_use"
_OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: ParallelLinearWithCommExt,
    nn.Embedding: ParallelEmbeddingWithCommExt,
    nn.LayerNorm: ParallelLayerNorm,
    nn.RMSNorm: ParallelRMSNorm,
}


def adopt(name: str, module: nn.Module) -> None:
    """Prepare ``module`` (its own parameters only, not its children's).

    Raises:
        StructureError: for options that a cut weight cannot honour.
    """
    if isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.sparse or module.scale_grad_by_freq
    ):
        raise StructureError(
            f"embedding {name}: max_norm, sparse gradients and scale_grad_by_freq need the whole "
            "table or the whole batch in one place; build it without them"
        )
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        raise StructureError(
            f"{name} is a {type(module).__name__}, which reads weights past its modules' forward: "
            "write it with linear layers"
        )
    if getattr(type(module), "takes_whole", False):
        return
    if type(module) in _OURS:
        module.__class__ = _OURS[type(module)]
    else:
        _subclass(name, module)


def _subclass(full_name: str, module: nn.Module) -> None:
    names = [n for n, p in module._parameters.items() if p is not None]
    if not names or _IN_USE in module.__dict__:
        return
    cls = type(module)
    members: dict[str, Any] = {name: _attribute(name) for name in names}
    module.__class__ = type(cls.__name__, (cls,), {**members, "__module__": cls.__module__})
    module.__dict__[_IN_USE] = None
    module.register_forward_pre_hook(_begin, prepend=True)
    module.register_forward_hook(partial(_end, full_name), with_kwargs=True, always_call=True)


def _attribute(name: str) -> property:
    def get(self: nn.Module) -> Any:
        in_use = self.__dict__.get(_IN_USE)
        if in_use is None:
            return self._parameters[name]
        if name not in in_use:  # one view, one birth and one reduction a forward
            in_use[name] = whole(self, name)
        return in_use[name]

    def set_(self: nn.Module, value: Any) -> None:
        self._parameters[name] = value

    return property(get, set_)


def _begin(module: nn.Module, args: Any) -> None:
    module.__dict__[_IN_USE] = {}


def _end(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    in_use, module.__dict__[_IN_USE] = module.__dict__[_IN_USE], None
    taken = [n for n in in_use or () if isinstance(module._parameters[n], DTensor)]
    used = [sites(module)[n] for n in taken]
    guard_sites(used, output, (args, kwargs))  # of a forward that failed, too: the use ends here
    if torch.is_grad_enabled() and any(site.guarded for site in used):
        failed = output is None and sys.exc_info()[1] is not None
        if not failed and not any(True for _ in tensors(output)):
            raise StructureError(
                f"{name} returns a {type(output).__name__}, in which no tensor can be found, so "
                "that its weights could not be kept for its backward: return tensors, or tuples, "
                "lists, mappings or dataclasses of them"
            )
