"""Finds which parameters' gradients or values are not finite, and on which ranks.

Called only after a check has failed. The check itself is the gradient norm: if one rank's gradient
is not finite, the norm is not finite on any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from internsp.failure.objects import Objects
from internsp.mesh import ParallelMesh
from internsp.wp.parameter import Member

_SHOWN = 6  # names in a message
_LATER = ("parameters of a group that was added",)


@dataclass(frozen=True)
class NotFinite:
    """Parameters with values that are not finite; the same on every rank.

    Attributes:
        parameters: their names, by stage and in the order of the model.
        ranks: the ranks on which such values arose. This is found from the gradients of replicated
            parameters, before they are all-reduced: nearly every backward passes through one of
            them. Empty where these gradients were finite.
    """

    parameters: tuple[str, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        names = ", ".join(self.parameters[:_SHOWN])
        if len(self.parameters) > _SHOWN:
            names += f" and {len(self.parameters) - _SHOWN} more parameters"
        ranks = ", ".join(map(str, self.ranks))
        on = f" on rank{'s' * (len(self.ranks) > 1)} {ranks}" if ranks else ""
        return f"not finite{on}: {names or 'only the norm of all parameters together'}"


class Marks:
    """What may be not finite in a step: each rank, then each parameter, of all stages.

    Stages tell each other their names once; parameters of groups that are added later share a mark.

    Args:
        members: those of this rank's stage, the same on all ranks of the stage. Collective; blocks.

    Attributes:
        all: ranks (numbers), and names of parameters.
        ranks: those ranks, and ``stages`` the places of each stage's among them.
        rank: the index of this rank.
        start, stop: the indices of this stage's parameters; the last is for those added later.
        places: a parameter's index from ``start`` on.
    """

    def __init__(self, mesh: ParallelMesh, members: Sequence[Member]) -> None:
        mine = list(mesh.stage_ranks), [*(m.name_in_model for m in members), *_LATER]
        stages = Objects(mesh.pipeline_group).gather(mine)
        self.ranks: list[int] = [rank for stage, _ in stages for rank in stage]
        size, names = len(mine[0]), [names for _, names in stages]
        self.stages = [slice(at, at + size) for at in range(0, len(self.ranks), size)]
        self.all: list[int | str] = [*self.ranks, *(name for each in names for name in each)]
        self.rank = self.ranks.index(mine[0][dist.get_rank(mesh.stage_group)])
        self.start = len(self.ranks) + sum(map(len, names[: mesh.pipeline_rank]))
        self.stop = self.start + len(mine[1])
        self.places = {member: at for at, member in enumerate(members)}

    def not_finite(self, flags: Sequence[float]) -> NotFinite:
        """What the flags that ranks have summed say."""
        bad = [mark for mark, flag in zip(self.all, flags, strict=True) if flag]
        names = dict.fromkeys(mark for mark in bad if isinstance(mark, str))
        return NotFinite(tuple(names), tuple(sorted(m for m in bad if isinstance(m, int))))
