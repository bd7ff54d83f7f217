"""Pure: what the optimizer's state takes on one rank, and what whole-matrix steps send and hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from internsp.config import Config
from internsp.config.sizes import moments
from internsp.host import OPTIMIZER
from internsp.mesh.shape import MeshShape
from internsp.plan.assign import Assignment
from internsp.plan.dtypes import DTYPES

PASSING = "whole matrices in the step (at most)"


@dataclass(frozen=True)
class MatrixPlan:
    """Of one chunk, on one rank.

    Attributes:
        exchanges: collectives of a step.
        received: bytes that a rank receives in them, on average.
        passing: bytes that they and the step take, at most: two whole matrices, and what is sent
            of them; without what the optimizer itself needs meanwhile.
        state: bytes of the state but masters, of what is not offloaded; of owners on average.
    """

    exchanges: int
    received: int
    passing: int
    state: int

    @classmethod
    def of(cls, config: Config, shape: MeshShape, assignments: Sequence[Assignment]) -> MatrixPlan:
        """See :mod:`internsp.optim.matrices`, whose rounds these are."""
        settings = config.optimizer
        item = max(DTYPES[config.train.dtype].itemsize, 4)
        kept = moments(config)
        # Kinds and bytes of what goes to an owner, and comes back.
        kinds, sent = (1, 2) if settings.name == "muon" else (2, item)
        rounds: dict[int, list[int]] = {}
        state, largest = 0.0, 0
        for each in assignments:
            parameter, axis = each.parameter, shape.axis(each.expert)
            if not parameter.requires_grad:
                continue
            over = axis.zero if each.unit is None else axis.zero * axis.size
            by = settings.stepped_by(each.name, _is_matrix(each))
            if OPTIMIZER not in each.options.offload:
                state += _values(parameter, by, kept) * item / over
            whole = by in ("muon", "adafactor") or (settings.whole_matrix and by == settings.name)
            if whole:
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

    def rows(self) -> Iterator[tuple[str, int]]:
        """(component, bytes): none where no matrix is stepped whole."""
        if self.passing:
            yield PASSING, self.passing


def _is_matrix(each: Assignment) -> bool:
    embeds = isinstance(each.owners[0].module, nn.Embedding | nn.EmbeddingBag)
    return each.block >= 0 and each.parameter.dim() > 1 and not embeds


def _values(parameter: nn.Parameter, by: str, kept: int) -> int:
    """Values that the optimizer keeps of a whole parameter."""
    if by == "adafactor":  # of rows and of columns
        if parameter.dim() < 2:
            return parameter.numel()
        *stack, rows, columns = parameter.shape
        return math.prod(stack) * (rows + columns)
    return parameter.numel() * (2 if by == "adamw" else kept)
