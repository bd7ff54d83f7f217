"""Ranks that step parts of the same parameters must step them with the same settings.

A learning rate that follows one rank's own loss would train each rank's part at another pace, and
nothing else would show it. The numbers of all groups are compared in each step, as one more number
a rank beside the norm.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from internsp.errors import ConfigError
from internsp.optim.finite import Marks

Numbers = list[dict[str, Any]]


def numbers_in(groups: Iterable[tuple[Mapping[str, Any], Sequence[str]]]) -> Numbers:
    """The settings that are numbers, by group: what the host can read without waiting.

    Args:
        groups: the settings of each, and names of what its optimizer keeps among them.
    """
    return [
        {name: _number(value) for name, value in settings.items()
         if name not in kept and _is_number(value)}
        for settings, kept in groups
    ]  # fmt: skip


def code_of(numbers: Numbers) -> int:
    """A number that is the same on ranks with the same settings; fp64 holds it exactly."""
    return zlib.crc32(repr(numbers).encode())


def require_same(marks: Marks, codes: Sequence[float], mine: Numbers) -> None:
    """Check what all ranks have told, the same on each.

    Args:
        codes: :func:`code_of` of each rank of ``marks``.

    Raises:
        ConfigError: ranks of a stage differ.
    """
    for stage in marks.stages:
        ranks, own = marks.ranks[stage], codes[stage]
        other = [rank for rank, code in zip(ranks, own, strict=True) if code != own[0]]
        if other:
            raise ConfigError(
                f"ranks {other} step with other settings than rank {ranks[0]}, which holds parts "
                f"of the same parameters; on rank {marks.ranks[marks.rank]} they are {mine}. Give "
                "all ranks the same: a schedule that follows a loss needs that of all ranks "
                "(torch.distributed.all_reduce)"
            )


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_number, value))
    return isinstance(value, int | float) or (
        isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1
    )


def _number(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_number(each) for each in value]
    return value.item() if isinstance(value, Tensor) else value
