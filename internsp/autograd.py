"""Where autograd is: the phase, and the tensors of a module's output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def in_backward() -> bool:
    """Whether an autograd graph task runs on this thread: the phase, from where we are (WP-9)."""
    return torch._C._current_graph_task_id() != -1


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's output, through tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, (dict, Mapping)):  # the first answers at once
        for item in value.values():
            yield from tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors(getattr(value, name))
