"""After an exception: the ranks recover together, or abort their process groups (WP-10)."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from internsp.errors import CollectiveError
from internsp.failure.comm_context import CommContext
from internsp.failure.detection import call_at_exit
from internsp.failure.guard import CHECK_SECONDS, FailureGuard, close_connections
from internsp.failure.outcome import is_consequence
from internsp.mesh import ParallelMesh


class Recovery:
    """Brings the ranks of a stage back after a forward or backward that did not complete.

    The constructor is collective over the mesh's model group.

    Attributes:
        cause: text of the exception that the failed pass raised, as far as it is known.
        failures: number of passes that did not complete so far.
        name: unique to this object, the same on all ranks of the stage.
        shared_name: as ``name``, but the same on all ranks of the mesh's model group.
        guard: publishes to the other ranks why this rank makes no progress, and ends waits that
            cannot complete.
    """

    def __init__(self, mesh: ParallelMesh, comm_context: CommContext) -> None:
        self.cause = ""
        self._mesh = mesh
        self._comm_context = comm_context
        comm_context.first_cause = self.first_cause
        self.failures = 0
        self._lost_message = ""
        self._unknown_cause = ""  # the text that this rank published for a failure without a cause
        # Kept: the default group may be destroyed before _at_exit uses its store.
        self._store = default_store()
        name = [uuid.uuid4().hex if dist.get_rank(mesh.model_group) == 0 else ""]
        dist.broadcast_object_list(name, group=mesh.model_group, group_src=0)
        self.shared_name = name[0]
        self.name = f"{name[0]}/{mesh.tensor_rank}" if mesh.tensor > 1 else name[0]
        self.guard = FailureGuard(
            mesh, comm_context, self._store, f"internsp/{self.name}", self._on_fatal_cause
        )
        comm_context.on_failure = self._on_collective_failure
        call_at_exit(self, Recovery._at_exit)

    def report_failure(self, cause: str, cause_unknown: bool = False) -> None:
        """Publish at once, for the ranks that will wait for this rank, that it raised ``cause``.

        The store keeps the cause that is published first.

        Args:
            cause_unknown: only the failure is known; a later call may replace the text by the
                cause.
        """
        if cause_unknown and self.cause:
            return
        self.cause = cause
        if self._comm_context.failure:
            return
        text = f"rank {self._mesh.rank} failed first: {cause}"
        with contextlib.suppress(RuntimeError, ValueError):  # the store's process may be gone
            self._store.compare_set(self._current_cause_key, self._unknown_cause, text)
        self._unknown_cause = text if cause_unknown else ""
        self.guard.report_failed(cause)

    def report_refusal(self, error: BaseException) -> None:
        """Publish ``error``, which a call between passes raised on this rank: no pass is open."""
        if not self._comm_context.failure and not is_consequence(error):
            self.guard.report_refused(f"{type(error).__name__}: {error}")

    def add_cause_note(self, error: BaseException) -> None:
        """Add the first cause as a note to ``error``, if it only follows from another's failure."""
        if not is_consequence(error) or isinstance(error, CollectiveError):
            return
        if cause := self.first_cause():
            error.add_note(cause)

    def report_backward_failure(self) -> None:
        """Publish that a backward raised; its exception is still on the way to its caller."""
        self.report_failure("its backward raised; its own error says why", cause_unknown=True)

    def _at_exit(self, error: BaseException | None) -> None:
        """Publish that this process ends, by the uncaught exception ``error`` or by none."""
        rank = self._mesh.rank
        if error is None and not dist.is_initialized():
            return  # the program has destroyed the process group, as it should
        with contextlib.suppress(RuntimeError, ValueError):  # the store's process may be gone
            if error is None:
                text = f"rank {rank}'s program has ended (sys.exit, or its last line) before others"
                self._store.compare_set(self._exit_key, "", text)
                return
            if (not self.cause or self._unknown_cause) and not is_consequence(error):
                self.report_failure(f"{type(error).__name__}: {error}")
            self._store.set(f"internsp/{self.name}/gone", str(rank))
        if _holds_store(rank) and self._mesh.shape.stage_size > 1:
            # The other ranks must read the cause now, while this process still holds the store.
            self.guard.abort_collectives()
            time.sleep(2 * CHECK_SECONDS)

    def reset(self) -> None:
        """Forget the last failure: the pipeline has made sure that all ranks go on together."""
        self.failures += 1
        self.cause = self._unknown_cause = ""
        self.guard.reset()

    def first_cause(self) -> str:
        """Text: the rank that failed first since the last recovery, and why; empty if none did."""
        if self.guard.fatal_cause:
            return self.guard.fatal_cause
        try:
            for key in (self._current_cause_key, self._exit_key):
                if self._store.check([key]):
                    return self._store.get(key).decode()
        except (RuntimeError, ValueError):
            return (
                "The process that held the ranks' store has ended (rank 0's, where no launcher "
                "holds it), and with it the causes that other ranks had reported: see its log"
            )
        return ""

    def _on_fatal_cause(self, why: str) -> str:
        """Called on the guard's thread if this rank can never go on, because of ``why``.

        Returns:
            The cause that all ranks report: the one that the store has got first.
        """
        first = b""
        with contextlib.suppress(RuntimeError, ValueError):
            first = self._store.compare_set(self._cause_key(self.guard.epoch), "", why)
            self._refuse_consensus()
        return first.decode() or why

    def _on_collective_failure(self, message: str) -> None:
        """Called when a collective failed on this rank: no other rank must wait for this rank."""
        self.guard.report_lost(self.first_cause() or message)
        with contextlib.suppress(RuntimeError, ValueError):
            self._refuse_consensus()

    def _refuse_consensus(self) -> None:
        self._store.compare_set(f"{self._consensus_key(self.guard.epoch)}/verdict", "", "refused")

    def _consensus_key(self, epoch: int) -> str:
        return f"internsp/{self.name}/failed/{epoch + 1}"

    @property
    def _current_cause_key(self) -> str:
        return self._cause_key(self.failures)

    @property
    def _exit_key(self) -> str:
        return f"internsp/{self.name}/ended"

    def _cause_key(self, epoch: int) -> str:
        return f"internsp/{self.name}/cause/{epoch}"

    def check(self) -> None:
        """Raise again if an earlier failure has aborted the groups.

        Raises:
            CollectiveError: the groups are aborted; the message names the first cause.
        """
        if self._lost_message:
            raise CollectiveError(self._lost_message)

    def _fatal_message(self) -> str:
        cause = self.guard.fatal_cause
        return f"rank {self._mesh.rank} cannot go on: {cause}. Restart the job" if cause else ""

    def reach_consensus(self) -> None:
        """Return once every rank of the stage has failed at the same point.

        Ranks are at the same point if they have launched equally many collectives. Blocks until
        all ranks have reported, for at most the mesh's timeout.

        Raises:
            CollectiveError: this rank failed alone, at another point than others, or in a
                collective. Its groups are aborted, so that no rank waits for it, and :meth:`check`
                raises from now on.
        """
        first, self._unknown_cause = self.first_cause(), ""
        mesh, lost = self._mesh, bool(self._comm_context.failure or self.guard.fatal_cause)
        self.guard.report_failed(self.cause or "a pass that did not end", recovering=True)
        key = self._consensus_key(self.failures)
        self.failures += 1
        agreed = store_consensus(
            self._store,
            key,
            None if lost else self._comm_context.position(),
            mesh.rank,
            mesh.stage_ranks,
            mesh.timeout_seconds,
            f"internsp/{self.name}/gone",
        )
        if agreed:
            self.cause = ""
            self.guard.reset()
            return
        cause = self.cause or "a pass that did not end"
        self.guard.report_lost(first or f"rank {mesh.rank} failed first: {cause}")
        self._lost_message = self._comm_context.failure or self._fatal_message() or (
            f"rank {mesh.rank} failed alone ({cause}), or others failed at another point"
            f"{f' ({first})' if first and cause not in first else ''}; its "
            "groups are aborted because the ranks are at different points. Restart the job from a "
            "checkpoint"
        )
        for group in mesh.pass_groups:
            abort_group(group)
        raise CollectiveError(self._lost_message)


