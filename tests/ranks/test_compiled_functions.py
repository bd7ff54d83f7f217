"""Steps of optimizers, and functions of parameters, that a program compiles itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from internsp.errors import StructureError
from internsp.fsdp import fully_shard
from internsp.optim import ZeroOptimizer
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.models import Tiny, Twin, raises
from tests.support.ranks import ranks


def compiled(function: Callable[..., Any], whole: bool = False) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", fullgraph=whole, dynamic=False)


def small() -> Tiny:
    return Tiny(layers=1)


def of_loop(twin: Twin) -> Any:
    return SGD(twin.ours.parameters(), lr=0.1, momentum=0.9)


def of_zero(twin: Twin) -> Any:
    return ZeroOptimizer(twin.communicator, SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    "make", [pytest.param(of_loop, marks=pytest.mark.thorough(20)), of_zero]
)
@ranks(2)
def test_a_compiled_step_is_the_steps(make: Callable[[Twin], Any]) -> None:
    twin = Twin(small, mesh_of(2))
    plain, ours = SGD(twin.plain.parameters(), lr=0.1, momentum=0.9), make(twin)
    step = compiled(ours.step)
    for number in range(3):  # slots are poisoned: a write that nothing noticed would show
        twin.backward()
        plain.step()
        step()
        plain.zero_grad()
        ours.zero_grad()
        twin.check_parameters(f"step {number}")


@ranks(2)
def test_a_compiled_step_of_fsdp2s_programs_is_the_steps() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)).double()
    ours = copy.deepcopy(plain)
    for layer in (*ours, ours):
        fully_shard(layer)
    both = [SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, ours)]
    step, rows = compiled(both[1].step), slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for number in range(3):
        given = torch.randn(4, 6, dtype=torch.float64)  # the same on all ranks
        plain(given).square().mean().backward()
        ours(given[rows]).square().mean().backward()  # gradients are averaged
        both[0].step()
        step()
        for optimizer in both:
            optimizer.zero_grad()
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            close(whole_of(mine), theirs, f"step {number}")


def decayed(values: Tensor) -> None:
    values.mul_(0.9)


def averaged(average: Tensor, values: Tensor) -> None:
    average.lerp_(values, 0.25)


def norm(values: list[Tensor]) -> Any:
    return sum(each.square().sum() for each in values)


def tripled(values: Any) -> Any:
    return values * 3


def whole_sum(values: Any) -> Any:
    return values.full_tensor().sum()


@pytest.mark.parametrize("make", [of_loop, of_zero])
@ranks(2)
def test_functions_of_parameters_are_compiled_in_one_graph(make: Callable[[Twin], Any]) -> None:
    twin = Twin(small, mesh_of(2))
    optimizers = SGD(twin.plain.parameters(), lr=0.1, momentum=0.9), make(twin)
    for _ in range(2):
        twin.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        twin.check_parameters("after a step, and writes before it")
        averages: list[Tensor] = []
        with torch.no_grad():
            for (one, two), model in zip(
                ((decayed, averaged), (compiled(decayed, True), compiled(averaged, True))),
                (twin.plain, twin.ours),
                strict=True,
            ):
                for p in model.parameters():
                    averages.append(p.detach().clone())
                    one(p.detach())  # the next forward sees it
                    two(averages[-1], p.detach())
            plain, ours = ([p.detach() for p in m.parameters()] for m in (twin.plain, twin.ours))
            for mean, whole in zip(averages[len(ours) :], averages, strict=False):
                close(whole_of(mean), whole, "averages")
            close(whole_of(compiled(norm, True)(ours)), norm(plain), "norm")
            made = compiled(tripled, True)(ours[0])
            close(whole_of(made), tripled(plain[0]), "a new value")
            close(compiled(whole_sum, True)(ours[0]), plain[0].sum(), "full_tensor()")
            raises(StructureError, partial(torch.add, made, plain[0]), "with a plain tensor")


def whole_of(value: Any) -> Tensor:
    found: Tensor = value.full_tensor()
    return found


@ranks(2)
def test_what_a_compiled_function_cannot_do_with_parameters_is_named() -> None:
    twin = Twin(small, mesh_of(2))
    weight = twin.ours.get_parameter("layers.0.wo.weight")
    leave_out = "leave that out of the function"
    raises(Exception, lambda: compiled(whole_sum)(weight), "internsp knows", leave_out)
    optimizer = of_zero(twin)
    with torch.no_grad():
        detached = compiled(tripled)(weight.detach())
        close(whole_of(detached), whole_of(weight) * 3, "detached")
        raises(
            Exception, lambda: compiled(tripled)(weight),
            "layers.0.wo.weight was given on rank", "give it weight.detach()",
        )  # fmt: skip
    twin.backward()
    gradient = weight.grad
    raises(Exception, lambda: compiled(tripled)(gradient), "layers.0.wo.weight.grad was read on")
    optimizer.step()
