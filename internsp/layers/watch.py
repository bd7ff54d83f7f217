"""What a user may do to a parallel model later, and what would go wrong in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from internsp.autograd import compiled
from internsp.errors import GradientError, StructureError
from internsp.layers.supported import is_compiled

_tensor: Any = torch.Tensor
_hooks = _tensor._backward_hooks.__get__
_accumulated = _tensor._post_accumulate_grad_hooks.__get__
_plainly: Any = torch._C._disabled_torch_function_impl  # (function, types, arguments, options)


class Member(Protocol):
    """A parameter that ``parallelize`` has made."""

    name: str
    parameter: nn.Parameter


def require_no_gradient_hooks(
    model: nn.Module, members: Sequence[Member]
) -> Callable[..., None]:
    """A forward pre-hook of ``model`` that refuses what would run past communication.

    Args:
        members: the parameters that ``parallelize`` has made.
    """
    first = [True]

    def look(*_: Any) -> None:
        if first:  # later ones are found where they are entered
            for name, module in model.named_modules():
                if is_compiled(module):
                    raise compiled(name or "the model")
            first.clear()
        for member in members:
            # Past __torch_function__, by which every read of a parameter's attribute goes.
            given = (member.parameter,)
            if _plainly(_hooks, (), given, {}) or _plainly(_accumulated, (), given, {}):
                raise GradientError(
                    f"{member.name} has a gradient hook, which autograd would call without a "
                    "gradient: that exists when its reduction is finished, after backward. Remove "
                    "the hook and read .grad when backward() has returned, or hook the modules' "
                    "outputs"
                )

    return look


def refuse_optimizer(optimizer: torch.optim.Optimizer, ours: Iterable[nn.Parameter]) -> None:
    """Before an optimizer's step.

    Raises:
        StructureError: it lays all parameters in one vector, which shards cannot be.
    """
    if not isinstance(optimizer, torch.optim.LBFGS):
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(id(parameter) in stepped for parameter in ours):
        raise StructureError(
            "torch.optim.LBFGS lays all parameters in one vector, which parameters sharded over "
            "ranks cannot be: use an optimizer that works parameter by parameter (AdamW, SGD, ...)"
        )
