"""Activation checkpointing of blocks, with torch's own checkpoint in either form.

A block's ``forward`` is wrapped, not its call: the block's hooks stay outside, so that its output
hook starts the regather for recompute and backward together, whichever form is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

ContextFn = Callable[[], tuple[Any, Any]]


def checkpoint_block(
    block: nn.Module, reentrant: bool = False, context_fn: ContextFn | None = None
) -> None:
    """Make ``block`` recompute its activations in backward.

    Args:
        reentrant: torch's reentrant form (needs an input that requires a gradient).
        context_fn: what to keep all the same (selective checkpointing); not reentrant.
    """
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if reentrant:
            return checkpoint(partial(inner, **kwargs), *args, use_reentrant=True)
        if context_fn is not None:
            return checkpoint(inner, *args, use_reentrant=False, context_fn=context_fn, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    block.forward = forward  # type: ignore[method-assign]
