"""Scheduler hooks: what a trainer, with a pipeline or without, reports to its hooks.

InternEvo's names, with the action that is called for made explicit. Hooks of our stages fire for
every chunk and micro-batch of every schedule, overlapped and split backward included, and never
for torch's shape inference before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from internsp.errors import OrderError
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.schedule import BACKWARD, FORWARD

FULL, INPUT, WEIGHT = "full", "input", "weight"


@dataclass(frozen=True, slots=True)
class ComputeAction:
    """Where a schedule is.

    Attributes:
        stage: global index, 0 takes the ids; ``chunk``: index among this rank's chunks.
        part: of a backward: ``"full"``, ``"input"`` or ``"weight"`` gradients; else empty.
    """

    stage: int
    chunk: int
    micro_batch: int
    part: str = ""


class SchedulerHook:
    """Derive from it and override what you need; each method does nothing by default."""

    def before_forward(self, action: ComputeAction) -> None:
        """A chunk's forward is about to run."""

    def after_forward(self, action: ComputeAction, output: Any) -> None:
        """It has run; ``output`` is the chunk's."""

    def before_criterion(self, action: ComputeAction, output: Any) -> None:
        """The last stage is about to make a loss of its output."""

    def after_criterion(self, action: ComputeAction, loss: Any) -> None:
        """The loss that backward will start from."""

    def before_backward(self, action: ComputeAction) -> None:
        """``action.part`` of a chunk's backward is about to run."""

    def after_backward(self, action: ComputeAction) -> None:
        """It has run; gradients are ready, perhaps still in flight."""

    def after_last_micro_batch(self, action: ComputeAction) -> None:
        """The chunk has nothing left to do in this step."""


def phase_of(action: ComputeAction) -> str | None:
    """Which gathers a pass begins with, if any."""
    if not action.part:
        return FORWARD
    return None if action.part == WEIGHT else BACKWARD


def following(actions: Sequence[ComputeAction], index: int) -> ComputeAction | None:
    """The next pass after ``index`` that gathers: its first block may come early."""
    rest = (p for p in actions[index + 1 :] if phase_of(p) is not None)
    return next(rest, None)


def last_weight_backwards(actions: Sequence[ComputeAction]) -> frozenset[int]:
    """Positions of each chunk's last pass that gives weights gradients."""
    ready = (i for i, p in enumerate(actions) if p.part in (FULL, WEIGHT))
    return frozenset({actions[i].stage: i for i in ready}.values())


class ISPCommunicatorSchedulerHook(SchedulerHook):
    """Makes weights follow a schedule, each chunk's by its own communicator.

    It tells the communicator which part of a backward runs, prefetches for the next pass across
    chunk and micro-batch boundaries, and finishes reductions after each micro-batch, or after the
    last one of the chunk where unsharded gradients accumulate.

    Args:
        communicators: by stage index.

    Attributes:
        idle: when in the last step no pass ran, as pairs of :meth:`internsp.trace.Trace.now`.
    """

    def __init__(self, communicators: Mapping[int, ISPCommunicator]) -> None:
        self._communicators = dict(communicators)
        self._actions: Sequence[ComputeAction] = ()
        self._at = 0
        self._reducing: frozenset[int] = frozenset()
        self._begun: Any = 0.0
        self._left: Any = None
        self.idle: list[tuple[Any, Any]] = []

    def begin(self, actions: Sequence[ComputeAction]) -> None:
        """A step begins, of which these are the passes of this rank; empty: not known."""
        self._actions, self._at = actions, 0
        self._reducing = last_weight_backwards(actions)
        self.idle = []
        self._left = next(iter(self._communicators.values())).state.trace.now()

    def forget(self) -> None:
        """After a failed step: what it would have done next."""
        for communicator in self._communicators.values():
            communicator.state.at_next_pass = _nothing
            communicator.queue.reductions.accumulating = False
            communicator.more_to_come = None

    def before_forward(self, action: ComputeAction) -> None:
        """The next pass is known: prefetch for it as soon as this one gathers no more."""
        self._enter(action)

    def after_forward(self, action: ComputeAction, output: Any) -> None:
        """At the latest now."""
        self._leave(action)

    def before_backward(self, action: ComputeAction) -> None:
        """An input backward gives no weight a gradient, a weight backward needs no gathers."""
        self._enter(action)
        if action.part != FULL:
            self._communicators[action.stage].begin_part(weights=action.part == WEIGHT)

    def _enter(self, action: ComputeAction) -> None:
        """Compare what runs with what was planned (WP-2)."""
        self._begun = self._communicators[action.stage].state.trace.now()
        self.idle.append((self._left, self._begun))
        if not self._actions:
            return
        planned = self._actions[self._at] if self._at < len(self._actions) else None
        if planned != action:
            raise OrderError(f"the schedule runs {action} where the plan has {planned}")
        coming = following(self._actions, self._at)
        communicator = self._communicators[action.stage]
        communicator.state.at_next_pass = partial(self._expect, coming)
        communicator.more_to_come = self._at not in self._reducing
        queue = communicator.queue
        queue.reductions.accumulating = queue.policy.accumulate_whole and communicator.more_to_come

    def _leave(self, action: ComputeAction) -> None:
        communicator = self._communicators[action.stage]
        trace = communicator.state.trace
        trace.record(
            "BACKWARD" if action.part else "FORWARD",
            f"stage {action.stage}, micro-batch {action.micro_batch}",
            phase=action.part,
            start=self._begun,
            end=trace.now(),
        )
        communicator.state.at_next_pass()
        communicator.state.at_next_pass = _nothing
        communicator.queue.reductions.accumulating = False
        communicator.more_to_come = None
        self._at += 1
        self._left = trace.now()

    def _expect(self, coming: ComputeAction | None) -> None:
        if coming is not None:
            phase = phase_of(coming)
            assert phase is not None, "following() passes over what gathers nothing"
            self._communicators[coming.stage].expect(phase)

    def after_backward(self, action: ComputeAction) -> None:
        """Unsharded gradients do not outlive their micro-batch (WP-6), unless they accumulate."""
        communicator = self._communicators[action.stage]
        if action.part != FULL:
            communicator.end_part()
        if action.part != INPUT:
            communicator.state.finish_reductions(last=communicator.more_to_come is False)
        self._leave(action)


def _nothing() -> None:
    """No pass is known to follow."""
