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
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from internsp.errors import CollectiveError
from internsp.failure.consensus import Consensus, default_store
from internsp.failure.detection import is_consequence
from internsp.failure.guard import close_connections
from internsp.failure.objects import Objects
from internsp.failure.recovery import Recovery
from internsp.mesh import ParallelMesh
from internsp.pipeline.messages import Messages
from internsp.wp.communicator import ISPCommunicator

# Functions in which a stage waits for another one: torch's, and ours for tied weights.
_BETWEEN_STAGES = {"_wait_batch_p2p", "_batch_p2p", "send_and_receive"}


class PipelineRecovery(Recovery):
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
        self._failed_in_collective = False  # interrupted, and not in a wait between stages
        self._steps = 0  # that have begun
        self._earlier_sums: list[bool] = []  # by chunk: whether earlier steps have left gradients
        self._name = f"internsp/{Objects().name()}"
        rank, ranks = mesh.rank, range(mesh.world_size)
        consensus = Consensus(self._name, rank, ranks, mesh.timeout_seconds)
        super().__init__(consensus, f"rank {rank}, pipeline rank {mesh.pipeline_rank},")
        self.messages = Messages(default_store(), rank, self._check_step_failed)

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
        root = error  # the error that a chunk has raised, which torch wraps in two of its own
        while root.__cause__ is not None:
            root = root.__cause__
        first = self.report_failure(f"{type(root).__name__}: {root}")
        came_first = first == self._text(self.cause)
        frames = {frame.name for frame in traceback.extract_tb(root.__traceback__)}
        between_stages = not _BETWEEN_STAGES.isdisjoint(frames)
        self._failed_in_collective = is_consequence(root) and not between_stages
        for communicator in self._communicators:  # other ranks of the stage may wait in any chunk
            if came_first:
                communicator.recovery.report_failure(self.cause)
            else:
                communicator.recovery.guard.report_failed(first)
        if self._position() is None:  # this rank cannot reset: no other shall wait for it
            self._consensus.refuse(self._verdict_topic)
        if self._mesh.device.type == "cpu":
            self.messages.store_counts()
        else:  # a stream's wait for a collective ends only with its group
            self._end_by(first)
        if not came_first and isinstance(error, Exception):
            raise CollectiveError(f"a step of the pipeline has failed: {first}") from error

    def report_failure(self, cause: str) -> str:
        """See :meth:`Recovery.report_failure`."""
        self._consensus.first(f"step/{self.failures}", str(self._steps))
        return super().report_failure(cause)

    def begin_step(self) -> None:
        """Begin a step; after a failed one first reset on all ranks together.

        Raises:
            CollectiveError: a rank has not failed with the others, or failed at another point. The
                groups are aborted, and every later call raises the same error.
        """
        self.check()
        first = self.first_cause()
        if self.cause or first:
            self._recover(first)
        self._steps += 1
        self._earlier_sums = [communicator.begin_step() for communicator in self._communicators]
        if self._mesh.device.type == "cpu" and self._mesh.pipeline > 1:
            self.messages.begin_step(f"{self._name}/messages/{self.failures}")

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
        if not self._in_consensus or not self._consensus.known(f"cause/{self.failures}"):
            return
        if int(self._consensus.known(f"step/{self.failures}") or self._steps) < self._steps:
            for group in (self._mesh.stage_group, self._mesh.pipeline_group):
                close_connections(group)

    def _recover(self, first: str) -> None:
        mesh = self._mesh
        if not self._consensus.verdict(self._verdict_topic, self._position(), self._same_positions):
            self._end_by(first)
            self.check()
        try:
            for communicator, earlier in zip(self._communicators, self._earlier_sums, strict=True):
                communicator.recovery.reset()
                communicator.events.reset(earlier, step=True)
            # Before buffers are reused: a late message must not arrive in one of them.
            close_connections(mesh.pipeline_group)
            mesh.renew_pipeline_group()
        except RuntimeError:
            self._end_by(first)
            raise
        self._reset_step()
        self.reset()

    def reset(self) -> None:
        """See :meth:`Recovery.reset`."""
        super().reset()
        self._failed_in_collective = False

    def _position(self) -> str | None:
        """The failed step and this rank's position in its stage's collectives, as text.

        ``None`` if this rank cannot be reset.
        """
        contexts = [c.state.collectives.comm_context for c in self._communicators]
        if not self.cause or self._failed_in_collective or any(c.failure for c in contexts):
            return None
        inside = " ".join(context.position() for context in contexts)
        return f"{self._steps} {self._initialized()}|{inside}"

    def _same_positions(self, positions: Sequence[str]) -> bool:
        """Whether all ranks failed in one step, and the ranks of each stage at one position."""
        steps = {position.partition("|")[0] for position in positions}
        stages = self._mesh.shape.ranks("stage")
        return len(steps) == 1 and all(len({positions[r] for r in ranks}) == 1 for ranks in stages)

    def _end_by(self, first: str) -> None:
        mesh = self._mesh
        groups = (mesh.pipeline_group, *mesh.pass_groups, mesh.stage_group)
        self._end(f"the pipeline has ended: {first}", groups)
