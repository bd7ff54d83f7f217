"""Scheduler hooks: called around each action of a step, with a pipeline or without.

The names are InternEvo's; each hook gets its action as an argument. Hooks of our stages are called
for every chunk and micro-batch of every schedule, also for overlapped actions and split backwards,
and never for torch's shape inference before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from internsp.errors import OrderError
from internsp.schedule.terms import BACKWARD, FORWARD
from internsp.wp.communicator import ISPCommunicator

FULL, INPUT, WEIGHT = "full", "input", "weight"


@dataclass(frozen=True, slots=True)
class ComputeAction:
    """One forward or backward of one chunk for one micro-batch.

    Attributes:
        stage: global index of the stage; stage 0 takes the token ids.
        chunk: index among this rank's chunks.
        part: of a backward, which gradients it computes: ``"full"``, ``"input"`` or ``"weight"``;
            empty for a forward.
    """

    stage: int
    chunk: int
    micro_batch: int
    part: str = ""


class SchedulerHook:
    """Base class of hooks: override the methods that you need; all do nothing by default."""

    def before_forward(self, action: ComputeAction) -> None:
        """A chunk's forward is about to run."""

    def after_forward(self, action: ComputeAction, output: Any) -> None:
        """A chunk's forward has run and returned ``output``."""

    def before_criterion(self, action: ComputeAction, output: Any) -> None:
        """The last stage is about to compute the loss from its ``output``."""

    def after_criterion(self, action: ComputeAction, loss: Any) -> None:
        """The last stage has computed ``loss``, from which the backward will start."""

    def before_backward(self, action: ComputeAction) -> None:
        """A chunk's backward, or the part ``action.part`` of it, is about to run."""

    def after_backward(self, action: ComputeAction) -> None:
        """A chunk's backward, or a part of it, has run; its reductions may still be in flight."""

    def after_last_micro_batch(self, action: ComputeAction) -> None:
        """The chunk has run all its micro-batches of this step."""


def next_gather(actions: Sequence[ComputeAction], index: int) -> tuple[ComputeAction, str] | None:
    """The first action after ``index`` that gathers weights, of which the first block can be
    prefetched, and the phase of its first all-gather."""
    for action in actions[index + 1 :]:
        if action.part != WEIGHT:
            return action, BACKWARD if action.part else FORWARD
    return None


def last_weight_backwards(actions: Sequence[ComputeAction]) -> frozenset[int]:
    """Indices of each chunk's last action that computes weight gradients."""
    ready = (i for i, p in enumerate(actions) if p.part in (FULL, WEIGHT))
    return frozenset({actions[i].stage: i for i in ready}.values())


class ISPCommunicatorSchedulerHook(SchedulerHook):
    """Runs the communication of each chunk's communicator along a schedule.

    It tells the communicator which part of a backward runs, prefetches for the next action across
    chunk and micro-batch boundaries, and finishes reductions after each micro-batch, or after the
    chunk's last one where unsharded gradients accumulate.

    Args:
        communicators: the chunks' communicators by stage index.

    Attributes:
        bubbles: intervals of the last step in which no action ran, as pairs (start, end) of
            :meth:`internsp.base.trace.Trace.now`.
    """

    def __init__(self, communicators: Mapping[int, ISPCommunicator]) -> None:
        self._communicators = dict(communicators)
        self._actions: Sequence[ComputeAction] = ()
        self._index = 0
        self._last_backwards: frozenset[int] = frozenset()
        self._action_start: Any = 0.0
        self._last_end: Any = None
        self.bubbles: list[tuple[Any, Any]] = []

    def begin_step(self, actions: Sequence[ComputeAction]) -> None:
        """Begin a step with this rank's ``actions``; empty if they are not known."""
        self._actions, self._index = actions, 0
        self._last_backwards = last_weight_backwards(actions)
        self.bubbles = []
        self._last_end = next(iter(self._communicators.values())).state.trace.now()

    def reset_step(self) -> None:
        """Drop what a failed step would have done next."""
        for communicator in self._communicators.values():
            communicator.accumulation.end_action()

    def before_forward(self, action: ComputeAction) -> None:
        """Make this action prefetch for the next one once it has launched its own gathers."""
        self._begin_action(action)

    def after_forward(self, action: ComputeAction, output: Any) -> None:
        """Prefetch for the next action, unless that has been done during the forward."""
        self._end_action(action)

    def before_backward(self, action: ComputeAction) -> None:
        """Tell the communicator which part runs.

        An input backward gives no weight gradients, and a weight backward needs no gathers.
        """
        self._begin_action(action)
        if action.part != FULL:
            events = self._communicators[action.stage].events
            events.begin_backward_part(weights=action.part == WEIGHT)

    def _begin_action(self, action: ComputeAction) -> None:
        """Compare ``action`` with the schedule (WP-2), and set up the prefetch for the next one."""
        self._action_start = self._communicators[action.stage].state.trace.now()
        self.bubbles.append((self._last_end, self._action_start))
        if not self._actions:
            return
        planned = self._actions[self._index] if self._index < len(self._actions) else None
        if planned != action:
            raise OrderError(f"the schedule runs {action} where the plan has {planned}")
        coming = next_gather(self._actions, self._index)
        communicator = self._communicators[action.stage]
        communicator.accumulation.begin_action(
            communicator.queue.passes.order.policy.accumulate_whole,
            self._index not in self._last_backwards,
            partial(self._prefetch, coming),
        )

    def _end_action(self, action: ComputeAction) -> None:
        communicator = self._communicators[action.stage]
        trace = communicator.state.trace
        trace.record(
            "BACKWARD" if action.part else "FORWARD",
            f"stage {action.stage}, micro-batch {action.micro_batch}",
            phase=action.part,
            start=self._action_start,
            end=trace.now(),
        )
        communicator.accumulation.at_next_pass()
        communicator.accumulation.end_action()
        self._index += 1
        self._last_end = trace.now()

    def _prefetch(self, coming: tuple[ComputeAction, str] | None) -> None:
        if coming is not None:
            action, phase = coming
            self._communicators[action.stage].prefetch_pass(phase)

    def after_backward(self, action: ComputeAction) -> None:
        """Finish reductions: unsharded gradients do not outlive a micro-batch (WP-6).

        Except where they accumulate.
        """
        communicator = self._communicators[action.stage]
        if action.part != FULL:
            communicator.events.end_backward_part()
        if action.part != INPUT:
            last = communicator.accumulation.more_to_come is False
            communicator.state.finish_reductions(last)
        self._end_action(action)
