"""The comparison with one process detects every way in which ranks may differ from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from internsp.mesh import ParallelMesh
from tests.support.compare import (
    after_a_step,
    check,
    close,
    differences,
    gap,
    gaps,
    gradients,
    on_all_stages,
    parameters,
)
from tests.support.models import Block
from tests.support.ranks import ranks

NAME = "w1.weight"


def backward() -> Block:
    torch.manual_seed(0)
    block = Block().double()
    block(torch.randn(3, 6, dtype=torch.float64)).square().sum().backward()
    return block


def changed(change: Callable[[Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def act(values: dict[str, Any]) -> None:
        values[NAME] = values[NAME].clone()
        change(values[NAME])

    return act


FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no value": lambda values: values.update({NAME: None}),
    "a name too few": lambda values: values.pop(NAME),
    "a name too many": lambda values: values.update({"w3.weight": torch.zeros(1)}),
    "a name too many, without a value": lambda values: values.update({"w3.weight": None}),
    "NaN": changed(lambda value: value[-1].fill_(float("nan"))),
    "infinity": changed(lambda value: value[-1].fill_(float("inf"))),
    "a difference of 1e-9 in one element": changed(
        lambda value: value[-1, -1].add_(1e-9 * value.abs().max())
    ),
    "another shape": lambda values: values.update({NAME: values[NAME][:1]}),
    "a shape that broadcasts": lambda values: values.update({NAME: values[NAME][None]}),
}


@pytest.mark.parametrize("take", [gradients, parameters])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_difference_is_found_in_every_gradient_and_parameter(
    take: Callable[..., dict[str, Any]], fault: Callable[[dict[str, Any]], Any]
) -> None:
    wanted = take(backward())
    check(take(backward()), wanted, "the same")
    found = take(backward())
    fault(found)
    name = "w3.weight" if "w3.weight" in found else NAME
    (line,) = differences(found, wanted)
    assert line.startswith(name)
    assert max(gaps(found, wanted).values()) > 1e-10
    with pytest.raises(AssertionError, match=rf"step 3: {name}"):
        check(found, wanted, "step 3")


def test_rounding_is_no_difference_even_where_a_gradient_is_zero_but_for_it() -> None:
    wanted = {"large": torch.ones(3).double(), "zero": torch.full((2,), 1e-16).double()}
    found = {"large": wanted["large"] * (1 + 1e-15), "zero": -wanted["zero"]}
    assert differences(found, wanted) == []
    assert differences({**found, "zero": wanted["zero"] + 1e-13}, wanted)


def test_gradients_that_are_all_zero_are_not_taken_for_any_other() -> None:
    nothing = {"weight": torch.zeros(3)}
    assert differences(nothing, nothing) == []
    assert differences({"weight": torch.full((3,), 1e-30)}, nothing)


def test_one_tensor_is_compared_in_the_same_way() -> None:
    one = torch.ones(2).double()
    close(one + 1e-11, one, "near")
    for other in (one + 1e-9, one * float("nan"), one[:1], one[None]):
        with pytest.raises(AssertionError, match="far"):
            close(other, one, "far")


def test_parameters_after_a_step_differ_where_a_gradient_does() -> None:
    ours, plain = backward(), backward()
    ours.w1.weight.grad.add_(1.0)  # type: ignore[union-attr]
    for model in (ours, plain):
        torch.optim.SGD(model.parameters(), lr=0.05).step()
    assert [line.split()[0] for line in differences(parameters(ours), parameters(plain))] == [NAME]


@pytest.mark.thorough(1)
@ranks(3)
def test_each_rank_compares_its_own_part_and_together_they_compare_all(rank: int) -> None:
    mesh = ParallelMesh.create(3, device_type="cpu", timeout_seconds=30).param_mesh
    whole = torch.arange(1.0, 8.0).double()[:, None].expand(7, 2)
    rest = [Replicate()] * (mesh.ndim - 1)
    for row in range(7):
        other = whole.clone()
        other[row] += 1e-8
        found = distribute_tensor(other, mesh, [*rest, Shard(0)])
        assert (gap(found, whole) > 1e-10) == (row // 3 == rank), "parts of three, three and one"
    assert gap(distribute_tensor(whole, mesh, [*rest, Shard(0)]), whole) == 0.0


@ranks(2)
def test_a_parameter_that_no_stage_has_is_missed_by_all_of_them(rank: int) -> None:
    plain = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    mine = nn.ModuleDict({"ab"[rank]: plain["ab"[rank]]})
    assert list(on_all_stages(parameters(mine), parameters(plain))) == list(parameters(mine))
    for missing in (nn.ModuleDict({"a": plain["a"]}), nn.ModuleDict()):
        for compare in (lambda m: on_all_stages(parameters(m), parameters(plain)),
                        lambda m: after_a_step([plain["a"]], plain)):  # fmt: skip
            with pytest.raises(AssertionError, match=r"no stage has .*b\.bias"):
                compare(missing)
