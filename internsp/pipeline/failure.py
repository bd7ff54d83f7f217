"""After a failed step of a pipeline: together back to rest, or apart for good (WP-10).

Stages are never at the same point of a schedule, and one that fails leaves others waiting for its
messages. So a rank that fails writes its cause into the process group's store, and whoever waits
for it is told (:mod:`internsp.pipeline.messages`). Messages that are still under way end with their
connections: a new group takes the old one's place once all ranks have failed.

The ranks of one stage must have failed at the same point: their gathers and reductions are of one
order, in groups that stay.
"""

from __future__ import annotations

import contextlib
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import torch.distributed as dist

from internsp.errors import CollectiveError
from internsp.failure.last_words import when_process_ends
from internsp.failure.lookout import sever
from internsp.failure.outcome import is_consequence
from internsp.failure.recovery import abort, all_meet, default_store
from internsp.mesh import ParallelMesh
from internsp.pipeline.messages import Messages
from internsp.wp.communicator import ISPCommunicator

# Where torch's schedules and stages wait for each other, and those with a tied weight.
_BETWEEN_STAGES = {"_wait_batch_p2p", "_batch_p2p", "_send_meta", "_recv_meta", "swap"}


class Watch:
    """A context for each step. Made by all ranks of the world together.

    Args:
        communicators: of this rank's chunks.
        prepared: which of torch's preparations before a first step are done.
        forget: called once all ranks have failed: drop what the failed step has left.

    Attributes:
        open: whether a step runs.
        messages: between stages.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        communicators: Sequence[ISPCommunicator],
        prepared: Callable[[], str],
        forget: Callable[[], None],
    ) -> None:
        self.open = False
        self._entering = False
        self._mesh = mesh
        self._communicators = communicators
        self._prepared = prepared
        self._forget = forget
        self._ended = ""
        self._failed = self._stuck = False  # stuck: in another wait than one between stages
        self._failures = self._steps = 0  # failed steps; all that have begun
        self._earlier: list[bool] = []  # by chunk: whether steps before have left sums
        self._store = default_store()
        name = [uuid.uuid4().hex if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(name)
        self._name = f"internsp/{name[0]}"
        self.messages = Messages(self._store, mesh.rank, self._look)
        when_process_ends(self, Watch._ends)

    def __enter__(self) -> None:
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
        root = _root(error)
        mine = self._text(root)
        first = self._tell(mine)
        self._failed, self._stuck = True, is_consequence(root) and not _between_stages(root)
        for communicator in self._communicators:  # the stage's other ranks wait in any chunk's
            if first == mine:
                communicator.recovery.failed(f"{type(root).__name__}: {root}")
            else:
                communicator.recovery.lookout.failed(first)
        if self._place() is None:  # this rank will meet no other: none shall wait for that
            self._refuse_to_meet()
        if self._mesh.device.type == "cpu":
            self.messages.give_up()
        else:  # what a stream waits for ends with its group only
            self._end(first)
        if first != mine and isinstance(error, Exception):
            raise CollectiveError(f"a step of the pipeline has failed: {first}") from error

    def begin(self) -> None:
        """A step comes next; after a failed one all ranks go back to rest, or end.

        Raises:
            CollectiveError: some rank has not failed with the others, or at another point: the
                groups are ended, and every later call raises the same.
        """
        if self._ended:
            raise CollectiveError(self._ended)
        first = self._first_cause()
        if self._failed or first:
            self._recover(first)
        self._steps += 1
        self._earlier = [communicator.begin_step() for communicator in self._communicators]
        if self._mesh.device.type == "cpu" and self._mesh.pipeline > 1:
            self.messages.begin(f"{self._name}/messages/{self._failures}")

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """Inside, this rank waits until all have come to the step that has begun.

        Also a context for it: what is raised is told as in a step.
        """
        with self:
            self._entering = True
            try:
                yield
            finally:
                self._entering = False

    def _look(self) -> None:
        """On the messages' thread: one that failed in an earlier step comes to this one no more."""
        if not self._entering or not self._store.check([self._key, self._failed_step]):
            return
        if int(self._store.get(self._failed_step)) < self._steps:
            for group in (self._mesh.stage_group, self._mesh.pipeline_group):
                sever(group)

    @property
    def _failed_step(self) -> str:
        return f"{self._name}/step/{self._failures}"

    def _recover(self, first: str) -> None:
        mesh = self._mesh
        together = all_meet(
            self._store,
            self._meeting,
            self._place(),
            mesh.rank,
            range(mesh.world_size),
            mesh.timeout_seconds,
            f"{self._name}/gone",
            self._same,
        )
        if not together:
            self._end(first)
            raise CollectiveError(self._ended)
        try:
            for communicator, earlier in zip(self._communicators, self._earlier, strict=True):
                communicator.recovery.together()
                communicator.step_failed(earlier)
            sever(mesh.pipeline_group)  # a message that comes late finds no buffer of ours
            mesh.renew_pipeline_group()
        except RuntimeError:
            self._end(first)
            raise
        self._forget()
        self._failures += 1
        self._failed = self._stuck = False

    @property
    def _meeting(self) -> str:
        return f"{self._name}/failed/{self._failures}"

    def _refuse_to_meet(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(f"{self._meeting}/verdict", "", "apart")

    def _place(self) -> str | None:
        """Which step has failed, and where in its stage this rank is; ``None``: it cannot go on."""
        ledgers = [c.state.collectives.ledger for c in self._communicators]
        if not self._failed or self._stuck or any(ledger.failure for ledger in ledgers):
            return None
        inside = " ".join(ledger.place() for ledger in ledgers)
        return f"{self._steps} {self._prepared()}|{inside}"

    def _same(self, places: Sequence[str]) -> bool:
        step = {place.partition("|")[0] for place in places}
        stages = self._mesh.shape.ranks("stage")
        return len(step) == 1 and all(len({places[r] for r in ranks}) == 1 for ranks in stages)

    def _text(self, error: BaseException) -> str:
        mesh = self._mesh
        return (
            f"rank {mesh.rank}, pipeline rank {mesh.pipeline_rank}, failed first: "
            f"{type(error).__name__}: {error}"
        )

    @property
    def _key(self) -> str:
        return f"{self._name}/pipeline/{self._failures}"

    def _tell(self, mine: str) -> str:
        """Leave this cause, if it is the first; returns the first."""
        with contextlib.suppress(RuntimeError):  # the store may be gone with its rank
            self._store.compare_set(self._failed_step, "", str(self._steps))
            return self._store.compare_set(self._key, "", mine).decode() or mine
        return mine

    def _first_cause(self) -> str:
        with contextlib.suppress(RuntimeError):
            if self._store.check([self._key]):
                return self._store.get(self._key).decode()
        return ""

    def _end(self, first: str) -> None:
        mesh = self._mesh
        self._ended = f"the pipeline has ended: {first}"
        for group in dict.fromkeys((mesh.pipeline_group, *mesh.pass_groups, mesh.stage_group)):
            with contextlib.suppress(ValueError, RuntimeError):
                abort(group)

    def _ends(self, error: BaseException | None) -> None:
        """This process ends by ``error``, perhaps between two steps."""
        if error is None:
            return
        if not self._failed and not is_consequence(error):
            self._tell(self._text(error))
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._name}/gone", str(self._mesh.rank))


def _root(error: BaseException) -> BaseException:
    """torch wraps what a chunk raises in two errors of its own; the first one is the cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _between_stages(error: BaseException) -> bool:
    """Whether it was met waiting for another stage."""
    frames = traceback.extract_tb(error.__traceback__)
    return not _BETWEEN_STAGES.isdisjoint(frame.name for frame in frames)
