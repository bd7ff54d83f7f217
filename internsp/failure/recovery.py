"""After an exception: ranks recover together, or abort their process groups (WP-10)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch.distributed as dist

from internsp.errors import CollectiveError
from internsp.failure.comm_context import CommContext
from internsp.failure.consensus import STORE_GONE, Consensus, default_store
from internsp.failure.detection import call_at_exit, is_consequence
from internsp.failure.guard import CHECK_SECONDS, FailureGuard, abort_collectives
from internsp.failure.objects import Objects
from internsp.mesh import ParallelMesh


class Recovery:
    """Ranks that go on together after a failure, or abort their groups: a stage's, a pipeline's.

    Args:
        consensus: of these ranks.
        who: this rank, in the text of a cause.

    Attributes:
        cause: text of the exception that this rank's pass or step raised, as far as it is known;
            empty while none has failed.
        failures: how often these ranks have recovered together.
    """

    def __init__(self, consensus: Consensus, who: str) -> None:
        self.cause = ""
        self.failures = 0
        self._ended_by = ""
        self._unknown_cause = ""  # the text that this rank published for a failure without a cause
        self._consensus, self._who = consensus, who
        call_at_exit(self, type(self)._at_exit)

    def report_failure(self, cause: str) -> str:
        """Publish at once, for the ranks that will wait for this rank, that it raised ``cause``.

        Returns:
            The text that was published first, by this rank or another: the store keeps it.
        """
        self.cause = cause
        topic = f"cause/{self.failures}"
        return self._consensus.first(topic, self._text(cause), self._unknown_cause)

    def first_cause(self) -> str:
        """Text: the rank that failed first since the last recovery, and why; empty if none did."""
        try:
            known = self._consensus.known
            return known(f"cause/{self.failures}") or known("ended")
        except (RuntimeError, ValueError):
            return (
                f"{STORE_GONE}, and with it the causes that other ranks had reported: see its log"
            )

    def check(self) -> None:
        """Raise again if an earlier failure has aborted the groups.

        Raises:
            CollectiveError: the groups are aborted; the message names the first cause.
        """
        if self._ended_by:
            raise CollectiveError(self._ended_by)

    def reset(self) -> None:
        """Forget the last failure: all ranks go on together."""
        self.failures += 1
        self.cause = self._unknown_cause = ""

    def _text(self, cause: str) -> str:
        return f"{self._who} failed first: {cause}"

    @property
    def _verdict_topic(self) -> str:
        return f"failed/{self.failures}"

    def _end(self, message: str, groups: Iterable[dist.ProcessGroup]) -> None:
        """Abort ``groups``, so that no rank waits in them: :meth:`check` raises from now on."""
        self._ended_by = message
        for group in dict.fromkeys(groups):
            abort_collectives(group)
            with contextlib.suppress(RuntimeError, ValueError):  # another model has destroyed it
                dist.destroy_process_group(group)

    def _at_exit(self, error: BaseException | None) -> None:
        """Publish that this process ends, by the uncaught exception ``error`` or by none."""
        if error is None and not dist.is_initialized():
            return  # the program has destroyed the process group, as it should
        if error is None:
            rank = dist.get_rank()
            text = f"rank {rank}'s program has ended (sys.exit, or its last line) before others"
            self._consensus.first("ended", text)
        elif (not self.cause or self._unknown_cause) and not is_consequence(error):
            self.report_failure(f"{type(error).__name__}: {error}")
        self._consensus.gone()


class StageRecovery(Recovery):
    """Brings the ranks of a stage back after a forward or backward that did not complete.

    The constructor is collective over the mesh's model group.

    Args:
        torchs: groups in which layers of ``parallelize_module`` communicate.

    Attributes:
        name: unique to this object, the same on all ranks of the stage.
        shared_name: as ``name``, but the same on all ranks of the mesh's model group.
        guard: publishes to the other ranks why this rank makes no progress, and ends waits that
            cannot complete.
    """

    def __init__(
        self, mesh: ParallelMesh, comm_context: CommContext,
        torchs: Collection[dist.ProcessGroup] = (),
    ) -> None:  # fmt: skip
        self._mesh, self._comm_context = mesh, comm_context
        self.shared_name = name = Objects(mesh.model_group).name()
        self.name = f"{name}/{mesh.tensor_rank}" if mesh.tensor > 1 else name
        self.guard = FailureGuard(
            mesh, comm_context, default_store(), f"internsp/{self.name}", self._on_fatal_cause,
            torchs, {
                rank: f"internsp/{name}/{number}"
                for number, rank in enumerate(mesh.tensor_ranks) if rank != mesh.rank
            },
        )  # fmt: skip
        super().__init__(self.among(self.name, mesh.stage_ranks), f"rank {mesh.rank}")
        comm_context.first_cause = self.first_cause
        comm_context.on_failure = self._on_collective_failure

    def among(self, name: str, ranks: Sequence[int]) -> Consensus:
        """A consensus of ``ranks``, whose waits the guard watches; ``name`` is unique to it."""
        mesh = self._mesh
        return Consensus(f"internsp/{name}", mesh.rank, ranks, mesh.timeout_seconds, self.guard)

    def report_failure(self, cause: str, cause_unknown: bool = False) -> str:
        """See :meth:`Recovery.report_failure`.

        Args:
            cause_unknown: only the failure is known; a later call may replace the text by the
                cause.
        """
        known = self.cause if cause_unknown else ""
        if known or self._comm_context.failure:
            self.cause = known or cause
            return self.first_cause()
        first = super().report_failure(cause)
        self._unknown_cause = self._text(cause) if cause_unknown else ""
        self.guard.report_failed(cause)
        return first

    def report_backward_failure(self) -> None:
        """Publish that a backward raised; its exception is still on the way to its caller."""
        self.report_failure("its backward raised; its own error says why", cause_unknown=True)

    def report_refusal(self, error: BaseException) -> None:
        """Publish ``error``, which a call between passes raised on this rank: no pass is open."""
        if not self._comm_context.failure and not is_consequence(error):
            self.guard.report_refused(f"{type(error).__name__}: {error}")

    def add_cause_note(self, error: BaseException) -> None:
        """Add the first cause as a note to ``error``, if it only follows from another's failure."""
        cause = self.first_cause() if is_consequence(error) else ""
        if cause not in str(error):
            error.add_note(cause)

    def first_cause(self) -> str:
        """See :meth:`Recovery.first_cause`."""
        return self.guard.fatal_cause or super().first_cause()

    def check_lost(self, what: str) -> None:
        """Raise if this rank can never go on, though no wait for ``what`` has raised.

        On NCCL a wait orders streams, and an aborted collective leaves any values.

        Raises:
            CollectiveError: names the first cause.
        """
        if self.guard.fatal_cause:
            ended = RuntimeError("its process groups were aborted")
            raise self._comm_context.record_failure(what, ended)

    def reset(self) -> None:
        """See :meth:`Recovery.reset`."""
        super().reset()
        self.guard.reset()

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
        lost = bool(self._comm_context.failure or self.guard.fatal_cause)
        cause, rank = self.cause or "a pass that did not end", self._mesh.rank
        self.guard.report_failed(cause, recovering=True)
        position = None if lost else self._comm_context.position()
        if self._consensus.verdict(self._verdict_topic, position):
            self.reset()
            return
        self.guard.report_lost(first or self._text(cause))
        message = (
            f"rank {rank} failed alone ({cause}), or others failed at another point"
            f"{f' ({first})' if first and cause not in first else ''}; its "
            "groups are aborted because the ranks are at different points. Restart the job from a "
            "checkpoint"
        )
        if fatal := self.guard.fatal_cause:
            message = f"rank {rank} cannot go on: {fatal}. Restart the job"
        self._end(self._comm_context.failure or message, self._mesh.pass_groups)
        self.check()

    def _on_fatal_cause(self, why: str) -> str:
        """Called on the guard's thread if this rank can never go on, because of ``why``.

        Returns:
            The cause that all ranks report: the one that the store has got first.
        """
        first = self._consensus.first(f"cause/{self.failures}", why)
        self._consensus.refuse(self._verdict_topic)
        return first

    def _on_collective_failure(self, message: str) -> None:
        """Called when a collective failed on this rank: no other rank must wait for this rank."""
        self.guard.report_lost(self.first_cause() or message)
        self._consensus.refuse(self._verdict_topic)

    def _at_exit(self, error: BaseException | None) -> None:
        """See :meth:`Recovery._at_exit`."""
        super()._at_exit(error)
        elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        holds_store = self._mesh.rank == 0 and not elsewhere  # most likely
        if error is not None and holds_store and self._mesh.shape.stage_size > 1:
            # The other ranks must read the cause now: the store ends with this process.
            self.guard.abort_collectives()
            time.sleep(2 * CHECK_SECONDS)


@contextlib.contextmanager
def reporting_refusals(
    recoveries: Sequence[StageRecovery], what: str = "the optimizer's step"
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
