"""A rank that waits for a failed rank raises soon, with the cause; if all fail, all can continue.

The groups' timeout is a minute here: a rank that waits for it fails its test.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from internsp.errors import CollectiveError
from internsp.failure import guard
from internsp.failure.consensus import default_store
from internsp.mesh import ParallelMesh
from internsp.optim import ZeroOptimizer
from tests.ranks.test_rules_errors import Boom, Failing
from tests.support.models import SOME, Tiny, Twin, raises
from tests.support.ranks import ranks

SOON = 6.0  # seconds; at most two and a half on a quiet machine, a fifth of that with HASTE
HASTE = 0.1  # seconds between checks, in tests that do not measure their duration
LATE = 0.7  # seconds by which one rank fails later than another with HASTE: six checks


class Broken(torch.optim.SGD):
    """Its step raises at the given point."""

    broken = False
    linger: Callable[[], None]

    def step(self, closure: Any = None) -> Any:
        if self.broken:
            Broken.linger()
            raise Boom("in the step")
        return super().step(closure)


class Loop:
    """A user's training loop, which fails at the given point."""

    def __init__(self, world_size: int, zero: bool, **config: Any) -> None:
        mesh = ParallelMesh.create(
            weight=world_size if not zero else 1, device_type="cpu", timeout_seconds=60
        )
        self.twin = Twin(partial(Tiny, Failing), mesh, **config)
        self.where = ""
        self.linger: Callable[[], None] = lambda: None  # called right before something raises
        self.twin.ours.register_forward_pre_hook(self._enter, prepend=True)
        layer: Any = self.twin.ours.layers[1]  # type: ignore[index]
        layer.wo.register_forward_hook(self._in_the_middle)
        layer.fail = self._fail
        self.optimizer: Any = torch.optim.SGD(self.twin.ours.parameters(), lr=0.1)
        if zero:
            self.optimizer = ZeroOptimizer(self.twin.communicator, Broken, lr=0.1)
        self.plain = torch.optim.SGD(self.twin.plain.parameters(), lr=0.1)

    def _enter(self, *_: Any) -> None:
        if self.where == "enter":
            self.linger()
            raise Boom("before the model")

    def _in_the_middle(self, *_: Any) -> None:
        if self.where == "middle":
            self.linger()

    def _fail(self, gradient: Tensor) -> None:
        self.linger()
        raise Boom("in backward")

    def step(self) -> None:
        twin = self.twin
        everybody, mine = twin.batch()
        layer: Any = twin.ours.layers[1]  # type: ignore[index]
        layer.where = self.where
        loss = twin.ours(*mine)
        if self.where == "loss":
            self.linger()
            raise Boom("in the loss")
        loss.backward()
        if self.where == "frozen":
            layer.w1.requires_grad_(False)
        Broken.linger = self.linger  # type: ignore[method-assign]
        Broken.broken = self.where == "step"
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not self.where:
            twin.plain(*everybody).backward()
            self.plain.step()
            self.plain.zero_grad()


PATHS = "one of them has left a pass, or its program took another path"
STANDS = {
    "enter": "Boom: before the model", "middle": "Boom in forward: in the middle",
    "backward": "its backward raised", "step": "Boom: in the step",
    "frozen": "requires_grad changed for layers.1.w1",
}  # fmt: skip
GOES_ON = {
    "middle": "Boom in forward: in the middle", "backward": "its backward raised",
    "step": PATHS, "loss": PATHS,
}  # fmt: skip


def failing(loop: Loop) -> str:
    for _ in range(3):
        try:
            loop.step()
        except CollectiveError as error:
            return str(error)
    raise AssertionError("it went on without the rank that has failed")


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("world_size", "goes_on", "haste"),
    [
        (2, False, False),
        (3, True, True),
        pytest.param(3, False, True, marks=pytest.mark.thorough(5)),
    ],
)
@ranks()
def test_no_rank_waits_long_for_one_that_failed_alone(
    rank: int, world_size: int, goes_on: bool, haste: bool
) -> None:
    """Only the last rank fails; afterwards it blocks, or continues with its next step."""
    cases = GOES_ON if goes_on else STANDS
    if haste:
        guard.CHECK_SECONDS = HASTE
    else:
        cases = {where: STANDS[where] for where in ("middle", "frozen")}
    store, culprit = default_store(), world_size - 1
    for where, cause in cases.items():
        for first in (True, False)[: 1 + haste]:
            loop = Loop(world_size, zero=where == "step", **(SOME if first else {}))
            if not first:
                loop.step()
            case, start = f"{where} {first}", time.monotonic()
            if rank == culprit:
                loop.where = where
                if where == "frozen":
                    loop.step()
                else:
                    raises(Boom, loop.step)
                loop.where, Broken.broken = "", False
                store.set(case, "failed")
                if not goes_on and where != "frozen":
                    store.wait([f"{case} {r}" for r in range(culprit)])
                    continue
            told = failing(loop)
            took = time.monotonic() - start
            assert took < SOON, f"{case}: {took:.1f} s, {told}"
            if rank != culprit:
                assert cause in told, f"{case}: {told}"
                assert f"rank {culprit}" in told, f"{case}: {told}"
                store.set(f"{case} {rank}", told)
            raises(CollectiveError, loop.step, cause)  # and again, at once


def linger(key: str) -> None:
    """Wait until the other rank has failed, and longer."""
    default_store().wait([key])
    time.sleep(LATE)


@pytest.mark.thorough(3)
@pytest.mark.unmeasured
@ranks(2)
def test_ranks_that_fail_alike_much_later_than_others_go_on_together(
    rank: int, world_size: int
) -> None:
    """All fail at the same point, one much later than the others; then one continues much later."""
    guard.CHECK_SECONDS = HASTE
    for where in ("enter", "middle", "backward", "loss", "step"):
        loop = Loop(world_size, zero=where == "step")
        loop.step()
        loop.twin.communicator.recovery.guard.begin_pass()
        loop.where = where
        if rank == 1:
            loop.linger = partial(linger, f"{where} failed")
        raises(Boom, loop.step)
        default_store().set(f"{where} failed", "")
        loop.where, Broken.broken = "", False
        loop.twin.zero_grad()
        if rank == 0:
            time.sleep(LATE)
        for _ in range(2):
            loop.step()
        if where != "step":  # work of an aborted step stays done
            loop.twin.check_parameters(f"after a failure that all met: {where}")


@pytest.mark.thorough(1)
@pytest.mark.unmeasured
@ranks(2)
def test_a_rank_that_comes_back_soon_is_waited_for(rank: int, world_size: int) -> None:
    """One rank's input is refused before the step begins; it uses another, like a slow rank."""
    loop = Loop(world_size, zero=False)
    loop.step()
    if rank == 1:
        loop.where = "enter"
        before = loop.twin._generator.get_state()
        raises(Boom, loop.step)
        loop.twin._generator.set_state(before)
        loop.where = ""
        time.sleep(LATE / 2)
    for _ in range(2):
        loop.step()
    loop.twin.check_parameters("after one rank refused an input")
