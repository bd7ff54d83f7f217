"""Blocks under ``torch.compile``: whole weights enter as ordinary tensors (WP-13).

At the block's entry, outside the compiled region, every parameter of the block is replaced by the
tensor to compute with; the compiled code sees plain tensors and no hook of ours. Gradients leave
it together at the end of its backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from internsp.layers.access import guard_sites, sites, whole


def compile_block(block: nn.Module, **options: Any) -> None:
    """Replace ``block.forward`` by its compiled form, with weights taken at its entry.

    Args:
        options: for ``torch.compile``.
    """
    inner = block.forward
    compiled = torch.compile(inner, **options)
    owners = [(m, n) for m in block.modules() for n in sites(m)]
    every_site = [sites(m)[n] for m, n in owners]

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept = [(module, name, module._parameters[name]) for module, name in owners]
        try:
            for module, name, _ in kept:
                module._parameters[name] = whole(module, name)
            output = compiled(*args, **kwargs)
        finally:
            for module, name, parameter in kept:
                module._parameters[name] = parameter
        guard_sites(every_site, output)
        return output

    block.forward = forward  # type: ignore[method-assign]
