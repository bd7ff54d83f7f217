"""How a module that knows of communicators gets the tensor it computes with (DESIGN 4.1).

A module with its own parameters calls :func:`whole` for each, once a forward, and :func:`guard`
on its output. Where no communicator is attached both do nothing, so that the module is ordinary.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from internsp.autograd import (
    before_backward_of,
    no_second_derivatives,
    refuse_compiled,
    transforming,
)
from internsp.layers.parameters import Weights
from internsp.layers.views import Site, Use, view

Output = TypeVar("Output")


def whole(module: nn.Module, name: str) -> Any:
    """The plain tensor to compute with for ``module``'s parameter ``name``.

    That is the unsharded weight in its slot (waits for its gather), the local replica of a small
    parameter, or the parameter itself where no communicator is attached; ``None`` for an absent
    one. Make it where it is used, once a forward: autograd runs nodes by recency, so a view made
    early gives its gradient late.
    """
    held = module._parameters
    if type(held) is not Weights:
        return held[name]
    site = held.sites.get(name)
    if site is None:
        return held.get(name)
    if held.get(name) is not site.parameter:
        return held.other(name)
    if torch.compiler.is_compiling():
        refuse_compiled(site.name)
    if transforming():
        return held.in_scope(name)
    return view(Use(site))


def guard(module: nn.Module, output: Output) -> Output:
    """Call on what was computed from :func:`whole`: keeps the weights present for its backward.

    Returns ``output`` itself. Ends the use in forward, and hooks the gradients of all tensors in
    ``output`` so that the weights are whole again, with the same values, before backward runs
    through any of them (WP-14).
    """
    held = module._parameters
    if type(held) is Weights and not transforming():  # else the block keeps them
        guard_sites([site for name, site in held.sites.items() if held.holds(name)], output)
    return output


def guard_sites(used: Iterable[Site], output: Any) -> None:
    """:func:`guard` for ``output`` computed from several modules' parameters."""
    tags = [(site, site.tag) for site in used if site.guarded]
    for site, _ in tags:
        site.release()
    if tags:
        before_backward_of(output, partial(_before_backward, tags), {})


def _before_backward(tags: list[tuple[Site, Any]], gradients: tuple[Tensor, ...]) -> None:
    no_second_derivatives()
    for site, tag in reversed(tags):  # the last used first, as backward runs
        site.before_backward(tag)
