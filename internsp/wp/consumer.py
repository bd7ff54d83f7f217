"""Who takes a chunk's reduced gradients: a plain loop, or a ZeRO optimizer (WP-9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from internsp.schedule.terms import Parcel
from internsp.wp.parameter import Member, ShardedParameter

if TYPE_CHECKING:  # loaded by pipelines
    from internsp.wp.tied import StepGradients


class GradientConsumer(Protocol):
    """Consumes what reduce-scatters leave: sums over replicas, and then ``.grad`` or a step.

    There are two: :class:`internsp.wp.plain_loop.PlainLoop`, with which a chunk begins, and
    :class:`internsp.optim.reduction.ZeroReducer`, which a ``ZeroOptimizer`` gives to
    :meth:`internsp.wp.communicator.ISPCommunicator.attach`.
    """

    is_optimizer: bool
    """Whether sums wait for an optimizer's step; else the last backward completes ``.grad``."""
    parcels: Sequence[Parcel[ShardedParameter]]
    """What replicas exchange, in the order in which a backward completes it."""
    limit: int
    """Bytes of exchanges in flight (one may exceed it); the oldest are finished first."""

    @property
    def tied(self) -> StepGradients:
        """What a pipeline's step adds to gradients of weights that other stages hold, too."""

    # exchanges between replicas, when internsp.schedule.reductions.Exchanges says so

    def start(self, parcel: Parcel[ShardedParameter]) -> None:
        """Launch the exchange of a parcel, whose reduced gradients are complete.

        Does not block, unless ``overlap`` is off.
        """

    def finish_oldest(self) -> None:
        """Wait for the exchange that was launched first."""

    def discard(self) -> None:
        """Wait for exchanges in flight, and drop their results. No message."""

    def expects_exchange(self) -> bool:
        """Whether the backward that begins is expected to be the last before replicas exchange.

        Asked where the program has not said so.
        """

    def divisor(self, member: Member) -> float:
        """By what the sum of all ranks' gradients of ``member`` is divided."""

    # passes

    def pass_begins(self) -> None:
        """A forward begins, or a pipeline's step."""

    def step_begins(self) -> bool:
        """A pipeline's step begins; returns whether sums of earlier ones wait for an optimizer."""

    def backward_begins(self) -> None:
        """A backward begins: a program may have dropped gradients since the last one."""

    def backward_ended(self, more: bool) -> None:
        """All reductions of a backward are launched; ``more``: a later one completes the sums."""

    def take_hooks(self, member: Member) -> bool:
        """Take the parameter's ``register_post_accumulate_grad_hook``'s, which autograd would call
        before ``.grad`` is complete. Returns whether they are called."""

    def call_hooks(self) -> None:
        """A backward is over: call what was taken of the parameters whose ``.grad`` it has
        completed."""

    def reset(self, earlier: bool, step: bool) -> None:
        """After a failure, when nothing is in flight: the sums of the failed backward are gone.

        Args:
            earlier: those of backwards before it, too, which repeating it does not bring back.
            step: a pipeline's step has failed, of which some backwards may have ended.
        """
