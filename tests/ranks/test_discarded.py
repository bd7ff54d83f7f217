"""Sums of micro-batches that a user discards do not come back, as on one process.

Whatever the test does to ``.grad`` between backwards is done to one process's model as well; then
gradients and, after steps, parameters are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from internsp.errors import GradientError
from internsp.optim import ZeroOptimizer
from tests.support.compare import check, close, gradients
from tests.support.few import some
from tests.support.meshes import mesh_of
from tests.support.models import ALL, Tiny, Twin, raises
from tests.support.ranks import ranks


class Side(Tiny):
    """With a branch that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__(layers=2, tied=True)
        self.side = nn.Linear(6, 6)
        self.taken = False

    def blocks(self, x: Tensor) -> Tensor:
        x = super().blocks(x)
        return x + self.side(x) if self.taken else x


def half(model: nn.Module) -> list[nn.Parameter]:
    """Every second parameter: sharded and replicated ones, in blocks and outside."""
    return list(model.parameters())[::2]


def by_hand(parameters: Any) -> None:
    for parameter in parameters:
        parameter.grad = None


def in_place(parameters: Any) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.data.zero_()


def optimizer(parameters: Any, to_none: bool, foreach: bool = False) -> None:
    torch.optim.SGD(list(parameters), lr=0.1, foreach=foreach).zero_grad(set_to_none=to_none)


DROPS: dict[str, Callable[[nn.Module], None]] = {
    "model": lambda model: model.zero_grad(),
    "model, to zero": lambda model: model.zero_grad(set_to_none=False),
    "optimizer of half": lambda model: optimizer(half(model), True),
    "optimizer of half, to zero": lambda model: optimizer(half(model), False),
    "foreach optimizer, to zero": lambda model: optimizer(model.parameters(), False, True),
    "by hand": lambda model: by_hand(model.parameters()),
    "half by hand": lambda model: by_hand(half(model)),
    "half in place": lambda model: in_place(half(model)),
}


MESHES = pytest.mark.parametrize(
    ("world_size", "weight"),
    [(2, 1), *(pytest.param(n, 2, marks=pytest.mark.thorough(2 * n)) for n in (2, 4))],
)


def take_side(twin: Twin, taken: bool) -> None:
    twin.ours.taken = twin.plain.taken = taken  # type: ignore[assignment]


@pytest.mark.unmeasured
@MESHES
@ranks()
def test_sums_dropped_in_a_plain_loop_stay_dropped(world_size: int, weight: int) -> None:
    """A plain loop: each way to discard, with and without complete earlier gradients."""
    for kind, together in (("no_sync", {}), ("no_replica_sync", ALL)):
        twin = Twin(Side, mesh_of(weight), **together)
        ours = torch.optim.AdamW(twin.ours.parameters(), lr=1e-2, eps=1e-3)
        theirs = torch.optim.AdamW(twin.plain.parameters(), lr=1e-2, eps=1e-3)
        sync = getattr(twin.communicator, kind)
        for number, (name, drop) in enumerate(DROPS.items()):
            what = f"weight {weight}, {kind}, {name}"
            if number % 2:
                twin.backward()  # already complete, and discarded or kept with the others
            take_side(twin, number % 3 == 0)
            with sync():
                twin.backward()
                if number in (2, 5):  # autograd itself adds to .grad
                    for model in (twin.plain, twin.ours):
                        terms = [p.pow(2).sum() for p in model.layers[0].parameters()]
                        sum(terms[1:], terms[0]).backward()
                twin.backward()
            raises(GradientError, ours.step, "is not complete", "outside no_sync()")
            drop(twin.ours)
            drop(twin.plain)
            take_side(twin, False)
            with sync():
                twin.backward()
            twin.backward()
            twin.check_step((ours, theirs), what)
            assert not twin.communicator.state.reducer.unsharded_sums.nbytes


