"""What an optimizer keeps for a parameter, found by a step of a stand-in."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

OptimizerClass = Any
"""A class of torch optimizers, or a function that makes one."""

State = dict[str, Any]


def is_torchs_own(cls: OptimizerClass) -> bool:
    """Whether it is a class of ``torch.optim`` itself, of which we know what a step would show."""
    return str(getattr(cls, "__module__", "")).startswith("torch.optim.")


def settings_of(group: Mapping[str, Any]) -> State:
    """What a group holds besides its parameters."""
    return {name: v for name, v in group.items() if name not in ("params", "param_names")}


def copied(settings: Mapping[str, Any]) -> State:
    """``settings`` with copies of what an optimizer could change in place."""
    return {
        name: copy.deepcopy(value) if isinstance(value, Tensor | list | dict) else value
        for name, value in settings.items()
    }


def start_training(optimizer: torch.optim.Optimizer) -> None:
    """Call its ``train()``, if it has one: schedule-free optimizers refuse to step before."""
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()


def make_stand_in(
    cls: OptimizerClass, settings: Mapping[str, Any], tensors: Iterable[Tensor]
) -> torch.optim.Optimizer:
    """An optimizer of ``tensors`` in one group with copies of ``settings``, ready to step."""
    made: torch.optim.Optimizer = cls([{**copied(settings), "params": list(tensors)}])
    start_training(made)
    return made


class StateNames:
    """What the state of parameters with the same settings consists of, the same on all ranks.

    Args:
        like: a parameter; of one without dimensions, whose moments look like a step count, a tensor
            of two elements.

    Attributes:
        slices: names and dtypes of the states with one element for each element of the parameter.
        values: names of the other states, with their values before the first step.
    """

    def __init__(self, like: Tensor, cls: OptimizerClass, settings: Mapping[str, Any]) -> None:
        stand_in = torch.zeros_like(like)
        stand_in.grad = torch.zeros_like(stand_in)
        if like.dim() > 1:  # not zero: some divide by a matrix's norm or invert a product of it
            stand_in.grad += torch.linspace(0.5, 1.0, like.shape[-1], device=like.device)
        inner = make_stand_in(cls, settings, [stand_in])
        inner.step()
        first: State = inner.state.get(stand_in, {})
        self.slices = {
            name: value.dtype
            for name, value in first.items()
            if isinstance(value, Tensor) and value.dim() and value.shape == like.shape
        }
        self.values = {n: v for n, v in first.items() if n not in self.slices}
        for name, value in self.values.items():  # undo what the stand-in's step has made of them
            if isinstance(value, Tensor) and (value.dim() or name == "step"):
                self.values[name] = torch.zeros_like(value)
            elif name == "step":
                self.values[name] = 0
