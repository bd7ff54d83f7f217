"""Ranks that step parts of the same parameters must step them with the same settings.

A learning rate that follows one rank's own loss would train each rank's part at another pace, and
nothing else would show it. The numbers of all groups are compared in each step, as one more number
a rank beside the norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from internsp.errors import ConfigError
from internsp.optim.finite import Marks

Numbers = list[dict[str, list[float]]]
_GAP = 1e-6
"""Relative difference of one setting that counts; libraries differ in the last bits of a cosine."""


def numbers_in(groups: Iterable[tuple[Mapping[str, Any], Sequence[str]]]) -> Numbers:
    """The settings that are numbers, by group: what the host can read without waiting.

    Args:
        groups: the settings of each, and names of what its optimizer keeps among them.
    """
    found = [
        {name: _flat(value) for name, value in settings.items() if name not in kept}
        for settings, kept in groups
    ]
    return [{name: flat for name, flat in group.items() if flat} for group in found]


def code_of(numbers: Numbers) -> float:
    """A number that differs by more than ``_GAP`` where a setting does, relative to that."""
    flat = [value for group in numbers for own in group.values() for value in own]
    return sum(at * math.asinh(1e12 * value) for at, value in enumerate(flat, 1))


def require_one_step(optimizers: Sequence[Any]) -> None:
    """Check that the ``ZeroOptimizer`` objects of one step agree in what the first decides for all.

    Raises:
        ConfigError: there is none, one of the pipeline rank's is missing although they clip by one
            norm, or one clips, scales or skips otherwise than the first.
    """
    if not optimizers:
        raise ConfigError(
            "step_together was given no optimizer: pass those of all chunks of this pipeline rank"
        )
    stepped = [optimizer._communicator for optimizer in optimizers]
    for communicator in stepped[0].chunks if optimizers[0].max_grad_norm is not None else ():
        if communicator.state.consumer.is_optimizer and communicator not in stepped:
            raise ConfigError(
                "max_grad_norm clips by one norm of all chunks of a pipeline rank, but a chunk's "
                "optimizer was stepped without the others: call internsp.step_together with the "
                "optimizers of all chunks, or set max_grad_norm = None"
            )
    for name in ("max_grad_norm", "skip_not_finite", "loss_scaler"):
        first, *others = (getattr(optimizer, name) for optimizer in optimizers)
        for number, other in enumerate(others, 1):
            if other is not first and (name == "loss_scaler" or other != first):
                raise ConfigError(
                    f"optimizers 0 and {number} of a step have the {name} {first} and {other}, but "
                    "one step has one norm and one verdict: give the optimizers of all chunks the "
                    "same max_grad_norm and skip_not_finite, and one LossScaler object"
                )


def require_same(marks: Marks, codes: Sequence[float], mine: Numbers) -> None:
    """Check what all ranks have told, the same on each.

    Args:
        codes: :func:`code_of` of each rank of ``marks``; 0 where a backend that sends nothing
            (torch's ``fake``) stands in for the others.

    Raises:
        ConfigError: ranks of a stage differ.
    """
    for stage in marks.stages:
        told = {r: code for r, code in zip(marks.ranks[stage], codes[stage], strict=True) if code}
        first = next(iter(told), 0)
        other = [rank for rank, code in told.items() if abs(code - told[first]) > _GAP]
        if other:
            raise ConfigError(
                f"ranks {other} step with other settings than rank {first}, which holds parts of "
                f"the same parameters; on rank {marks.ranks[marks.rank]} they are {mine}. Give all "
                "ranks the same: a schedule that follows a loss needs that of all ranks "
                "(torch.distributed.all_reduce)"
            )


def _flat(value: Any) -> list[float]:
    """Its numbers that are finite; none of what is no number, or lies on a device."""
    if isinstance(value, tuple | list):
        return [number for each in value for number in _flat(each)]
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
        value = value.item()
    return [value] if isinstance(value, int | float) and math.isfinite(value) else []
