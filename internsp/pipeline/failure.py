"""Reset a pipeline after a failed step, or abort its groups where a reset is impossible (WP-10).

Stages are never at the same point of a schedule, and a stage that fails leaves others waiting for
its messages. Therefore a rank that fails writes its cause into the process group's store, and ranks
that wait for it stop waiting (:mod:`internsp.pipeline.messages`). Messages that are still in flight
end with their connections: a new group replaces the old one once all ranks have failed.

The ranks of one stage must have failed at the same point: their gathers and reductions have one
order, and the groups of these are kept.
"""

from __future__ import annotations

import contextlib
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import torch.distributed as dist

from internsp.errors import CollectiveError
from internsp.failure.detection import call_at_exit
from internsp.failure.guard import close_connections
from internsp.failure.outcome import is_consequence
from internsp.failure.recovery import abort_group, default_store, store_consensus
from internsp.mesh import ParallelMesh
from internsp.pipeline.messages import Messages
from internsp.wp.communicator import ISPCommunicator

# Functions in which a stage waits for another one: torch's, and ours for tied weights.
_BETWEEN_STAGES = {"_wait_batch_p2p", "_batch_p2p", "_send_meta", "_recv_meta", "send_and_receive"}


class PipelineFailureGuard:
    """A context for each step, which reports failures to the other ranks.

    All ranks of the world create it together.

    Args:
        communicators: the communicators of this rank's chunks.
        initialized: returns which initializations of torch's schedule, done before a first step,
            this rank has completed.
        reset_step: called once all ranks have failed; drops what the failed step has left.

    Attributes:
        running: whether a step runs.
        messages: messages between stages.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        communicators: Sequence[ISPCommunicator],
        initialized: Callable[[], str],
        reset_step: Callable[[], None],
    ) -> None:
        self.running = False
        self._in_consensus = False
        self._mesh = mesh
        self._communicators = communicators
        self._initialized = initialized
        self._reset_step = reset_step
        self._ended_by = ""
        self._failed = False
        self._failed_in_collective = False  # interrupted, and not in a wait between stages
        self._failures = self._steps = 0  # failed steps; steps that have begun
        self._earlier_sums: list[bool] = []  # by chunk: whether earlier steps have left gradients
        self._store = default_store()
        name = [uuid.uuid4().hex if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(name)
        self._name = f"internsp/{name[0]}"
        self.messages = Messages(self._store, mesh.rank, self._check_step_failed)
        call_at_exit(self, PipelineFailureGuard._on_process_end)

    def __enter__(self) -> None:
        self.running = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.running = False
        if error is None:
            return
        root = _root_cause(error)
        mine = self._describe(root)
        first = self._store_cause(mine)
        self._failed = True
        self._failed_in_collective = is_consequence(root) and not _between_stages(root)
        for communicator in self._communicators:  # other ranks of the stage may wait in any chunk
            if first == mine:
                communicator.recovery.report_failure(f"{type(root).__name__}: {root}")
            else:
                communicator.recovery.guard.report_failed(first)
        if self._position() is None:  # this rank cannot reset: no other shall wait for it
            self._refuse_reset()
        if self._mesh.device.type == "cpu":
            self.messages.store_counts()
        else:  # a stream's wait for a collective ends only with its group
            self._abort_groups(first)
        if first != mine and isinstance(error, Exception):
            raise CollectiveError(f"a step of the pipeline has failed: {first}") from error

    def begin_step(self) -> None:
        """Begin a step; after a failed one first reset on all ranks together.

        Raises:
            CollectiveError: a rank has not failed with the others, or failed at another point. The
                groups are aborted, and every later call raises the same error.
        """
        if self._ended_by:
            raise CollectiveError(self._ended_by)
        first = self._first_cause()
        if self._failed or first:
            self._recover(first)
        self._steps += 1
        self._earlier_sums = [communicator.begin_step() for communicator in self._communicators]
        if self._mesh.device.type == "cpu" and self._mesh.pipeline > 1:
            self.messages.begin_step(f"{self._name}/messages/{self._failures}")

    @contextlib.contextmanager
    def step_consensus(self) -> Iterator[None]:
        """Context in which the ranks agree to run the step that has begun.

        A failure inside is reported to the other ranks like a failure of the step.
        """
        with self:
            self._in_consensus = True
            try:
                yield
            finally:
                self._in_consensus = False

    def _check_step_failed(self) -> None:
        """End the wait of :meth:`step_consensus` if a rank has failed in an earlier step.

        That rank will not begin this step. Runs on the thread of :class:`Messages`.
        """
        keys = [self._cause_key, self._failed_step_key]
        if not self._in_consensus or not self._store.check(keys):
            return
        if int(self._store.get(self._failed_step_key)) < self._steps:
            for group in (self._mesh.stage_group, self._mesh.pipeline_group):
                close_connections(group)

    @property
    def _failed_step_key(self) -> str:
        return f"{self._name}/step/{self._failures}"

    def _recover(self, first: str) -> None:
        mesh = self._mesh
        together = store_consensus(
            self._store,
            self._reset_key,
            self._position(),
            mesh.rank,
            range(mesh.world_size),
            mesh.timeout_seconds,
            f"{self._name}/gone",
            self._same_positions,
        )
        if not together:
            self._abort_groups(first)
            raise CollectiveError(self._ended_by)
        try:
            for communicator, earlier in zip(self._communicators, self._earlier_sums, strict=True):
                communicator.recovery.reset()
                communicator.rest(earlier, step=True)
            # Before buffers are reused: a late message must not arrive in one of them.
            close_connections(mesh.pipeline_group)
            mesh.renew_pipeline_group()
        except RuntimeError:
            self._abort_groups(first)
            raise
        self._reset_step()
        self._failures += 1
        self._failed = self._failed_in_collective = False

    @property
    def _reset_key(self) -> str:
        return f"{self._name}/failed/{self._failures}"

    def _refuse_reset(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(f"{self._reset_key}/verdict", "", "refused")

    def _position(self) -> str | None:
        """The failed step and this rank's position in its stage's collectives, as text.

        ``None`` if this rank cannot be reset.
        """
        contexts = [c.state.collectives.comm_context for c in self._communicators]
        if not self._failed or self._failed_in_collective or any(c.failure for c in contexts):
            return None
        inside = " ".join(context.position() for context in contexts)
        return f"{self._steps} {self._initialized()}|{inside}"

    def _same_positions(self, positions: Sequence[str]) -> bool:
        """Whether all ranks failed in one step, and the ranks of each stage at one position."""
        steps = {position.partition("|")[0] for position in positions}
        stages = self._mesh.shape.ranks("stage")
        return len(steps) == 1 and all(len({positions[r] for r in ranks}) == 1 for ranks in stages)

    def _describe(self, error: BaseException) -> str:
        mesh = self._mesh
        return (
            f"rank {mesh.rank}, pipeline rank {mesh.pipeline_rank}, failed first: "
            f"{type(error).__name__}: {error}"
        )

    @property
    def _cause_key(self) -> str:
        return f"{self._name}/pipeline/{self._failures}"

    def _store_cause(self, mine: str) -> str:
        """Store this rank's cause unless there is one already; returns the stored cause."""
        with contextlib.suppress(RuntimeError):  # the store may be gone with its rank
            self._store.compare_set(self._failed_step_key, "", str(self._steps))
            return self._store.compare_set(self._cause_key, "", mine).decode() or mine
        return mine

    def _first_cause(self) -> str:
        with contextlib.suppress(RuntimeError):
            if self._store.check([self._cause_key]):
                return self._store.get(self._cause_key).decode()
        return ""

    def _abort_groups(self, first: str) -> None:
        mesh = self._mesh
        self._ended_by = f"the pipeline has ended: {first}"
        for group in dict.fromkeys((mesh.pipeline_group, *mesh.pass_groups, mesh.stage_group)):
            with contextlib.suppress(ValueError, RuntimeError):
                abort_group(group)

    def _on_process_end(self, error: BaseException | None) -> None:
        """This process ends with ``error``, possibly between two steps."""
        if error is None:
            return
        if not self._failed and not is_consequence(error):
            self._store_cause(self._describe(error))
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._name}/gone", str(self._mesh.rank))


def _root_cause(error: BaseException) -> BaseException:
    """The error that a chunk has raised, which torch wraps in two errors of its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _between_stages(error: BaseException) -> bool:
    """Whether ``error`` was raised while waiting for another stage."""
    frames = traceback.extract_tb(error.__traceback__)
    return not _BETWEEN_STAGES.isdisjoint(frame.name for frame in frames)
