"""One rank's failure ends the pipeline everywhere, with its cause named (WP-10).

Stages are never at the same point of a schedule, so there is no rest to come back to: the first
rank that fails writes its cause into the process group's store and ends its groups, so that whoever
waits for it is told instead of waiting.
"""

from __future__ import annotations

import contextlib
import uuid
from types import TracebackType

import torch.distributed as dist

from internsp.errors import CollectiveError
from internsp.mesh import ParallelMesh
from internsp.wp.recovery import abort, default_store


class Watch:
    """A context for each step. Made by all ranks of the world together.

    Attributes:
        open: whether a step runs.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self.open = False
        self._mesh = mesh
        self._failure = ""
        name = [uuid.uuid4().hex if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(name)
        self._key = f"internsp/{name[0]}/pipeline"

    def __enter__(self) -> None:
        if self._failure:
            raise CollectiveError(self._failure)
        self.open = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.open = False
        if error is None:
            return
        mesh, root = self._mesh, _root(error)
        mine = (
            f"rank {mesh.rank}, pipeline rank {mesh.pipeline_rank}, failed first: "
            f"{type(root).__name__}: {root}"
        )
        first = mine
        with contextlib.suppress(RuntimeError):  # the store may be gone with its rank
            first = default_store().compare_set(self._key, "", mine).decode() or mine
        self._failure = f"the pipeline has ended: {first}"
        for group in dict.fromkeys((mesh.pipeline_group, *mesh.pass_groups, mesh.stage_group)):
            with contextlib.suppress(ValueError, RuntimeError):
                abort(group)
        if first != mine and isinstance(error, Exception):
            raise CollectiveError(self._failure) from error


def _root(error: BaseException) -> BaseException:
    """torch wraps what a chunk raises in two errors of its own; the first one is the cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