@pytest.mark.unmeasured
@MESHES
@ranks()
def test_sums_dropped_before_a_zero_optimizers_step_stay_dropped(
    world_size: int, weight: int
) -> None:
    """Between backward and a ZeroOptimizer's step, in or out of no_sync."""
    for kind, together in (("no_sync", ALL), ("no_replica_sync", {}), ("neither", {})):
        twin = Twin(Side, mesh_of(weight), **together)
        settings: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}
        theirs = torch.optim.AdamW(twin.plain.parameters(), **settings)
        ours = ZeroOptimizer(twin.communicator, torch.optim.AdamW, **settings)
        sync = getattr(twin.communicator, kind, nullcontext)
        for number, (name, drop) in enumerate(DROPS.items()):
            what = f"weight {weight}, {kind}, {name}"
            take_side(twin, number % 3 == 0)
            with sync():
                twin.backward()
                if number % 2:
                    ours.finish_reductions()  # into slices
                twin.backward()
            drop(twin.ours)
            drop(twin.plain)
            take_side(twin, False)
            twin.backward()
            wanted = {n: p.grad for n, p in twin.plain.named_parameters() if p.grad is not None}
            if number % 2:
                found = ours.gather_gradients()
                assert found.keys() == wanted.keys(), what
                for key, value in wanted.items():
                    close(found[key], value, f"{what}: gradient of {key}")
            norm = torch.nn.utils.get_total_norm(list(wanted.values()))
            ours.step()
            assert ours.grad_norm == pytest.approx(float(norm), rel=1e-10), what
            theirs.step()
            theirs.zero_grad()
            twin.communicator.wait_until_ready()
            twin.check_parameters(what)


class Boom(Exception):
    """An exception that a program may catch, to skip a micro-batch."""


def fail(twin: Twin, where: str) -> None:
    """A micro-batch that raises at the same point on every rank, and is caught."""
    block = twin.ours.layers[0]  # type: ignore[index]

    def boom(*_: Any) -> None:
        raise Boom

    if where == "forward":
        hook = block.register_forward_hook(boom)  # type: ignore[union-attr]
    else:
        hook = block.register_full_backward_hook(boom)  # type: ignore[union-attr]
    raises(Boom, lambda: twin.ours(*twin.batch()[1]).backward())
    hook.remove()


AGAIN = ("optimizer", "model", "model, to zero", "foreach optimizer, to zero", "by hand")


@pytest.mark.thorough(2)
@pytest.mark.parametrize("zero", some([True, False], 1), ids=["zero", "plain loop"])
@ranks(2)
def test_what_a_failed_micro_batch_takes_with_it_is_missed(zero: bool) -> None:
    """Never a step without the micro-batches before a failed one, unless they are discarded."""
    for where in ("forward", "backward"):
        for again in AGAIN:
            twin = Twin(Side, mesh_of(2))
            ours = twin.communicator
            optimizer: Any
            if zero:
                optimizer = ZeroOptimizer(ours, torch.optim.SGD, lr=0.1)
            else:
                optimizer = torch.optim.SGD(twin.ours.parameters(), lr=0.1)
            with nullcontext() if zero else ours.no_sync():
                twin.ours(*twin.batch()[1]).backward()
            fail(twin, where)
            what = f"{where}, {again}"
            if zero:
                twin.ours(*twin.batch()[1]).backward()
                raises(GradientError, optimizer.step, "before it")
                raises(GradientError, optimizer.step, "zero_grad()")
            else:
                later = twin.ours(*twin.batch()[1])
                raises(GradientError, later.backward, "zero_grad()")
            if again == "optimizer":
                optimizer.zero_grad()
            else:
                DROPS[again](twin.ours)
            twin.plain.zero_grad()
            twin.backward()
            if zero:
                wanted = {n: g for n, g in gradients(twin.plain).items() if g is not None}
                check(optimizer.gather_gradients(), wanted, what)
            else:
                twin.check_gradients(what)
