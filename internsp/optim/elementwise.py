"""Checks whether an optimizer is elementwise (may step slices) or needs whole matrices."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from internsp.base.stand_in import (
    OptimizerClass,
    copied,
    is_torchs_own,
    make_stand_in,
    start_training,
)
from internsp.optim.group_state import kept_in_group, stepped, switched

_LOG = logging.getLogger("internsp.optim")
# Well-known classes, which need no experiment (0.1 s each). Of torch's own no subclass is meant.
_ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    )
)  # fmt: skip
_WHOLE_MATRIX = ("Adafactor", "Muon")
_REFUSED = ("LBFGS", "SparseAdam")
_STEPS = 12  # some step otherwise after a few steps: a warm-up, a preconditioner now and then
_SHAPES = ((4, 4), (48, 96))  # some combine elements in large parameters only


def name_of(cls: OptimizerClass) -> str:
    """The optimizer's name for messages."""
    return getattr(cls, "__name__", str(cls))


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """Context in which what is random is alike on all ranks, which all must find the same; the
    program's random state stays."""
    there = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(there, device_type=device.type):
        torch.manual_seed(0)
        yield


def require_elementwise(
    cls: OptimizerClass, device: torch.device, defaults: dict[str, Any]
) -> None:
    """Check by experiment that ``cls`` steps a 2-D parameter as it steps the same values in two 1-D
    parts; torch's own classes are known.

    ZeRO cuts parameters at arbitrary elements, so that norms over a parameter (LAMB, Adafactor),
    matrix steps (Muon, Shampoo) and line searches (LBFGS) would silently compute something else.

    Raises:
        TypeError: when ``cls`` is not elementwise; names the remedy.
        Exception: whatever ``cls`` itself raises about its settings.
    """
    _require_possible(cls)
    known = next((name for name in base_names(cls) if name in _WHOLE_MATRIX), None)
    if known is not None:
        raise TypeError(_not_elementwise_message(cls, f"it is {known}"))
    cls([torch.zeros(4, 4, device=device)], **defaults)  # may raise: its settings are wrong
    if cls in _ELEMENTWISE:
        return
    _require_independent(cls, device, defaults)
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
    start_training(optimizer)
    matrix.grad = torch.linspace(0.1, 4.0, 24, device=device).roll(5).view(6, 4)
    try:
        optimizer.step()
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{name_of(cls)}: its step of a matrix failed: {error}") from error
    _require_independent(cls, device, defaults)
    if not is_torchs_own(cls) and not _alike(cls, defaults, [matrix], [matrix], late=True):
        raise TypeError(
            f"{name_of(cls)} looks at a parameter's values when it is made, which a ZeroOptimizer "
            f"does before it has whole matrices. {_plain_loop(cls)}"
        )
    if any(name in _WHOLE_MATRIX for name in base_names(cls)) or _why_not_elementwise(
        cls, device, defaults
    ):
        return
    text = (
        f"{name_of(cls)} is declared to need whole matrices (whole_matrix), but a parameter split "
        "in two is stepped as an unsplit one"
    )
    if is_torchs_own(cls):
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
        whole, pieces = [start.view(rows, columns)], [start[:first], start[first:]]
        try:
            if not _alike(cls, defaults, whole, pieces, within=1e-5):
                return "a parameter split in two is stepped otherwise than an unsplit one"
        except ValueError as error:  # not about the settings: the first one was made with them
            return f"it does not take a slice: {error}"
        except (TypeError, RuntimeError, KeyError) as error:
            return f"its step failed: {error}"
    return ""


def _require_independent(
    cls: OptimizerClass, device: torch.device, defaults: dict[str, Any]
) -> None:
    """Check by experiment that parameters are stepped each by itself, as by optimizers of their
    own: each bucket has one, and each whole matrix. Those that torch has are.

    Raises:
        TypeError: what one parameter becomes depends on others.
    """
    if is_torchs_own(cls):
        return
    start = torch.linspace(-3.0, 2.0, 24, device=device)
    matrices = [start.view(6, 4), 0.5 * start.roll(7).view(6, 4)]
    usual = {name: value for name, value in defaults.items() if name != "lr"}
    try:  # also with its own rate: with a small one a common step size begins to grow late
        if all(_alike(cls, each, matrices, matrices) for each in (defaults, usual)):
            return
    except (ValueError, TypeError, RuntimeError, KeyError):  # the other experiment tells it
        return
    kept = kept_in_group(cls, default_settings(cls, defaults, True), matrices[0])
    through = f", through {', '.join(sorted(kept))} in its param_groups" if kept else ""
    raise TypeError(
        f"{name_of(cls)} steps one parameter otherwise if there are others{through}: a "
        f"ZeroOptimizer steps the slices of each rank by themselves. {_plain_loop(cls)}"
    )


