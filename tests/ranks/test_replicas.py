"""Replicas exchange reduced gradients during backward: one order, one gradient, the same bits.

Gradients and, after steps of a ``ZeroOptimizer``, parameters are compared with one process's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from internsp.config import ActivationCheckpointConfig
from internsp.optim import ZeroOptimizer
from tests.ranks.test_rules_errors import Boom, Failing
from tests.support.meshes import mesh_of
from tests.support.models import ALL, ROLLING, Block, Tiny, Twin, raises
from tests.support.ranks import run_ranks

SETTINGS: dict[str, Any] = {"lr": 0.002, "momentum": 0.5}
FULL = ActivationCheckpointConfig(mode="full")
PLAIN, ZERO = False, True
# Both forms exchange by the same objects: each test runs one of them, and the other is thorough.
PLAIN_FIRST = [PLAIN, pytest.param(ZERO, marks=pytest.mark.thorough(8))]
ZERO_FIRST = [ZERO, pytest.param(PLAIN, marks=pytest.mark.thorough(8))]


class Loop:
    """A model and the same on one process, each with its optimizer.

    Args:
        zero: a ``ZeroOptimizer``, else torch's.
    """

    def __init__(
        self, zero: bool, make: Callable[[], nn.Module] = Tiny, weight: int = 2,
        degrees: dict[str, Any] | None = None, **config: Any,
    ) -> None:  # fmt: skip
        self.twin = Twin(make, mesh_of(weight, **(degrees or {})), **config)
        self.communicator, self.zero = self.twin.communicator, zero
        self.theirs = torch.optim.SGD(self.twin.plain.parameters(), **SETTINGS)
        self.ours: Any = (
            ZeroOptimizer(self.communicator, torch.optim.SGD, **SETTINGS)
            if zero
            else torch.optim.SGD(self.twin.ours.parameters(), **SETTINGS)
        )

    def step(self, what: str = "") -> None:
        """Run both models, then compare."""
        if not self.zero:
            self.twin.check_gradients(what)
        for optimizer in (self.ours, self.theirs):
            optimizer.step()
            optimizer.zero_grad()
        self.communicator.wait_until_ready()
        self.twin.check_parameters(what)

    def launches(self) -> list[str]:
        """Reductions and exchanges in launch order since the last call."""
        return [line.replace(" backward", "") for line in self.twin.lines("RS", "EX")]


def first(launches: Sequence[str], begin: str) -> int:
    return next(i for i, launch in enumerate(launches) if launch.startswith(begin))


def last(launches: Sequence[str], begin: str) -> int:
    return max(i for i, launch in enumerate(launches) if launch.startswith(begin))


def during(rank: int, world: int, zero: bool) -> None:
    for config in ({}, ALL, {"overlap": False}, {"compile": False, **ROLLING}):
        loop = Loop(zero, **config)
        for step in range(3):
            loop.twin.trace.clear()
            loop.twin.backward()
            if zero:
                launches = loop.launches()
                early = [launch for launch in launches if launch.startswith("EX")]
                if step == 0:  # the number of backwards per step is not known yet
                    assert not early, early
                else:
                    assert early == ["EX head", "EX layers.3", "EX layers.2", "EX layers.1"], early
            else:
                launches = loop.launches()
            if step or not zero:
                for block in (3, 2):
                    began = first(launches, f"EX layers.{block}")
                    assert last(launches, f"RS layers.{block}") < began, "complete"
                    assert began < first(launches, f"RS layers.{block - 2}") + 1, "in time"
                assert first(launches, "EX head") < first(launches, "RS layers.2")
            loop.step(f"{config} {step}")


@pytest.mark.thorough(5)
@pytest.mark.parametrize("zero", PLAIN_FIRST)
def test_a_blocks_exchange_starts_while_the_blocks_below_compute(zero: bool) -> None:
    run_ranks(during, 4, zero)


class Fickle(Block):
    """Its data select the weights that are used."""

    left_out: frozenset[str] = frozenset()

    def forward(self, x: Tensor) -> Tensor:
        if "q" not in self.left_out:
            x = x + self.wo(torch.tanh(self.q(self.norm(x))))
        elif "wo" not in self.left_out:
            x = x + self.wo(self.norm(x))
        if "w1" not in self.left_out:
            x = x + self.w2(F.gelu(self.w1(x)))
        return x


def unused(rank: int, world: int, zero: bool, config: dict[str, Any]) -> list[list[str]]:
    """Each rank skips other weights in each step; not compared with one process."""
    loop = Loop(zero, partial(Tiny, Fickle), **config)
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(5):
        for layer in loop.twin.ours.layers:  # type: ignore[union-attr]
            drawn = torch.rand(3, generator=generator) < 0.5
            layer.left_out = frozenset(
                n for n, out in zip(("q", "wo", "w1"), drawn, strict=True) if out
            )
        loop.twin.ours(*loop.twin.batch()[1]).backward()
        loop.ours.step()
        loop.ours.zero_grad()
        found.append(loop.launches())
    return found


@pytest.mark.parametrize("zero", [PLAIN, ZERO])
@pytest.mark.parametrize("config", [{}, {"granularity": "module"}, ROLLING], ids=str)
def test_all_ranks_launch_in_one_order_whatever_data_leave_unused(
    zero: bool, config: dict[str, Any]
) -> None:
    found = run_ranks(unused, 4, zero, config)
    assert all(launches == found[0] for launches in found)
    exchanged = [launch for launch in found[0][-1] if launch.startswith("EX")]
    assert first(found[0][-1], "EX layers.3") < first(found[0][-1], "RS layers.0")
    assert len(exchanged) == len(set(exchanged)), "each once"


def parity(rank: int, world: int, zero: bool) -> None:
    cases: list[tuple[dict[str, Any], Callable[[], nn.Module]]] = [
        ({"weight": 2}, Tiny),
        ({"weight": 1}, Tiny),
        ({"weight": 1, "degrees": {"zero": 2}}, Tiny),
        ({"weight": 2, "degrees": {"zero": 1}}, Tiny),
        ({"weight": 2, **ALL}, partial(Tiny, tied=True)),
        ({"weight": 2, "checkpoint": FULL, "reduction": "sum"}, partial(Tiny, tied=True)),
        ({"weight": 2, "unexpected_order": "gather"}, Tiny),
        ({"weight": 2, "reductions_in_flight": 1}, Tiny),
    ]
    for settings, make in cases:
        loop = Loop(zero, make, **settings)
        for step in range(2):  # in the second it is known when replicas exchange
            loop.twin.backward()
            loop.step(f"{settings}, {make}, {step}")


@pytest.mark.unmeasured
@pytest.mark.parametrize("zero", ZERO_FIRST)
def test_gradients_equal_one_process_s(zero: bool) -> None:
    run_ranks(parity, 4, zero)


def micro_batches(rank: int, world: int, zero: bool) -> None:
    """As many as in the last step, more, fewer; deferred by the program; declared the last."""
    loop = Loop(zero, partial(Tiny, tied=True))
    communicator = loop.communicator
    for step, count in enumerate((1, 1, 3, 3, 2, 2, 1)):
        for _ in range(count):
            loop.twin.backward()
        loop.step(f"{count} backwards in step {step}")
    for step, kind in enumerate(("no_sync", "no_replica_sync") * 2):
        with getattr(communicator, kind)():
            loop.twin.backward()
            loop.twin.backward()
        loop.launches()
        with communicator.replica_sync(True) if step > 1 else nullcontext():
            loop.twin.backward()
        launches = loop.launches()
        assert first(launches, "EX layers.3") < first(launches, "RS layers.0"), kind
        loop.step(f"{kind} {step}")
    for step in range(2):  # deferred and not deferred in turn
        for _ in range(2):
            with communicator.no_replica_sync():
                loop.twin.backward()
            loop.twin.backward()
        loop.step(f"by turns {step}")
    with communicator.replica_sync(True):  # wrong: another backward follows
        loop.twin.backward()
    loop.twin.backward()
    loop.step("one more than was said")
    if zero:
        loop.twin.backward()
        loop.ours.finish_reductions()
        loop.twin.backward()
        loop.step("in slices")


@pytest.mark.thorough(6)
@pytest.mark.unmeasured
@pytest.mark.parametrize("zero", PLAIN_FIRST)
def test_sums_of_micro_batches_are_exchanged_once_they_are_complete(zero: bool) -> None:
    run_ranks(micro_batches, 4, zero)


class Between(Tiny):
    """Its head is used between blocks as well."""

    def blocks(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:
                x = x + self.head(x)[..., :6]
        return x


def more_gradients(rank: int, world: int, zero: bool) -> None:
    """Weights that get more gradients after they seemed to be complete."""
    loop = Loop(zero, Between)
    for step in range(3):
        loop.twin.backward()
        launches = loop.launches()
        exchanged = [launch for launch in launches if launch.startswith("EX")]
        assert len(exchanged) == len(set(exchanged)), "each once"
        loop.step(f"a head between blocks, {step}")
    loop = Loop(zero)
    for step in range(3):
        losses: list[tuple[Tensor, ...]] = [
            tuple(model(*batch) for model, batch in zip(
                (loop.twin.plain, loop.twin.ours), loop.twin.batch(), strict=True
            ))
            for _ in range(2)
        ]  # fmt: skip
        for one, other in zip(*losses, strict=True):
            (one + other).backward()
        loop.step(f"a loss of two forwards, {step}")
    # An older graph that was kept: nothing has announced that its weights get another gradient.
    for step in range(2):
        everybody, mine = loop.twin.batch()
        kept = loop.twin.plain(*everybody), loop.twin.ours(*mine)
        for loss in kept:
            loss.backward(retain_graph=True)
        everybody, mine = loop.twin.batch()
        (loop.twin.plain(*everybody) + kept[0]).backward()
        (loop.twin.ours(*mine) + kept[1]).backward()
        loop.step(f"an older graph, {step}")


@pytest.mark.thorough(3)
@pytest.mark.parametrize("zero", ZERO_FIRST)
def test_a_weight_with_more_gradients_to_come_is_waited_for_or_exchanged_again(zero: bool) -> None:
    run_ranks(more_gradients, 4, zero)


def frozen(rank: int, world: int, zero: bool) -> None:
    """Frozen and unfrozen between steps."""
    loop = Loop(zero, partial(Tiny, tied=True))
    for names in (
        ("layers.1", "layers.2.wo"), (), ("layers.0", "layers.1", "embed"), ("layers.3",), (),
    ):  # fmt: skip
        for model in (loop.twin.plain, loop.twin.ours):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.startswith(names or "-"))
        loop.twin.backward()
        loop.step(f"without {names}")


@pytest.mark.thorough(1)
@pytest.mark.parametrize("zero", PLAIN_FIRST)
def test_frozen_weights_hold_no_exchange_up(zero: bool) -> None:
    run_ranks(frozen, 4, zero)


def bits(rank: int, world: int, zero: bool) -> None:
    for weight, degrees in ((2, {}), (1, {}), (1, {"zero": 2})):
        found = []
        for overlap, late in ((True, False), (True, True), (False, False)):
            config = {"overlap": overlap, "degrees": degrees, "weight": weight, **ALL}
            loop = Loop(zero, dtype=torch.float32, **config)
            if late:
                loop.communicator.state.consumer.expects_exchange = lambda: False
            early = 0
            for _ in range(3):
                loop.twin.ours(*loop.twin.batch()[1]).backward()
                launches = loop.launches()
                early += first([*launches, "EX"], "EX") < first(launches, "RS layers.0")
                loop.ours.step()
                loop.ours.zero_grad()
                loop.launches()
            assert early == (0 if late else 2 if zero else 3), "what is compared"
            loop.communicator.wait_until_ready()
            found.append([p.to_local().clone() for p in loop.twin.ours.parameters()])  # type: ignore[attr-defined]
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
            assert all(value.isfinite().all() for value in other)


@pytest.mark.thorough(6)
@pytest.mark.unmeasured
@pytest.mark.parametrize("zero", ZERO_FIRST)
def test_bits_are_the_same_early_late_and_without_overlap(zero: bool) -> None:
    run_ranks(bits, 4, zero)


def bounded(rank: int, world: int, zero: bool) -> None:
    loop = Loop(zero)
    exchanges = loop.communicator.queue.reductions.exchanges
    consumer = loop.communicator.state.consumer
    limit, flying, most = exchanges._limit, [], 0
    start, finish = consumer.start, consumer.finish_oldest

    def started(parcel: Any) -> None:
        nonlocal most
        flying.append(parcel.nbytes)
        most = max(most, sum(flying))
        start(parcel)

    def finished() -> None:
        flying.pop(0)
        finish()

    consumer.start, consumer.finish_oldest = started, finished  # type: ignore[method-assign]
    if zero:  # its step leaves no gradient
        loop.ours.zero_grad = lambda: None
    for step in range(3):
        loop.launches()
        loop.twin.backward()
        early = any(line.startswith("EX") for line in loop.launches())
        assert early == (step > 0 or not zero), "once it is known how many backwards a step has"
        loop.step(f"{step}")
        assert not flying
    assert 0 < most <= limit
    total = sum(parcel.nbytes for parcel in exchanges.parcels)
    assert limit < total, "so that the limit binds"


@pytest.mark.parametrize("zero", ZERO_FIRST)
def test_no_more_bytes_are_in_flight_than_the_limit(zero: bool) -> None:
    run_ranks(bounded, 4, zero)


def failed(rank: int, world: int, zero: bool) -> None:
    """A backward that all ranks leave where exchanges are in flight; gradients that are dropped."""
    for degrees in ({}, {"zero": 1}):
        loop = Loop(zero, partial(Tiny, Failing), degrees=degrees)
        for step in range(2):
            loop.twin.backward()
            loop.step(f"before, {step}")
        layer: Any = loop.twin.ours.layers[0]  # type: ignore[index]
        for _ in range(2):
            layer.where = "backward"
            loop.launches()
            raises(Boom, loop.twin.ours(*loop.twin.batch()[1]).backward)
            assert first(loop.launches(), "EX head") >= 0, "in flight"
            layer.where = ""
            for step in range(2):
                loop.twin.backward()
                loop.step(f"after a failure, {step}")
    if zero:
        drops: tuple[Callable[[nn.Module], None], ...] = (
            lambda model, loop=loop: (  # type: ignore[misc]
                loop.ours.zero_grad() if model is loop.twin.ours else model.zero_grad()
            ),
            lambda model: model.zero_grad(),
            lambda model: model.zero_grad(set_to_none=False),
            half,
        )
        for number, drop in enumerate(drops):
            loop.twin.backward()
            loop.step("one backward a step")
            loop.twin.backward()
            drop(loop.twin.ours)
            drop(loop.twin.plain)
            loop.twin.backward()
            loop.step(f"drop {number}")


def half(model: nn.Module) -> None:
    for parameter in [*model.parameters()][::2]:
        parameter.grad = None


@pytest.mark.unmeasured
@pytest.mark.parametrize("zero", ZERO_FIRST)
def test_a_step_after_a_failed_or_dropped_one_is_right(zero: bool) -> None:
    run_ranks(failed, 4, zero)


def direct(rank: int, world: int) -> None:
    """A term of the parameters themselves, in a separate backward after an early exchange."""
    loop = Loop(ZERO)
    for step in range(3):
        loop.twin.backward()
        for model in (loop.twin.plain, loop.twin.ours):
            sum(p.pow(2).sum() for p in model.layers[1].parameters()).backward()  # type: ignore[union-attr]
        loop.step(f"{step}")


def test_a_term_of_parameters_counts_once_beside_an_early_exchange() -> None:
    run_ranks(direct, 4)
