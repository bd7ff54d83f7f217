"""Deliberate faults in the library: the fuzzer must find each.

``python -m tests.fuzz.models --fault NAME`` runs with one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from internsp.optim import zero
from internsp.schedule.terms import BACKWARD
from internsp.wp.collectives import Collectives, Handle
from internsp.wp.contents import Contents
from internsp.wp.parameter import ReplicatedParameter, ShardedParameter
from internsp.wp.perform import Chunk
from internsp.wp.reduce import GradientReducer, UnshardedSums
from internsp.wp.reduced import ReducedGradient


def put_in(name: str, rank: int) -> None:
    """Apply the fault in this process; ``""`` changes nothing."""
    if name:
        FAULTS[name](rank)


def scaled_gradient(rank: int) -> None:
    """One weight's gradient is 1.001 times too large, on rank 0 only."""
    taken = GradientReducer._pop_ready

    def wrong(self: Any, weight: Any) -> Any:
        gradient = taken(self, weight)
        if gradient is not None and rank == 0 and weight.name.endswith("fc2.weight"):
            gradient = gradient * 1.001
        return gradient

    GradientReducer._pop_ready = wrong  # type: ignore[method-assign]


def skipped_regather(rank: int) -> None:
    """The first block's weights are treated as unsharded in backward."""
    gather = Chunk._all_gather

    def wrong(self: Any, action: Any) -> None:
        if action.phase != BACKWARD or action.unit.block != 0:
            gather(self, action)
        else:
            for weight in action.weights:  # as if the all-gather had finished
                weight.shown = weight.current_version()

    Chunk._all_gather = wrong  # type: ignore[method-assign]


def stale_reuse(rank: int) -> None:
    """Unsharded weights are reused although the optimizer has written the shards."""
    Contents.begin_pass = lambda self: True  # type: ignore[method-assign]
    ShardedParameter.version = lambda self: 0  # type: ignore[method-assign]
    ShardedParameter.current_version = lambda self: (0, self.compute_dtype)  # type: ignore[method-assign]


def lost_accumulation(rank: int) -> None:
    """A second micro-batch's reduced gradient replaces the first one's."""

    def wrong(self: Any, total: Any) -> None:
        self.total = total

    ReducedGradient.add = wrong  # type: ignore[method-assign]


def lost_whole_sum(rank: int) -> None:
    """Inside ``no_sync`` the last gradient replaces the sum."""
    add = UnshardedSums.add

    def wrong(self: Any, unit: Any, weight: Any, gradient: Any) -> None:
        if gradient is not None:
            self._sums.pop(weight, None)
        add(self, unit, weight, gradient)

    UnshardedSums.add = wrong  # type: ignore[method-assign]


def no_replica_sum(rank: int) -> None:
    """With torch's optimizers gradients of shards are not summed over replicas."""
    Collectives.all_reduce = lambda *_: Handle(None)  # type: ignore[assignment, method-assign]


def no_zero_replica_sum(rank: int) -> None:
    """ZeRO-1.5 does not sum gradient slices over the ranks that hold the same slice."""
    no_replica_sum(rank)


def small_once(rank: int) -> None:
    """A replicated parameter that is used twice keeps its last gradient only."""
    add = ReplicatedParameter.add_gradient

    def wrong(self: Any, gradient: Any) -> None:
        if self.total is not None:
            self.total.zero_()
        add(self, gradient)

    ReplicatedParameter.add_gradient = wrong  # type: ignore[method-assign]


def clip_off(rank: int) -> None:
    """The clipping factor is too small by 1 in 1000."""
    factor = zero.clip_factor
    zero.clip_factor = lambda *a: factor(*a) * 0.999 if factor(*a) < 1 else 1.0  # type: ignore[assignment]


FAULTS: dict[str, Callable[[int], None]] = {
    f.__name__: f
    for f in (
        scaled_gradient, skipped_regather, stale_reuse, lost_accumulation, lost_whole_sum,
        no_replica_sum, no_zero_replica_sum, small_once, clip_off,
    )
}  # fmt: skip
