"""Make any module take its parameters through :func:`internsp.layers.access.whole`.

``torch.nn`` layers of a user's model become our layers in place (their identity, hooks and names
stay); any other module with parameters gets a subclass whose parameter attributes answer, inside
its own forward, with the tensor to compute with.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from internsp.errors import StructureError
from internsp.layers.access import guard, sites, whole
from internsp.layers.linear import ParallelEmbeddingWithCommExt, ParallelLinearWithCommExt
from internsp.layers.norm import ParallelLayerNorm, ParallelRMSNorm

_IN_USE = "_weights_in_use"
_OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: ParallelLinearWithCommExt,
    nn.LayerNorm: ParallelLayerNorm,
    nn.RMSNorm: ParallelRMSNorm,
}


def adopt(name: str, module: nn.Module) -> None:
    """Prepare ``module`` (its own parameters only, not its children's).

    Raises:
        StructureError: for options that a cut weight cannot honour.
    """
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        raise StructureError(
            f"embedding {name}: max_norm and sparse gradients change or bypass the cut table; "
            "build it without them"
        )
    if getattr(type(module), "takes_whole", False):
        return
    if type(module) in _OURS:
        module.__class__ = _OURS[type(module)]
    elif type(module) is nn.Embedding and not module.scale_grad_by_freq:
        module.__class__ = ParallelEmbeddingWithCommExt
    else:
        _subclass(module)


def _subclass(module: nn.Module) -> None:
    names = [n for n, p in module._parameters.items() if p is not None]
    if not names or _IN_USE in module.__dict__:
        return
    cls = type(module)
    members: dict[str, Any] = {name: _attribute(name) for name in names}
    module.__class__ = type(cls.__name__, (cls,), {**members, "__module__": cls.__module__})
    module.__dict__[_IN_USE] = None
    module.register_forward_pre_hook(_begin, prepend=True)
    module.register_forward_hook(_end, always_call=True)


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


def _end(module: nn.Module, args: Any, output: Any) -> None:
    in_use, module.__dict__[_IN_USE] = module.__dict__[_IN_USE], None
    if not in_use:
        return
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if isinstance(first, Tensor):
        guard(module, first)
    else:  # a failed forward, or an output without tensors: the use still ends here
        for site in sites(module).values():
            site.release()
