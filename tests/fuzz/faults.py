"""Faults that are put into the library on purpose: the fuzzer must find each.

``python -m tests.fuzz.models --fault NAME`` runs with one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import internsp.wp.collect
from internsp.optim import reduction, zero
from internsp.wp.accumulation import WholeGradients
from internsp.wp.communicator import UnitCommunicator
from internsp.wp.contents import Contents
from internsp.wp.pending import PendingGradients
from internsp.wp.replicated import SmallParameters
from internsp.wp.schedule import BACKWARD
from internsp.wp.shard import ShardedWeight


def put_in(name: str, rank: int) -> None:
    """Change the library in this process; ``""`` changes nothing."""
    if name:
        FAULTS[name](rank)


def scaled_gradient(rank: int) -> None:
    """One weight's gradient is 1.001 times too large, on rank 0 alone."""
    launch = PendingGradients.launch

    def wrong(self: Any, unit: Any, weight: Any, gradient: Any) -> None:
        if rank == 0 and gradient is not None and weight.name.endswith("fc2.weight"):
            gradient = gradient * 1.001
        launch(self, unit, weight, gradient)

    PendingGradients.launch = wrong  # type: ignore[method-assign]


def skipped_regather(rank: int) -> None:
    """The first block's weights are taken to be whole in backward."""
    fetch = UnitCommunicator.fetch

    def wrong(self: Any, unit: Any, weights: Any, phase: str) -> None:
        moving = [w for w in weights if not w.resident]
        if phase != BACKWARD or unit.block != 0 or not moving:
            fetch(self, unit, weights, phase)
            return
        slot = self._lease(unit, moving, phase)
        slot.tags.update({w: w.tag() for w in moving})

    UnitCommunicator.fetch = wrong  # type: ignore[method-assign]


def stale_reuse(rank: int) -> None:
    """Whole weights are kept although the optimizer has written the shards."""
    Contents._forget = lambda self: None  # type: ignore[method-assign]
    ShardedWeight.version = lambda self: 0  # type: ignore[method-assign]
    ShardedWeight.tag = lambda self: (0, self.compute_dtype)  # type: ignore[method-assign]


def lost_accumulation(rank: int) -> None:
    """A second micro-batch's reduced gradient takes the first one's place."""

    def wrong(self: Any, total: Any) -> None:
        self.partial = total

    ShardedWeight.add_partial = wrong  # type: ignore[method-assign]


def lost_whole_sum(rank: int) -> None:
    """Inside ``no_sync`` the last gradient takes the place of the sum."""
    add = WholeGradients.add

    def wrong(self: Any, unit: Any, weight: Any, gradient: Any) -> None:
        if gradient is not None:
            self._sums.pop(weight, None)
        add(self, unit, weight, gradient)

    WholeGradients.add = wrong  # type: ignore[method-assign]


def no_replica_sum(rank: int) -> None:
    """With torch's optimizers shards are not summed over replicas."""
    internsp.wp.collect.all_reduce = lambda *_: None  # type: ignore[assignment]


def no_zero_replica_sum(rank: int) -> None:
    """ZeRO-1.5 does not sum slices over the ranks that hold the same one."""
    reduction.all_reduce = lambda *_: None  # type: ignore[assignment]


def small_once(rank: int) -> None:
    """A small parameter that is used twice keeps its last gradient."""
    add = SmallParameters.add

    def wrong(self: Any, index: int, gradient: Any) -> None:
        self.value(index).zero_()
        add(self, index, gradient)

    SmallParameters.add = wrong  # type: ignore[method-assign]


def clip_off(rank: int) -> None:
    """Clipping is 1 in 1000 off."""
    factor = zero.clip_factor
    zero.clip_factor = lambda *a: factor(*a) * 0.999 if factor(*a) < 1 else 1.0  # type: ignore[assignment]


FAULTS: dict[str, Callable[[int], None]] = {
    f.__name__: f
    for f in (
        scaled_gradient, skipped_regather, stale_reuse, lost_accumulation, lost_whole_sum,
        no_replica_sum, no_zero_replica_sum, small_once, clip_off,
    )
}  # fmt: skip
