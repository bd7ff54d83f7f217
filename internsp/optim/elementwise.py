"""Checks whether an optimizer is elementwise (may step slices) or needs whole matrices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

OptimizerClass = Callable[..., torch.optim.Optimizer]
"""A class of torch optimizers, or a function that makes one."""

_LOG = logging.getLogger("internsp.optim")
# Well-known classes, which need no experiment.
_WHOLE_MATRIX = ("Adafactor", "Muon")
_REFUSED = ("LBFGS", "SparseAdam")
_STEPS = 12  # some step otherwise after a few steps: a warm-up, a preconditioner now and then
_SHAPES = ((4, 4), (48, 96))  # some combine elements in large parameters only


def name_of(cls: OptimizerClass) -> str:
    """The optimizer's name for messages."""
    return getattr(cls, "__name__", str(cls))


def require_elementwise(
    cls: OptimizerClass, device: torch.device, defaults: dict[str, Any]
) -> None:
    """Check by experiment that ``cls`` steps a 2-D parameter as it steps the same values in two 1-D
    parts.

    ZeRO cuts parameters at arbitrary elements, so that norms over a parameter (LAMB, Adafactor),
    matrix steps (Muon, Shampoo) and line searches (LBFGS) would silently compute something else.

    Raises:
        TypeError: when ``cls`` is not elementwise; names the remedy.
        Exception: whatever ``cls`` itself raises about its settings.
    """
    _require_possible(cls)
    known = next((name for name in _base_names(cls) if name in _WHOLE_MATRIX), None)
    if known is not None:
        raise TypeError(_not_elementwise_message(cls, f"it is {known}"))
    why = _why_not_elementwise(cls, device, defaults)
    if why:
        raise TypeError(_not_elementwise_message(cls, why))


def require_whole_matrix(
    cls: OptimizerClass, device: torch.device, defaults: dict[str, Any]
) -> None:
    """Check a class that is declared to need whole matrices.

    A class of torch's own that is elementwise is refused: its step would be right, but slow for
    nothing. For any other class that the experiment finds elementwise a warning is logged: it may
    look at whole matrices later, or only at larger ones.

    Raises:
        TypeError: ``cls`` does not need whole matrices, or its step fails.
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
    if any(name in _WHOLE_MATRIX for name in _base_names(cls)) or _why_not_elementwise(
        cls, device, defaults
    ):
        return
    text = (
        f"{name_of(cls)} is declared to need whole matrices (whole_matrix), but a parameter split "
        "in two is stepped as an unsplit one"
    )
    if getattr(cls, "__module__", "").startswith("torch.optim"):
        raise TypeError(f"{text}: it is elementwise, leave whole_matrix out")
    _LOG.warning(
        "%s in %d steps: if it is elementwise, leave whole_matrix out, and no matrix is sent",
        text, _STEPS,
    )  # fmt: skip


def _why_not_elementwise(
    cls: OptimizerClass, device: torch.device, defaults: dict[str, Any]
) -> str:
    """Why slices of a parameter cannot be stepped by ``cls``; empty if they can."""
    for rows, columns in _SHAPES:
        numel = rows * columns
        first = 5 * numel // 16
        start = torch.linspace(-3.0, 2.0, numel, device=device)
        unsplit = start.clone().view(rows, columns)
        pieces = [start[:first].clone(), start[first:].clone()]
        runs = [cls([unsplit], **defaults)]
        try:
            runs.append(cls(pieces, **defaults))
        except ValueError as error:  # not about the settings: the first one was made with them
            return f"it does not take a slice: {error}"
        for step in range(_STEPS):
            gradient = torch.linspace(0.1, 4.0 + step, numel, device=device).roll(3 * step).square()
            unsplit.grad = gradient.view(rows, columns)
            pieces[0].grad, pieces[1].grad = gradient[:first].clone(), gradient[first:].clone()
            for run in runs:
                try:
                    run.step()
                except (TypeError, RuntimeError) as error:
                    return f"its step failed: {error}"
        if not torch.allclose(unsplit.flatten(), torch.cat(pieces), rtol=1e-4, atol=1e-6):
            return "a parameter split in two is stepped otherwise than an unsplit one"
    return ""


def _base_names(cls: OptimizerClass) -> list[str]:
    return [base.__name__ for base in getattr(cls, "__mro__", ())]


def _require_possible(cls: OptimizerClass) -> None:
    known = next((name for name in _base_names(cls) if name in _REFUSED), None)
    if known is not None:
        raise TypeError(
            f"ZeroOptimizer needs an elementwise optimizer (AdamW, SGD, RMSprop, ...), or one of "
            f"whole matrices; {name_of(cls)} is not one: it is {known}"
        )


def _not_elementwise_message(cls: OptimizerClass, reason: str) -> str:
    return (
        f"ZeroOptimizer cuts parameters into slices and needs an elementwise optimizer (AdamW, "
        f"SGD, RMSprop, ...); {name_of(cls)} is not one: {reason}. Declare whole_matrix = true "
        "(of ZeroOptimizer, of its group in param_groups, or optimizer.whole_matrix in a "
        "configuration), and each matrix is gathered on one rank for its step"
    )


def default_settings(
    cls: OptimizerClass, defaults: dict[str, Any], whole_matrix: bool
) -> dict[str, Any]:
    """All settings of ``cls``, with ``defaults`` filled in, as schedulers expect them."""
    parameter: Tensor = torch.zeros((1, 1) if whole_matrix else 1)
    return dict(cls([parameter], **defaults).defaults)
