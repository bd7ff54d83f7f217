"""Ranks that come to one place, by the store alone: before a collective that one may call alone."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist

from internsp.errors import CollectiveError, StructureError
from internsp.failure.lookout import Lookout
from internsp.failure.recovery import default_store
from internsp.wp.parameter import Member, ShardedParameter, trained


class Meeting:
    """A place in the store for some ranks.

    Args:
        name: the same on these ranks, and of no other meeting.
        seconds: after which those who wait give up.
        lookout: knows when they wait in vain.
    """

    def __init__(
        self, name: str, rank: int, ranks: Sequence[int], seconds: float, lookout: Lookout
    ) -> None:
        self._name, self._rank, self._ranks, self._seconds = name, rank, list(ranks), seconds
        self._lookout = lookout
        self._held: dict[str, int] = defaultdict(int)  # by topic

    def meet(self, topic: str, value: str) -> dict[int, str]:
        """Everyone's ``value``, by rank. Blocks until all have come.

        Raises:
            CollectiveError: some rank did not come in time. Nothing was sent, so that groups stay
                usable, and this rank is not waited for. Or some rank can never come, as it waits
                elsewhere for this one: then the groups are lost.
        """
        with self._lookout.meets(value, self._ranks):
            return self._meet(topic, value)

    def same(self, topic: str, what: str, refused: Exception | None = None) -> None:
        """Come to ``what``, which all ranks must do alike. Blocks until all have come.

        Args:
            refused: why this rank will not: raised once the other ranks know of it.

        Raises:
            CollectiveError: see :meth:`meet`; or another rank came to something else, or refused.
        """
        mine = what if refused is None else f"{what}, which it refused: {refused}"
        found = self.meet(topic, mine)
        if refused is not None:
            raise refused
        other = next((rank for rank, said in found.items() if said != what), None)
        if other is not None:
            raise CollectiveError(
                f"rank {self._rank} came to {what}, rank {other} to {found[other]}: all ranks "
                "must do the same in the same order"
            )

    def _meet(self, topic: str, value: str) -> dict[int, str]:
        store, number = default_store(), self._held[topic]
        keys = {rank: f"{self._name}/{topic}/{number}/{rank}" for rank in self._ranks}
        store.set(keys[self._rank], value)
        deadline, pause = time.monotonic() + self._seconds, 0.0002
        while missing := [rank for rank, key in keys.items() if not store.check([key])]:
            if self._lookout.doom:
                raise CollectiveError(
                    f"rank {self._rank} came to {value}, which all ranks {self._ranks} must do "
                    f"together, and waited for ranks {missing} in vain: {self._lookout.doom}"
                )
            if time.monotonic() > deadline:
                store.delete_key(keys[self._rank])
                raise CollectiveError(
                    f"rank {self._rank} came to {value} and waited {self._seconds:g} s in vain "
                    f"for ranks {missing}: all ranks {self._ranks} must do it together"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        self._held[topic] = number + 1
        found = {rank: store.get(key).decode() for rank, key in keys.items()}
        if number:  # a rank that is here has read what was said before
            store.delete_key(f"{self._name}/{topic}/{number - 1}/{self._rank}")
        return found


def guard_reads(
    weights: Sequence[ShardedParameter], name: str, seconds: float, lookout: Lookout
) -> None:
    """``full_tensor()`` of a weight on some ranks only is an error there, and aborts nothing."""
    meetings: dict[object, Meeting] = {}
    for weight in weights:
        axis = weight.axis
        grid = axis.param_mesh.mesh
        ranks = grid[axis.replica_rank].flatten().tolist()
        if len(ranks) == 1:
            continue
        if axis not in meetings:
            rank = dist.get_rank()
            place = f"internsp/{name}/{axis.name}/{axis.replica_rank}"
            meetings[axis] = Meeting(place, rank, ranks, seconds, lookout)
        weight.meet = partial(meetings[axis].same, "reads")


class FrozenSet:
    """Which parameters are frozen, agreed upon whenever it changes: reductions depend on it.

    Args:
        members: all parameters of a chunk; the ranks start with the same frozen ones.
    """

    def __init__(self, members: Sequence[Member], meeting: Meeting, rank: int) -> None:
        self._members, self._meeting, self._rank = list(members), meeting, rank
        self._agreed = self._now()

    def look(self) -> None:
        """At a forward. No message while nothing has changed.

        Raises:
            StructureError: the ranks freeze different parameters.
            CollectiveError: some rank changed nothing, or came to no further forward.
        """
        now = self._now()
        if now == self._agreed:
            return
        changed = [
            m.name for m, a, b in zip(self._members, self._agreed, now, strict=True) if a != b
        ]
        what = f"a forward with requires_grad changed for {', '.join(changed)}"
        everyone = self._meeting.meet("frozen", what)
        for rank, other in everyone.items():
            if other != what:
                raise StructureError(
                    f"rank {self._rank} came to {what}, rank {rank} to {other}: freeze and thaw "
                    "the same parameters on all ranks"
                )
        self._agreed = now

    def _now(self) -> list[bool]:
        return trained(self._members)


