"""What an optimizer keeps in its ``param_groups``: a count of steps, the weights of averages.

apex's ``FusedAdam`` counts its steps there, schedule-free optimizers keep ``k``, ``weight_sum``,
``lr_max`` and ``train_mode``. Every bucket has an optimizer of its own, but the groups of the
``ZeroOptimizer`` have this state: each inner optimizer gets a copy of it before its step, and an
optimizer of one stand-in makes the same step to find the next values. They are the same on all
ranks, whatever slices these have, and need no communication; ``state_dict`` has them as torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from internsp.base.stand_in import (
    OptimizerClass,
    State,
    copied,
    is_torchs_own,
    settings_of,
    start_training,
)

_STEPS = 12  # as in the experiment of :mod:`internsp.optim.elementwise`


def kept_in_group(cls: OptimizerClass, settings: Mapping[str, Any], like: Tensor) -> State:
    """What ``cls`` changes in its group, with the values before the first step; found by steps.

    A class of torch's own changes nothing, and is not stepped.

    Args:
        like: a tensor that it can step.

    Raises:
        TypeError: its first step adds something of which the value before is not known.
    """
    tensor = like.clone()
    made = cls([{**copied(settings), "params": [tensor]}])
    if is_torchs_own(cls):
        return {}  # it keeps all by parameter
    first = copied(settings_of(made.param_groups[0]))
    start_training(made)
    changed: dict[str, Any] = {}
    for _ in range(_STEPS):
        tensor.grad = torch.ones_like(tensor)
        made.step()
        now = settings_of(made.param_groups[0])
        changed |= {n: v for n, v in now.items() if n not in first or not _same(first[n], v)}
    return {n: first[n] if n in first else _zero(cls, n, v) for n, v in changed.items()}


def stepped(
    cls: OptimizerClass, settings: Mapping[str, Any], names: Iterable[str], like: Tensor, used: bool
) -> State:
    """The values of ``names`` after a step of a group with ``settings``.

    Args:
        like: a tensor that ``cls`` can step.
        used: whether some parameter of the group had a gradient.
    """
    tensor = like.clone()
    made = cls([{**copied(settings), "params": [tensor]}])
    if used:
        tensor.grad = torch.ones_like(tensor)
    made.step()
    group = made.param_groups[0]
    return {name: group[name] for name in names}


def switched(
    cls: OptimizerClass, settings: Mapping[str, Any], names: Iterable[str], like: Tensor, mode: str
) -> State:
    """The values of ``names`` that the optimizer's ``train()`` or ``eval()`` changes."""
    made = cls([{**copied(settings), "params": [like.clone()]}])
    call = getattr(made, mode, None)
    if callable(call):
        call()
    group = made.param_groups[0]
    return {name: group[name] for name in names if not _same(group[name], settings[name])}


def _zero(cls: OptimizerClass, name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, bool | int | float):
        return type(value)(0)
    raise TypeError(
        f"{getattr(cls, '__name__', cls)} adds {name!r} (a {type(value).__name__}) to its "
        "param_groups in its first step, and its value before that is not known, so that it could "
        "not be saved: give it one among the class's defaults"
    )


def _same(one: Any, other: Any) -> bool:
    """Whether two settings are equal, tensors in them by value."""
    (left, of_left), (right, of_right) = tree_flatten(one), tree_flatten(other)
    return of_left == of_right and all(
        torch.equal(a, b)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b)
        for a, b in zip(left, right, strict=True)
    )
