"""Blocks that take all their weights at their entry: compiled ones, and small ones.

At the entry, every parameter of the block is replaced by the tensor to compute with, and put back
at the exit. Code in between sees plain tensors: ``torch.compile`` meets no hook of ours (WP-13),
and a block whose weights all travel together anyway needs one node of the graph instead of one a
weight. Gradients are born together, at the end of the block's backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from internsp.layers.access import SITES, before_backward_of, replaced, sites, whole_block
from internsp.wp.at_entry import BlockUses


def take_at_entry(
    block: nn.Module, prepare: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
) -> None:
    """Replace ``block.forward`` by one that takes the weights first.

    Args:
        prepare: what is done to the code in between, such as ``torch.compile``.
    """
    inner = prepare(block.forward) if prepare is not None else block.forward
    attached = [(m, sites(m)) for m in block.modules() if sites(m)]
    owners = [(m, n) for m, own in attached for n in own]
    uses = BlockUses([site for _, own in attached for site in own.values()])

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept = [module._parameters[name] for module, name in owners]
        for (module, name), parameter in zip(owners, kept, strict=True):
            if type(parameter) is nn.Parameter:
                raise replaced(module, name)
        views = whole_block(uses, kept)
        try:
            for (module, name), view in zip(owners, views, strict=True):
                module._parameters[name] = view  # type: ignore[assignment]
            for module, _ in attached:  # in between they are ordinary modules
                del module.__dict__[SITES]
            output = inner(*args, **kwargs)
        finally:
            for (module, name), parameter in zip(owners, kept, strict=True):
                module._parameters[name] = parameter
            for module, own in attached:
                module.__dict__[SITES] = own
        uses.release()
        if uses.cut:
            call = partial(_before_backward, uses, uses.tags())
            before_backward_of(output, call, (args, kwargs))
        return output

    block.forward = forward  # type: ignore[method-assign]


def _before_backward(uses: BlockUses, tags: list[Any], gradients: Any) -> None:
    uses.before_backward(tags)


def compile_block(block: nn.Module, **options: Any) -> None:
    """:func:`take_at_entry` around the compiled block.

    Args:
        options: for ``torch.compile``.
    """
    take_at_entry(block, lambda inner: torch.compile(inner, **options))
