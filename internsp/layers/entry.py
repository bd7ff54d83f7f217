"""Blocks that take all their weights at their entry: compiled ones, and small ones.

At the entry, every parameter of the block is replaced by the tensor to compute with, and put back
at the exit. Code in between sees plain tensors: ``torch.compile`` meets no hook of ours (WP-13),
and a block whose weights all travel together anyway needs one node of the graph instead of one a
weight. Gradients are ready together, at the end of the block's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from internsp.autograd import apart, before_backward_of, given, no_second_derivatives
from internsp.layers.parameters import sites, unwritten
from internsp.layers.views import views
from internsp.wp.sites import BlockUses


def take_at_entry(
    block: nn.Module, prepare: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
) -> None:
    """Replace ``block.forward`` by one that takes the weights first.

    In between, ``_parameters`` of each module is a plain dictionary of plain tensors.

    Args:
        prepare: what is done to the code in between, such as ``torch.compile``.
    """
    inner = prepare(block.forward) if prepare is not None else block.forward
    held: list[Any] = [m._parameters for m in block.modules() if sites(m)]
    modules = [m for m in block.modules() if sites(m)]
    own = [site for weights in held for site in weights.sites.values()]
    uses = BlockUses(own)
    parameters = [site.parameter for site in own]

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        before = given((args, kwargs))
        taken = views(uses, parameters)
        plain = _plain(held, taken)
        handed = [dict(inside) for inside in plain]
        try:
            for module, inside in zip(modules, plain, strict=True):
                module.__dict__["_parameters"] = inside
            output = inner(*args, **kwargs)
        finally:
            for module, weights in zip(modules, held, strict=True):
                module.__dict__["_parameters"] = weights
        _keep_what_was_put_in(held, plain, handed)
        for site, tensor in zip(own, taken, strict=True):
            unwritten(site, tensor)
        output = apart(output, taken)
        uses.release()
        if uses.cut:
            call = partial(_before_backward, uses, uses.tags())
            before_backward_of(output, call, before)
        return output

    block.forward = forward  # type: ignore[method-assign]


def _plain(held: list[Any], taken: Sequence[Tensor]) -> list[dict[str, Any]]:
    """What each module's ``_parameters`` holds meanwhile: views, and what a user has put in."""
    plain: list[dict[str, Any]] = []
    views = iter(taken)
    for weights in held:
        if weights.scope.recomputed:
            weights.before_recomputed()
        inside = dict(weights)
        for name, site in weights.sites.items():
            view = next(views)
            inside[name] = view if inside[name] is site.parameter else weights.other(name)
        plain.append(inside)
    return plain


def _keep_what_was_put_in(
    held: list[Any], plain: list[dict[str, Any]], handed: list[dict[str, Any]]
) -> None:
    """A parameter that the forward itself has set stays, and is met at the next use."""
    for weights, inside, before in zip(held, plain, handed, strict=True):
        for name, value in inside.items():
            if value is not before.get(name):
                weights[name] = value


def _before_backward(uses: BlockUses, tags: list[Any], gradients: Any) -> None:
    no_second_derivatives()
    uses.before_backward(tags)


def compile_block(block: nn.Module, **options: Any) -> None:
    """:func:`take_at_entry` around the compiled block.

    Args:
        options: for ``torch.compile``.
    """
    take_at_entry(block, lambda inner: torch.compile(inner, **options))
