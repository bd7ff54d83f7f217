"""Lets another method of a module run as a forward of it, with the hooks and scopes of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

RUNNING = "_internsp_method_runs"
"""Attribute of a module, true while such a method runs: calls of the module are within it."""


def as_forward(module: nn.Module, name: str) -> None:
    """Let ``module.name(...)`` be called as the module itself is, and so run its hooks."""
    method, plain = getattr(module, name), module.forward
    waiting: list[Callable[..., Any]] = []

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (waiting.pop() if waiting else plain)(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        vars(module)[RUNNING] = True
        try:
            return method(*args, **kwargs)
        finally:
            vars(module)[RUNNING] = False

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if vars(module).get(RUNNING):
            return method(*args, **kwargs)
        waiting.append(run)
        try:
            return module(*args, **kwargs)
        finally:
            waiting.clear()

    module.forward = forward
    setattr(module, name, call)
