"""What ends with a mesh: the process groups that it has made, and the work of models on it.

torch keeps every process group until it is destroyed, and each gloo group has three threads. So a
mesh that nothing refers to any more would leave its threads behind.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Collection, Iterable
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d

from internsp.base.accelerator import backends_of
from internsp.errors import MeshError

_TABLES = (
    "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg",
    "pg_coalesce_state",
)  # fmt: skip
MANY_GROUPS = 50
"""With more groups than this on a rank, garbage is collected before a mesh makes others."""


class MeshUser(Protocol):
    """A model on a mesh, as :meth:`ParallelMesh.close` sees it."""

    def before_close(self) -> None:
        """Wait for what is in flight, without launching anything.

        Raises:
            MeshError: a pass runs, or has failed.
        """

    def closed(self) -> None:
        """The groups are going to end: refer to them no more."""


class MeshUsers:
    """The models on a mesh, held weakly: they are told of its end."""

    def __init__(self) -> None:
        self._users: weakref.WeakSet[MeshUser] = weakref.WeakSet()
        self._closed = ""

    def add(self, user: MeshUser) -> None:
        """Tell ``user`` when the mesh is closed."""
        self._users.add(user)

    def all(self) -> list[MeshUser]:
        """Those that are still used."""
        return list(self._users)

    def end(self, closed: str) -> None:
        """Tell all of them. ``closed`` says of which mesh, for :meth:`refusal`."""
        self._closed = closed
        for user in self.all():
            user.closed()

    def refusal(self, what: str) -> MeshError:
        """The error for a use of ``what`` after the end."""
        return MeshError(
            f"{self._closed}, so that {what} cannot be used any more: close it after its last use, "
            "or make a new mesh and call parallelize() on a model for it"
        )


class OwnedGroups:
    """Process groups that end together.

    The mesh refers to this object, and it lives as long as the ``DeviceMesh`` objects by which
    parameters find the groups by name. Once all of these are garbage, Python's next full collection
    ends each gloo group that nothing else refers to. (A group that a program has kept stays, and so
    do groups of other backends, whose end may be collective.)
    """

    def __init__(self, groups: Iterable[dist.ProcessGroup], meshes: Iterable[object]) -> None:
        for mesh in meshes:  # neither changed nor kept alive
            weakref.finalize(mesh, lambda _: None, self).atexit = False
        self._groups = list(dict.fromkeys(groups))
        # The process ends its threads itself.
        weakref.finalize(self, _end_after_collection, self._groups).atexit = False

    def add(self, group: dist.ProcessGroup) -> None:
        """Take over one more group."""
        self._groups.append(group)

    def end_one(self, group: dist.ProcessGroup) -> None:
        """Destroy one group now."""
        self._groups.remove(group)
        _destroy(group)

    def end(self, but: Collection[dist.ProcessGroup]) -> None:
        """Destroy all groups now except ``but``, each rank by itself; these end as garbage.

        Nothing may be in flight in them. Those that the program has destroyed have ended.
        """
        for group in [group for group in self._groups if group not in but]:
            if _is_registered(group):
                self.end_one(group)
        _forget_meshes()


def has_many_groups() -> bool:
    """Whether dropped meshes may be among the groups of this process."""
    return len(distributed_c10d._world.pg_map) > MANY_GROUPS


def collect_garbage() -> None:
    """End the groups of dropped meshes.

    All ranks do it at one time: one that has forgotten an earlier mesh which the others remember
    would find its parameters by other groups than they do, and wait for them (seen).
    """
    _forget_meshes()
    gc.collect()


def _forget_meshes() -> None:
    """Clear torch's table of the layouts of results, which keeps a ``DeviceMesh``.

    It gives results on a mesh the ``DeviceMesh`` of an earlier one that equals it, so that groups
    by which DTensors are found may not end with the mesh for which they were made.
    """
    # At the top it would load torch.compile, a second of each program's start.
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def _end_after_collection(groups: list[dist.ProcessGroup]) -> None:
    """Called when the groups are needed no more, perhaps within a collection, in which other
    garbage still refers to them: wait for the end of a full one."""

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase != "stop" or info["generation"] < 2 or sys.is_finalizing():
            return
        if threading.current_thread() is not threading.main_thread():
            return  # the main thread may be reading torch's tables of groups
        groups[:] = filter(_is_registered, groups)  # none after the default group's end
        counts = _references(groups)  # before another list refers to them
        for group, references in zip(groups[:], counts, strict=True):
            if not references:
                groups.remove(group)
                _destroy(group)
        if not groups:
            gc.callbacks.remove(collected)

    alone = {"gloo"}
    groups[:] = [g for g in groups if _is_registered(g) and {*backends_of(g).values()} == alone]
    gc.callbacks.append(collected)


def _references(groups: list[dist.ProcessGroup]) -> list[int]:
    """How many references each group has, beside those of the list and of torch's registry."""
    registry = [getattr(distributed_c10d._world, name) for name in _TABLES]
    lists = [v for table in registry for v in table.values() if isinstance(v, list)]
    held = [object()]  # an object that only a list refers to
    (alone,) = [sys.getrefcount(each) for each in held]
    counts = [sys.getrefcount(each) - alone for each in groups]
    for i, group in enumerate(groups):
        counts[i] -= sum(group in table for table in registry)
        counts[i] -= sum(each is group for entries in lists for each in entries)
    return counts


def _is_registered(group: Any) -> bool:
    return group in distributed_c10d._world.pg_map


def _destroy(group: dist.ProcessGroup) -> None:
    if _is_registered(group):  # not after an abort, or once the default group has ended
        names: dict[Any, Any] = distributed_c10d._world.pg_names
        name = names[group]
        dist.destroy_process_group(group)
        names[_Ended()] = name


class _Ended:
    """In the place of an ended group in torch's table of names, from whose length it makes names.

    Else a name would be used twice, or ranks on which fewer groups have ended use another one.
    """

    def shutdown(self) -> None:
        """As a group's: torch calls it at the end of the default group."""

    abort = shutdown
