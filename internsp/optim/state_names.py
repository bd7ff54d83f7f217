"""Names and dtypes of an optimizer's state, found before its first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from internsp.optim.elementwise import OptimizerClass
from internsp.optim.group_state import make_stand_in

State = dict[str, Any]


def first_state(like: Tensor, cls: OptimizerClass, settings: State) -> State:
    """The state that a first step would make for ``like``, from a step of a stand-in."""
    stand_in = torch.zeros_like(like)
    stand_in.grad = torch.zeros_like(stand_in)
    if like.dim() > 1:  # not zero: some divide by a matrix's norm or invert a product of it
        stand_in.grad += torch.linspace(0.5, 1.0, like.shape[-1], device=like.device)
    inner = make_stand_in(cls, settings, [stand_in])
    inner.step()
    return inner.state.get(stand_in, {})


class StateNames:
    """What the state of a group's parameters consists of, the same on all ranks.

    Attributes:
        slices: names and dtypes of the states with one element for each element of the parameter.
        values: names of the other states, with their values before the first step.
    """

    def __init__(self, like: Tensor, cls: OptimizerClass, settings: State) -> None:
        first = first_state(like, cls, settings)
        self.slices = {n: v.dtype for n, v in first.items() if is_like(v, like)}
        self.values = {n: v for n, v in first.items() if n not in self.slices}
        for name, value in self.values.items():  # undo what the stand-in's step has made of them
            if isinstance(value, Tensor) and (value.dim() or name == "step"):
                self.values[name] = torch.zeros_like(value)
            elif name == "step":
                self.values[name] = 0


def is_like(value: Any, like: Tensor) -> bool:
    """Whether ``value`` is a tensor with one element for each element of ``like``."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == like.shape