def _plain_loop(cls: OptimizerClass) -> str:
    return (
        f"Take it without a ZeroOptimizer: {name_of(cls)}(model.parameters(), ...) in a plain loop"
        ", if it sums over ranks what it takes from gradients: item() of a sum is this rank's part"
    )


def _alike(
    cls: OptimizerClass, defaults: dict[str, Any], whole: Sequence[Tensor], parts: Sequence[Tensor],
    late: bool = False, within: float = 1e-3,
) -> bool:  # fmt: skip
    """Whether one optimizer of ``whole`` and one for each of ``parts``, which have the same
    elements, make the same steps: in fp64, in which small ones show, if the class takes it.

    Args:
        late: the parts have their values only when their optimizers are made.
        within: of how far elements have come. What is random, as in iterations for a largest
            eigenvalue, differs by some ten thousandths.
    """
    doubled, fewer = ([t.double() for t in tensors] for tensors in (whole, parts))
    try:
        return _steps_alike(cls, defaults, doubled, fewer, late, within)
    except (ValueError, TypeError, RuntimeError, KeyError):
        return _steps_alike(cls, defaults, whole, parts, late, within)


def _steps_alike(
    cls: OptimizerClass, defaults: dict[str, Any], whole: Sequence[Tensor], parts: Sequence[Tensor],
    late: bool, within: float,
) -> bool:  # fmt: skip
    """See :func:`_alike`. What they keep in their group is carried as in a run."""
    own = [[tensor.clone() for tensor in tensors] for tensors in (whole, parts)]
    together = cls(own[0], **defaults)
    start_training(together)
    settings = {n: v for n, v in together.defaults.items() if n != "params"}
    kept = kept_in_group(cls, settings, whole[0])
    settings |= kept
    if kept:
        settings |= switched(cls, settings, kept, whole[0], "train")
    values = [part.clone() for part in own[1]]
    for part in own[1] if late else ():
        part.zero_()
    alone = [make_stand_in(cls, settings, [part]) for part in own[1]]
    for part, value in zip(own[1], values, strict=True):
        part.copy_(value)
    start = torch.cat([tensor.flatten() for tensor in whole])
    numel, floor = start.numel(), 4 * torch.finfo(start.dtype).eps * start.abs().max()
    for step in range(_STEPS):
        waves = torch.linspace(-2.03, 3.0, numel) * (7.1 * torch.arange(numel)).cos()
        gradient = waves.to(whole[0]).roll(3 * max(0, step - 5))  # before, in one direction
        gradient *= 10.0 ** (step // 4 - 2)  # first small, where eps and decay count, then clipped
        if step > 8:  # at last at right angles, as of weights before a norm (AdamP)
            now = torch.cat([tensor.flatten() for tensor in own[0]])
            gradient -= now * (gradient @ now) / (now @ now)
        for tensors in own:
            pieces = gradient.clone().split([tensor.numel() for tensor in tensors])
            for tensor, piece in zip(tensors, pieces, strict=True):
                tensor.grad = piece.view(tensor.shape)
        together.step()
        for optimizer in alone:
            optimizer.param_groups[0].update(copied(settings))
            optimizer.step()
        if kept:
            settings |= stepped(cls, settings, kept, whole[0], True)
        one, other = (torch.cat([t.flatten() for t in tensors]) - start for tensors in own)
        if not (one - other).abs().max() <= within * one.abs().max() + floor:  # nor if it is NaN
            return False
    return True


def base_names(cls: OptimizerClass) -> list[str]:
    """The names of the class and of its bases; of a function none."""
    return [base.__name__ for base in getattr(cls, "__mro__", ())]


def _require_possible(cls: OptimizerClass) -> None:
    known = next((name for name in base_names(cls) if name in _REFUSED), None)
    if known is not None:
        raise TypeError(
            f"ZeroOptimizer needs an elementwise optimizer (AdamW, SGD, RMSprop, ...), or one of "
            f"whole matrices; {name_of(cls)} is not one: it is {known}"
        )


def _not_elementwise_message(cls: OptimizerClass, reason: str) -> str:
    return (
        f"ZeroOptimizer cuts parameters into slices and needs an elementwise optimizer (AdamW, "
        f"SGD, RMSprop, ...); {name_of(cls)} is not one: {reason}. Declare whole_matrix = true "
        "(of ZeroOptimizer, or of its group in param_groups), and each matrix is gathered on one "
        "rank for its step"
    )


def default_settings(
    cls: OptimizerClass, defaults: dict[str, Any], whole_matrix: bool
) -> dict[str, Any]:
    """All settings of ``cls``, with ``defaults`` filled in, as schedulers expect them."""
    parameter: Tensor = torch.zeros((1, 1) if whole_matrix else 1)
    return dict(cls([parameter], **defaults).defaults)
