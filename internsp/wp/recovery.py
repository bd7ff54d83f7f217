"""After an exception: together back to rest, or apart for good (WP-10)."""

from __future__ import annotations

import time
import uuid

import torch.distributed as dist

from internsp.errors import CollectiveError
from internsp.mesh import ParallelMesh
from internsp.wp.collectives import Ledger


class Recovery:
    """What the ranks of a stage do about a pass that did not end. Made by all of them together.

    Attributes:
        cause: what the failed pass raised, as far as it is known.
        failures: passes that did not end, so far.
        name: unique to this object, the same on all ranks of the stage.
    """

    def __init__(self, mesh: ParallelMesh, ledger: Ledger) -> None:
        self.cause = ""
        self._mesh = mesh
        self._ledger = ledger
        self.failures = 0
        self._broken = ""
        name = [uuid.uuid4().hex if dist.get_rank(mesh.stage_group) == 0 else ""]
        dist.broadcast_object_list(name, group=mesh.stage_group, group_src=0)
        self.name = name[0]

    def check(self) -> None:
        """Raise the first cause again, if the groups are lost."""
        if self._broken:
            raise CollectiveError(self._broken)

    def agree(self) -> None:
        """Return when every rank has failed at the same point: after as many launches.

        Blocks until all have said so, at most the mesh's timeout.

        Raises:
            CollectiveError: this rank failed alone, elsewhere, or in a collective. Its groups are
                aborted, so that no rank waits for it, and :meth:`check` raises from now on.
        """
        self.failures += 1
        mesh = self._mesh
        together = all_meet(
            default_store(),
            f"internsp/{self.name}/failed/{self.failures}",
            None if self._ledger.failure else self._ledger.launched,
            mesh.rank,
            mesh.shape.ranks("stage")[mesh.pipeline_rank],
            mesh.timeout_seconds,
        )
        if together:
            self.cause = ""
            return
        cause = self.cause or "a pass that did not end"
        self._broken = self._ledger.failure or (
            f"rank {mesh.rank} failed alone ({cause}), or others failed at another point; its "
            "groups are aborted because the ranks cannot be in the same place. Restart the job "
            "from a checkpoint"
        )
        for group in mesh.pass_groups:
            abort(group)
        raise CollectiveError(self._broken)


def all_meet(
    store: dist.Store, key: str, place: int | None, rank: int, ranks: list[int], seconds: float
) -> bool:
    """Whether all ``ranks`` come to the same ``place`` within ``seconds``, by the store alone.

    Used after an exception, when no collective may be trusted (WP-10). All ranks get the same
    answer, the first that anyone gives: a rank that has given up is not joined later. ``None``
    gives up at once.
    """
    store.set(f"{key}/{rank}", str(place))
    posted, verdict = [f"{key}/{r}" for r in ranks], f"{key}/verdict"
    deadline = time.monotonic() + seconds
    while place is not None and not store.check([verdict]):
        if store.check(posted) or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    same = place is not None and store.check(posted)
    same = same and all(store.get(k).decode() == str(place) for k in posted)
    return bool(store.compare_set(verdict, "", "together" if same else "apart") == b"together")


def abort(group: dist.ProcessGroup) -> None:
    """End ``group`` now: whoever waits in one of its collectives gets an error."""
    if dist.get_backend(group) == "nccl":
        dist.distributed_c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def default_store() -> dist.Store:
    """The store with which the default process group was made."""
    return dist.distributed_c10d._get_default_store()