@contextlib.contextmanager
def reporting_refusals(
    recoveries: Sequence[Recovery], what: str = "the optimizer's step"
) -> Iterator[None]:
    """Context for a call between passes, such as a step: publishes an exception to other ranks.

    No pass is open when such a call raises, but other ranks may wait for this rank.

    Args:
        what: the call, for an error.

    Raises:
        CollectiveError: a wait inside failed because of another rank; the message has the cause.
    """
    for recovery in recoveries:
        recovery.guard.begin_pass()
    try:
        yield
    except CollectiveError:
        raise
    except Exception as error:
        for recovery in recoveries:
            recovery.report_refusal(error)
        if isinstance(error, RuntimeError) and is_consequence(error):
            raise recoveries[0]._comm_context.record_failure(what, error) from error
        raise


def all_equal(positions: Sequence[str]) -> bool:
    """Whether all positions are the same."""
    return len(set(positions)) == 1


def store_consensus(
    store: dist.Store,
    key: str,
    position: str | None,
    rank: int,
    ranks: Sequence[int],
    seconds: float,
    gone_key: str = "",
    same: Callable[[Sequence[str]], bool] = all_equal,
) -> bool:
    """Whether all ``ranks`` report the same ``position`` within ``seconds``. Blocks.

    Uses the store alone: after an exception no collective can be relied on (WP-10). All ranks get
    the same verdict, the first that any rank writes: once a rank has given up, no rank agrees.

    Args:
        key: prefix of the keys of this consensus.
        position: where this rank is; ``None``: this rank refuses, and does not wait.
        gone_key: a key that is set once a process of these ranks has ended.
        same: whether the positions of ``ranks``, in their order, are the same.
    """
    store.set(f"{key}/{rank}", "refused" if position is None else position)
    posted, verdict = [f"{key}/{r}" for r in ranks], f"{key}/verdict"
    deadline = time.monotonic() + seconds
    while position is not None and not store.check([verdict]):
        late = time.monotonic() > deadline or (gone_key and store.check([gone_key]))
        if late or store.check(posted):
            break
        time.sleep(0.01)
    agreed = position is not None and store.check(posted)
    agreed = agreed and same([store.get(k).decode() for k in posted])
    return bool(store.compare_set(verdict, "", "agreed" if agreed else "refused") == b"agreed")


def abort_group(group: dist.ProcessGroup) -> None:
    """Abort ``group`` now: every rank that waits in one of its collectives gets an error."""
    if dist.get_backend(group) == "nccl":
        dist.distributed_c10d._abort_process_group(group)
    else:
        close_connections(group)
        dist.destroy_process_group(group)


def _holds_store(rank: int) -> bool:
    """Whether this process most likely holds the ranks' store, which then ends with it."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def default_store() -> dist.Store:
    """The store with which the default process group was made."""
    return dist.distributed_c10d._get_default_store()
