"""After an exception: together back to rest, or apart for good (WP-10)."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from internsp.errors import CollectiveError
from internsp.failure.last_words import when_process_ends
from internsp.failure.ledger import Ledger
from internsp.failure.lookout import LOOK_SECONDS, Lookout, sever
from internsp.failure.outcome import is_consequence
from internsp.mesh import ParallelMesh


class Recovery:
    """What the ranks of a stage do about a pass that did not end. Made by all of them together.

    Attributes:
        cause: what the failed pass raised, as far as it is known.
        failures: passes that did not end, so far.
        name: unique to this object, the same on all ranks of the stage.
        shared_name: the same also on the other tensor ranks' stages.
        lookout: tells the other ranks where this one stands still, and ends waits in vain.
    """

    def __init__(self, mesh: ParallelMesh, ledger: Ledger) -> None:
        self.cause = ""
        self._mesh = mesh
        self._ledger = ledger
        ledger.first_cause = self.first_cause
        self.failures = 0
        self._broken = ""
        self._vague = ""  # what this rank has said of a failure whose cause it did not know
        # Of its own: the default group may be destroyed before the last words.
        self._store = default_store()
        name = [uuid.uuid4().hex if dist.get_rank(mesh.model_group) == 0 else ""]
        dist.broadcast_object_list(name, group=mesh.model_group, group_src=0)
        self.shared_name = name[0]
        self.name = f"{name[0]}/{mesh.tensor_rank}" if mesh.tensor > 1 else name[0]
        self.lookout = Lookout(
            mesh, ledger, self._store, f"internsp/{self.name}", self._given_up
        )
        ledger.lost = self._lost
        when_process_ends(self, Recovery._ends)

    def failed(self, cause: str, vague: bool = False) -> None:
        """This rank has raised ``cause``: say so at once to the ranks that will wait for it.

        The first cause of the ranks that fail stands; what merely follows from another's is none.

        Args:
            vague: only that it failed is known; a later call may say why.
        """
        if vague and self.cause:
            return
        self.cause = cause
        if self._ledger.failure:
            return
        text = f"rank {self._mesh.rank} failed first: {cause}"
        with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone with its rank
            self._store.compare_set(self._key, self._vague, text)
        self._vague = text if vague else ""
        self.lookout.failed(cause)

    def refused(self, error: BaseException) -> None:
        """``error`` was raised at rest, on this rank at least: nothing of a pass is left."""
        if not self._ledger.failure and not is_consequence(error):
            self.lookout.refused(f"{type(error).__name__}: {error}")

    def annotate(self, error: BaseException) -> None:
        """Name the cause of what torch raised where this rank was freed from a wait in vain."""
        if not is_consequence(error) or isinstance(error, CollectiveError):
            return
        if cause := self.first_cause():
            error.add_note(cause)

    def backward_failed(self) -> None:
        """A backward has not come to its end; its exception is on the way to its caller."""
        self.failed("its backward raised; its own error says why", vague=True)

    def _ends(self, error: BaseException | None) -> None:
        """The process ends, by ``error``, which may have come from anywhere, or by none."""
        rank = self._mesh.rank
        if error is None and not dist.is_initialized():
            return  # its program has left the group in order
        with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone with its rank
            if error is None:
                said = f"rank {rank}'s program has ended (sys.exit, or its last line) before others"
                self._store.compare_set(self._ended, "", said)
                return
            if (not self.cause or self._vague) and not is_consequence(error):
                self.failed(f"{type(error).__name__}: {error}")
            self._store.set(f"internsp/{self.name}/gone", str(rank))
        if _holds_store(rank) and self._mesh.shape.stage_size > 1:
            self.lookout.sever()  # they are to ask now, while there is an answer
            time.sleep(2 * LOOK_SECONDS)

    def together(self) -> None:
        """All ranks have met otherwise, and go on: what has failed is over."""
        self.failures += 1
        self.cause = self._vague = ""
        self.lookout.together()

    def first_cause(self) -> str:
        """Which rank failed first since the ranks were last together, and why; else empty."""
        if self.lookout.doom:
            return self.lookout.doom
        try:
            for key in (self._key, self._ended):
                if self._store.check([key]):
                    return self._store.get(key).decode()
        except (RuntimeError, ValueError):
            return (
                "The process that held the ranks' store has ended (rank 0's, where no launcher "
                "holds it), and what other ranks had said of the cause with it: see its log"
            )
        return ""

    def _given_up(self, why: str) -> str:
        """On the lookout's thread: this rank can never go on. Returns what all ranks call it."""
        first = b""
        with contextlib.suppress(RuntimeError, ValueError):
            first = self._store.compare_set(self._cause_key(self.lookout.epoch), "", why)
            self._refuse_to_meet()
        return first.decode() or why

    def _lost(self, message: str) -> None:
        """A collective has failed here: no rank shall wait for this one."""
        self.lookout.lost(self.first_cause() or message)
        with contextlib.suppress(RuntimeError, ValueError):
            self._refuse_to_meet()

    def _refuse_to_meet(self) -> None:
        self._store.compare_set(f"{self._meeting(self.lookout.epoch)}/verdict", "", "apart")

    def _meeting(self, epoch: int) -> str:
        return f"internsp/{self.name}/failed/{epoch + 1}"

    @property
    def _key(self) -> str:
        return self._cause_key(self.failures)

    @property
    def _ended(self) -> str:
        return f"internsp/{self.name}/ended"

    def _cause_key(self, epoch: int) -> str:
        return f"internsp/{self.name}/cause/{epoch}"

    def check(self) -> None:
        """Raise the first cause again, if the groups are lost."""
        if self._broken:
            raise CollectiveError(self._broken)

    def _doomed(self) -> str:
        doom = self.lookout.doom
        return f"rank {self._mesh.rank} cannot go on: {doom}. Restart the job" if doom else ""

    def agree(self) -> None:
        """Return when every rank has failed at the same point: after as many launches.

        Blocks until all have said so, at most the mesh's timeout.

        Raises:
            CollectiveError: this rank failed alone, elsewhere, or in a collective. Its groups are
                aborted, so that no rank waits for it, and :meth:`check` raises from now on.
        """
        first, self._vague = self.first_cause(), ""
        mesh, lost = self._mesh, bool(self._ledger.failure or self.lookout.doom)
        self.lookout.failed(self.cause or "a pass that did not end", agrees=True)
        key = self._meeting(self.failures)
        self.failures += 1
        together = all_meet(
            self._store,
            key,
            None if lost else self._ledger.place(),
            mesh.rank,
            mesh.stage_ranks,
            mesh.timeout_seconds,
            f"internsp/{self.name}/gone",
        )
        if together:
            self.cause = ""
            self.lookout.together()
            return
        cause = self.cause or "a pass that did not end"
        self.lookout.lost(first or f"rank {mesh.rank} failed first: {cause}")
        self._broken = self._ledger.failure or self._doomed() or (
            f"rank {mesh.rank} failed alone ({cause}), or others failed at another point"
            f"{f' ({first})' if first and cause not in first else ''}; its "
            "groups are aborted because the ranks cannot be in the same place. Restart the job "
            "from a checkpoint"
        )
        for group in mesh.pass_groups:
            abort(group)
        raise CollectiveError(self._broken)


