"""Which optimizers may work on slices: those that treat every element by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

OptimizerClass = Callable[..., torch.optim.Optimizer]
"""A class of torch optimizers, or something that makes one."""

# Well-known ones, for a message that does not need an experiment.
_REFUSED = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


def require_elementwise(
    cls: OptimizerClass, device: torch.device, defaults: dict[str, Any]
) -> None:
    """Check by experiment: a 2-D parameter, whole and in two flat pieces, must fare the same.

    ZeRO cuts parameters at arbitrary elements, so that norms over a parameter (LAMB, Adafactor),
    matrix steps (Muon, Shampoo) and line searches (LBFGS) would silently become something else.

    Raises:
        TypeError: when ``cls`` is not elementwise; names the remedy.
        Exception: whatever ``cls`` itself raises about its settings.
    """
    named = [base.__name__ for base in getattr(cls, "__mro__", ())]
    known = next((name for name in named if name in _REFUSED), None)
    if known is not None:
        raise TypeError(_refusal(cls, f"it is {known}"))
    start = torch.linspace(-3.0, 2.0, 16, device=device)
    whole, pieces = start.clone().view(4, 4), [start[:5].clone(), start[5:].clone()]
    runs = (cls([whole], **defaults), cls(pieces, **defaults))
    for step in range(3):
        gradient = torch.linspace(0.1, 4.0 + step, 16, device=device).roll(3 * step).square()
        whole.grad = gradient.view(4, 4)
        pieces[0].grad, pieces[1].grad = gradient[:5].clone(), gradient[5:].clone()
        for run in runs:
            try:
                run.step()
            except (TypeError, RuntimeError) as error:
                raise TypeError(_refusal(cls, f"its step failed: {error}")) from error
    if not torch.allclose(whole.flatten(), torch.cat(pieces), rtol=1e-4, atol=1e-6):
        raise TypeError(_refusal(cls, "a parameter cut in two fares differently from a whole one"))


def default_settings(cls: OptimizerClass, defaults: dict[str, Any]) -> dict[str, Any]:
    """All settings of ``cls`` with ``defaults`` filled in, as schedulers expect them."""
    parameter: Tensor = torch.zeros(1)
    return dict(cls([parameter], **defaults).defaults)


def _refusal(cls: OptimizerClass, reason: str) -> str:
    return (
        f"ZeroOptimizer cuts parameters into slices and needs an elementwise optimizer (AdamW, "
        f"SGD, RMSprop, ...); {getattr(cls, '__name__', cls)} is not one: {reason}. Without a "
        "ZeroOptimizer any torch optimizer that accepts DTensor parameters works in a plain loop"
    )
