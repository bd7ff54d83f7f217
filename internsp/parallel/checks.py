"""Checks before a collective that one rank may call alone, or that others may not launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from internsp.errors import StructureError
from internsp.failure.consensus import Consensus
from internsp.failure.recovery import StageRecovery
from internsp.wp.parameter import Member, ShardedParameter, trained


def register_read_checks(weights: Sequence[ShardedParameter], recovery: StageRecovery) -> None:
    """Make ``full_tensor()`` of a weight on some ranks only raise there, and abort no group.

    Sets ``weight.meet``, which ``full_tensor()`` calls before its all-gather, and
    ``weight.meet_all``, which its backward calls before the sum over all ranks.
    """
    consensus: dict[tuple[object, str], Consensus] = {}
    for weight in weights:
        axis = weight.axis
        grid = axis.param_mesh.mesh

        def meeting(of: str, ranks: list[int], axis: Any = axis) -> Callable[[str], None] | None:
            if len(ranks) == 1:
                return None
            if (axis, of) not in consensus:
                name = f"{recovery.shared_name}/{axis.name}/{of}"
                consensus[axis, of] = recovery.among(name, ranks)
            return partial(consensus[axis, of].same, "reads")

        replica = axis.replica_rank
        weight.meet = meeting(str(replica), grid[replica].flatten().tolist())
        weight.meet_all = meeting("all", grid.flatten().tolist())


class FrozenParameterCheck:
    """Checks, whenever ``requires_grad`` changes, that all ranks freeze the same parameters.

    Which reductions are launched depends on it.

    Args:
        members: all parameters of a chunk; all ranks start with the same frozen parameters.
    """

    def __init__(self, members: Sequence[Member], consensus: Consensus) -> None:
        self._members, self._consensus = list(members), consensus
        self._agreed = trained(self._members)

    def check(self) -> None:
        """Called at each forward. Uses the store, and blocks, only after a change.

        Raises:
            StructureError: the ranks freeze different parameters.
            CollectiveError: some rank changed nothing, or runs no further forward.
        """
        now = trained(self._members)
        if now == self._agreed:
            return
        changed = [
            m.name for m, a, b in zip(self._members, self._agreed, now, strict=True) if a != b
        ]
        what = f"a forward with requires_grad changed for {', '.join(changed)}"
        remedy = "freeze and unfreeze the same parameters on all ranks"
        self._consensus.same("frozen", what, kind=StructureError, remedy=remedy)
        self._agreed = now