@contextlib.contextmanager
def unbroken(
    recoveries: Sequence[Recovery], what: str = "the optimizer's step"
) -> Iterator[None]:
    """What is done between passes: an exception leaves no pass open, but others may wait.

    Raises:
        CollectiveError: a wait inside was in vain; it names the cause.
    """
    for recovery in recoveries:
        recovery.lookout.begin()
    try:
        yield
    except CollectiveError:
        raise
    except Exception as error:
        for recovery in recoveries:
            recovery.refused(error)
        if isinstance(error, RuntimeError) and is_consequence(error):
            raise recoveries[0]._ledger.failed(what, error) from error
        raise


def all_equal(places: Sequence[str]) -> bool:
    """Whether all are at one place."""
    return len(set(places)) == 1


def all_meet(
    store: dist.Store,
    key: str,
    place: str | None,
    rank: int,
    ranks: Sequence[int],
    seconds: float,
    gone: str = "",
    same: Callable[[Sequence[str]], bool] = all_equal,
) -> bool:
    """Whether all ``ranks`` come to the same ``place`` within ``seconds``, by the store alone.

    Used after an exception, when no collective may be trusted (WP-10). All ranks get the same
    answer, the first that anyone gives: a rank that has given up is not joined later. ``None``
    gives up at once.

    Args:
        gone: a key that is set where a rank has ended for good.
        same: whether the places of ``ranks``, in their order, are the same.
    """
    store.set(f"{key}/{rank}", "apart" if place is None else place)
    posted, verdict = [f"{key}/{r}" for r in ranks], f"{key}/verdict"
    deadline = time.monotonic() + seconds
    while place is not None and not store.check([verdict]):
        late = time.monotonic() > deadline or (gone and store.check([gone]))
        if late or store.check(posted):
            break
        time.sleep(0.01)
    met = place is not None and store.check(posted)
    met = met and same([store.get(k).decode() for k in posted])
    return bool(store.compare_set(verdict, "", "together" if met else "apart") == b"together")


def abort(group: dist.ProcessGroup) -> None:
    """End ``group`` now: a rank that waits in one of its collectives gets an error."""
    if dist.get_backend(group) == "nccl":
        dist.distributed_c10d._abort_process_group(group)
    else:
        sever(group)
        dist.destroy_process_group(group)


def _holds_store(rank: int) -> bool:
    """Whether the ranks' store most likely ends with this process."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def default_store() -> dist.Store:
    """The store with which the default process group was made."""
    return dist.distributed_c10d._get_default_store()
