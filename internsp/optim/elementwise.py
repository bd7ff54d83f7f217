"""Which optimizers may work on slices, those that treat every element by itself, and which not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

OptimizerClass = Callable[..., torch.optim.Optimizer]
"""A class of torch optimizers, or something that makes one."""

_LOG = logging.getLogger("internsp.optim")
# Well-known ones, for a message that does not need an experiment.
_WHOLE = ("Adafactor", "Muon")
_REFUSED = ("LBFGS", "SparseAdam")
_STEPS = 12  # some change their ways after a few: a warm-up, a preconditioner computed now and then
_SHAPES = ((4, 4), (48, 96))  # some begin to look at neighbors in large parameters only


def name_of(cls: OptimizerClass) -> str:
    """For a person."""
    return getattr(cls, "__name__", str(cls))


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
    _require_possible(cls)
    known = next((name for name in _named(cls) if name in _WHOLE), None)
    if known is not None:
        raise TypeError(_refusal(cls, f"it is {known}"))
    why = _differs(cls, device, defaults)
    if why:
        raise TypeError(_refusal(cls, why))


def require_whole_matrix(
    cls: OptimizerClass, device: torch.device, defaults: dict[str, Any]
) -> None:
    """Check what is declared to need whole matrices.

    A class of torch's own that is elementwise is refused, since its step would be right but slow
    for nothing. Of any other one that the experiment finds elementwise a warning is logged: it may
    look at whole matrices later, or in larger ones.

    Raises:
        TypeError: it need not have whole matrices, or no step of it is possible.
        Exception: whatever ``cls`` itself raises about its settings.
    """
    _require_possible(cls)
    matrix = torch.linspace(-3.0, 2.0, 24, device=device).view(6, 4)
    optimizer = cls([matrix], **defaults)
    matrix.grad = torch.linspace(0.1, 4.0, 24, device=device).roll(5).view(6, 4)
    try:
        optimizer.step()
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{name_of(cls)}: its step of a matrix failed: {error}") from error
    if any(name in _WHOLE for name in _named(cls)) or _differs(cls, device, defaults):
        return
    text = (
        f"{name_of(cls)} is declared to need whole matrices (whole_matrix), but a parameter cut in "
        "two fares as a whole one"
    )
    if getattr(cls, "__module__", "").startswith("torch.optim"):
        raise TypeError(f"{text}: it is elementwise, leave whole_matrix out")
    _LOG.warning(
        "%s in %d steps: if it is elementwise, leave whole_matrix out, and no matrix is sent",
        text, _STEPS,
    )  # fmt: skip


def _differs(cls: OptimizerClass, device: torch.device, defaults: dict[str, Any]) -> str:
    """Why a parameter cannot be cut; empty: it can."""
    for rows, columns in _SHAPES:
        numel = rows * columns
        first = 5 * numel // 16
        start = torch.linspace(-3.0, 2.0, numel, device=device)
        whole = start.clone().view(rows, columns)
        pieces = [start[:first].clone(), start[first:].clone()]
        runs = [cls([whole], **defaults)]
        try:
            runs.append(cls(pieces, **defaults))
        except ValueError as error:  # of the settings it would have been the first one's
            return f"it does not take a slice: {error}"
        for step in range(_STEPS):
            gradient = torch.linspace(0.1, 4.0 + step, numel, device=device).roll(3 * step).square()
            whole.grad = gradient.view(rows, columns)
            pieces[0].grad, pieces[1].grad = gradient[:first].clone(), gradient[first:].clone()
            for run in runs:
                try:
                    run.step()
                except (TypeError, RuntimeError) as error:
                    return f"its step failed: {error}"
        if not torch.allclose(whole.flatten(), torch.cat(pieces), rtol=1e-4, atol=1e-6):
            return "a parameter cut in two fares differently from a whole one"
    return ""


def _named(cls: OptimizerClass) -> list[str]:
    return [base.__name__ for base in getattr(cls, "__mro__", ())]


def _require_possible(cls: OptimizerClass) -> None:
    known = next((name for name in _named(cls) if name in _REFUSED), None)
    if known is not None:
        raise TypeError(
            f"ZeroOptimizer needs an elementwise optimizer (AdamW, SGD, RMSprop, ...), or one of "
            f"whole matrices; {name_of(cls)} is not one: it is {known}"
        )


def _refusal(cls: OptimizerClass, reason: str) -> str:
    return (
        f"ZeroOptimizer cuts parameters into slices and needs an elementwise optimizer (AdamW, "
        f"SGD, RMSprop, ...); {name_of(cls)} is not one: {reason}. Declare whole_matrix = true "
        "(of ZeroOptimizer, of its group in param_groups, or optimizer.whole_matrix in a "
        "configuration), and each matrix is brought together on one rank for its step"
    )


def default_settings(cls: OptimizerClass, defaults: dict[str, Any], whole: bool) -> dict[str, Any]:
    """All settings of ``cls`` with ``defaults`` filled in, as schedulers expect them."""
    parameter: Tensor = torch.zeros((1, 1) if whole else 1)
    return dict(cls([parameter], **defaults).defaults)
