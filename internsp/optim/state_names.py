"""What an optimizer's state consists of, known before its first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from internsp.optim.elementwise import OptimizerClass

State = dict[str, Any]


def first_state(like: Tensor, cls: OptimizerClass, settings: State) -> State:
    """The state that a first step would make for ``like``, from a step of a stand-in."""
    stand_in = torch.zeros_like(like)
    stand_in.grad = torch.zeros_like(stand_in)
    if like.dim() > 1:  # what divides by a matrix's norm, or inverts something made of it, may fail
        stand_in.grad += torch.linspace(0.5, 1.0, like.shape[-1], device=like.device)
    inner = cls([{**settings, "params": [stand_in]}])
    inner.step()
    return inner.state.get(stand_in, {})


class Names:
    """What the state of a group's parameters consists of, the same on all ranks.

    Attributes:
        slices: names of what has an element for each of the parameter's, with dtypes.
        values: names of the rest, as they are before the first step.
    """

    def __init__(self, like: Tensor, cls: OptimizerClass, settings: State) -> None:
        first = first_state(like, cls, settings)
        self.slices = {n: v.dtype for n, v in first.items() if is_like(v, like)}
        self.values = {n: v for n, v in first.items() if n not in self.slices}
        for name, value in self.values.items():  # nothing was stepped yet
            if isinstance(value, Tensor) and (value.dim() or name == "step"):
                self.values[name] = torch.zeros_like(value)
            elif name == "step":
                self.values[name] = 0


def is_like(value: Any, like: Tensor) -> bool:
    """Whether it has an element for each of ``like``'s."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == like.shape
