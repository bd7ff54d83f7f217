"""Ranks that synchronize by the store alone, before a collective that one rank may call alone.

A collective that only some ranks call would hang or abort the process group; a wait in the store
ends with an error that names the call, and leaves the process groups usable.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from internsp.errors import CollectiveError, StructureError
from internsp.failure.guard import FailureGuard
from internsp.failure.recovery import default_store
from internsp.wp.parameter import Member, ShardedParameter, trained


class StoreGroup:
    """Some ranks that exchange texts by the store.

    Args:
        name: prefix of the keys: the same on these ranks, and unique to this group.
        seconds: timeout of a wait.
        guard: ends a wait that can never complete.
    """

    def __init__(
        self, name: str, rank: int, ranks: Sequence[int], seconds: float, guard: FailureGuard
    ) -> None:
        self._name, self._rank, self._ranks, self._seconds = name, rank, list(ranks), seconds
        self._guard = guard
        self._rounds: dict[str, int] = defaultdict(int)  # completed calls, by topic

    def all_gather_text(
        self, topic: str, value: str, counts: Callable[[str], bool] = lambda text: True
    ) -> dict[int, str]:
        """The ``value`` of every rank, by rank. Blocks until all ranks have called it.

        Args:
            topic: calls with different topics are independent.
            value: text; it also names the call in errors.
            counts: whether the text of a rank is one to this call, and not an older
                :meth:`answer`.

        Raises:
            CollectiveError: some rank did not call it in time. No collective was launched, so that
                process groups stay usable, and this rank's value is withdrawn. Or some rank can
                never call it, because it waits elsewhere for this rank: then the process groups
                are aborted.
        """
        call, number = f"{self._name}/{topic}", self._rounds[topic]
        with self._guard.waits_in_store(value, self._ranks, call, number):
            return self._all_gather_text(topic, value, counts)

    def answer(self, topic: str, value: str) -> None:
        """Leave ``value`` for ranks that make the next call of ``topic``. Does not block.

        This rank may make that call, too; it then gives its value instead.
        """
        default_store().set(self._key(topic, self._rank), value)

    def require_same(self, topic: str, what: str, refused: Exception | None = None) -> None:
        """Check that all ranks make the same call, ``what``. Blocks until all ranks have come.

        Args:
            refused: the error for which this rank refuses the call; raised here once the other
                ranks know of it.

        Raises:
            CollectiveError: see :meth:`all_gather_text`; or another rank made another call, or
                refused it.
        """
        mine = what if refused is None else f"{what}, which it refused: {refused}"
        found = self.all_gather_text(topic, mine)
        if refused is not None:
            raise refused
        other = next((rank for rank, call in found.items() if call != what), None)
        if other is not None:
            raise CollectiveError(
                f"rank {self._rank} reached {what}, rank {other} reached {found[other]}: all ranks "
                "must make the same calls in the same order"
            )

    def _key(self, topic: str, rank: int) -> str:
        return f"{self._name}/{topic}/{self._rounds[topic]}/{rank}"

    def _all_gather_text(
        self, topic: str, value: str, counts: Callable[[str], bool]
    ) -> dict[int, str]:
        store, number = default_store(), self._rounds[topic]
        keys = {rank: self._key(topic, rank) for rank in self._ranks}
        found: dict[int, str] = {}
        store.set(keys[self._rank], value)
        deadline, pause = time.monotonic() + self._seconds, 0.0002
        while True:
            for rank, key in keys.items():
                if rank not in found and store.check([key]):
                    text = store.get(key).decode()
                    if counts(text):
                        found[rank] = text
            missing = [rank for rank in self._ranks if rank not in found]
            if not missing:
                break
            if self._guard.fatal_cause:
                raise CollectiveError(
                    f"rank {self._rank} reached {value}, which all ranks {self._ranks} must call "
                    f"together, but ranks {missing} cannot come: {self._guard.fatal_cause}"
                )
            if time.monotonic() > deadline:
                store.delete_key(keys[self._rank])
                raise CollectiveError(
                    f"rank {self._rank} reached {value} and waited {self._seconds:g} s for ranks "
                    f"{missing}, which did not come: all ranks {self._ranks} must call it together"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        self._rounds[topic] = number + 1
        if number:  # all ranks have read this rank's value of the call before, as they are here
            store.delete_key(f"{self._name}/{topic}/{number - 1}/{self._rank}")
        return {rank: found[rank] for rank in self._ranks}


def register_read_checks(
    weights: Sequence[ShardedParameter], name: str, seconds: float, guard: FailureGuard
) -> None:
    """Make ``full_tensor()`` of a weight on some ranks only raise there, and abort no group.

    Sets ``weight.meet``, which ``full_tensor()`` calls before its all-gather, and
    ``weight.meet_all``, which its backward calls before the sum over all ranks.

    Args:
        name: unique to the model, the same on all ranks.
        seconds, guard: see :class:`StoreGroup`.
    """
    store_groups: dict[tuple[object, str], StoreGroup] = {}
    for weight in weights:
        axis = weight.axis
        grid = axis.param_mesh.mesh

        def meeting(of: str, ranks: list[int], axis: Any = axis) -> Callable[[str], None] | None:
            if len(ranks) == 1:
                return None
            if (axis, of) not in store_groups:
                rank, prefix = dist.get_rank(), f"internsp/{name}/{axis.name}/{of}"
                store_groups[axis, of] = StoreGroup(prefix, rank, ranks, seconds, guard)
            return partial(store_groups[axis, of].require_same, "reads")

        replica = axis.replica_rank
        weight.meet = meeting(str(replica), grid[replica].flatten().tolist())
        weight.meet_all = meeting("all", grid.flatten().tolist())


class FrozenParameterCheck:
    """Checks, whenever ``requires_grad`` changes, that all ranks freeze the same parameters.

    Which reductions are launched depends on it.

    Args:
        members: all parameters of a chunk; all ranks start with the same frozen parameters.
    """

    def __init__(self, members: Sequence[Member], store_group: StoreGroup, rank: int) -> None:
        self._members, self._store_group, self._rank = list(members), store_group, rank
        self._agreed = self._current()

    def check(self) -> None:
        """Called at each forward. Uses the store, and blocks, only after a change.

        Raises:
            StructureError: the ranks freeze different parameters.
            CollectiveError: some rank changed nothing, or runs no further forward.
        """
        now = self._current()
        if now == self._agreed:
            return
        changed = [
            m.name for m, a, b in zip(self._members, self._agreed, now, strict=True) if a != b
        ]
        what = f"a forward with requires_grad changed for {', '.join(changed)}"
        everyone = self._store_group.all_gather_text("frozen", what)
        for rank, other in everyone.items():
            if other != what:
                raise StructureError(
                    f"rank {self._rank} reached {what}, rank {rank} reached {other}: freeze and "
                    "unfreeze the same parameters on all ranks"
                )
        self._agreed = now

    def _current(self) -> list[bool]:
        return trained(self._members)


