"""Memory of the optimizer's state on a rank, and traffic and memory of whole-matrix steps. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from internsp.app.config import Config
from internsp.base.host import OPTIMIZER
from internsp.mesh.shape import MeshShape
from internsp.structure.assign import ParameterSharding
from internsp.structure.dtypes import DTYPES

PASSING = "whole matrices in the step (at most)"


@dataclass(frozen=True)
class MatrixTraffic:
    """Whole-matrix optimizer steps of one chunk, on one rank.

    Attributes:
        exchanges: number of collectives in a step.
        received: bytes that a rank receives in them, on average.
        passing: upper bound of the bytes that the collectives and the step take: two unsharded
            matrices and the send buffers; without the optimizer's own temporary memory.
        state: bytes of the optimizer state on the device, without master weights; the average
            over ranks that own matrices.
    """

    exchanges: int
    received: int
    passing: int
    state: int

    @classmethod
    def of(
        cls, config: Config, shape: MeshShape, shardings: Sequence[ParameterSharding]
    ) -> MatrixTraffic:
        """Count the exchanges of the rounds of :mod:`internsp.optim.matrices`, and their bytes."""
        settings = config.optimizer
        item = max(DTYPES[config.train.dtype].itemsize, 4)
        kept = settings.moments
        # Number of kinds of tensors sent to an owner, and bytes an element, there and back.
        kinds, sent = (1, 2) if settings.name == "muon" else (2, item)
        rounds: dict[int, list[int]] = {}
        state, largest = 0.0, 0
        for each in shardings:
            parameter, axis = each.parameter, shape.axis(each.expert)
            if not parameter.requires_grad:
                continue
            over = axis.zero if each.unit is None else axis.zero * axis.size
            embeds = isinstance(each.owners[0].module, nn.Embedding | nn.EmbeddingBag)
            matrix = each.block >= 0 and parameter.dim() > 1 and not embeds
            by = settings.stepped_by(each.name, matrix)
            if OPTIMIZER not in each.options.offload:
                state += _values(parameter, by, kept) * item / over
            if by in ("muon", "adafactor"):
                stack = by == "muon" and parameter.dim() == 3
                count = len(parameter) if stack else 1
                numel = parameter.numel() // count
                rounds.setdefault(over, []).extend([numel] * count)
                largest = max(largest, numel)
        several = {over: numels for over, numels in rounds.items() if over > 1}
        received = sum(
            (kinds + 1) * sent * sum(numels) * (over - 1) // over**2
            for over, numels in several.items()
        )
        return cls(
            exchanges=sum(2 * math.ceil(len(numels) / over) for over, numels in several.items()),
            received=received,
            passing=(3 * kinds + 3) * sent * largest,
            state=math.ceil(state),
        )


def _values(parameter: nn.Parameter, by: str, kept: int) -> int:
    """Number of values that the optimizer keeps for an unsharded parameter."""
    if by == "adafactor":  # one a row and one a column
        if parameter.dim() < 2:
            return parameter.numel()
        *stack, rows, columns = parameter.shape
        return math.prod(stack) * (rows + columns)
    return parameter.numel() * (2 if by == "adamw" else kept)
