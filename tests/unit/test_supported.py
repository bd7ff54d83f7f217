"""Unsupported parts of a model are found before it is sharded; which outputs belong to whom."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from internsp.base.autograd import clone_aliases, input_tensors, new_tensors
from internsp.config import PlanRule
from internsp.errors import StructureError
from internsp.modules.supported import require_supported
from tests.support.models import Tiny, raises


def with_hook() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(lambda gradient: gradient)
    return layer


def with_copies() -> nn.Module:
    layer: Any = nn.Linear(2, 2)
    layer.cached = {"both": [(layer.weight, layer.bias)]}
    return layer


def with_closure() -> nn.Module:
    layer: Any = nn.Linear(2, 2)
    weight = layer.weight
    layer.function = lambda x: x @ weight
    return layer


def with_default() -> nn.Module:
    layer: Any = nn.Linear(2, 2)

    def function(x: Tensor, *, weight: Tensor = layer.weight) -> Tensor:
        return x @ weight

    layer.functions = [function]
    return layer


def with_partial() -> nn.Module:
    layer: Any = nn.Linear(2, 2)
    layer.function = partial(nn.functional.linear, weight=layer.weight)
    return layer


def with_object() -> nn.Module:
    layer: Any = nn.Linear(2, 2)
    layer.held = SimpleNamespace(weights=(layer.weight,))
    return layer


def compiled() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.compile()
    return layer


class Params4bit(nn.Parameter):
    """Of bitsandbytes' shape: codes of two values a byte, and the scales beside them."""

    quant_state: Any

    def cuda(self, *_: Any) -> Params4bit:  # type: ignore[override]
        return self


class Int8Tensor(Tensor):
    """Of torchao's shape: a tensor without storage that dispatches operations itself."""

    def __new__(cls, codes: Tensor) -> Int8Tensor:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(f"{cls.__name__} dispatch: {function}")


class Marked(nn.Parameter):
    """A class that adds nothing: only the name differs."""


def holding(parameter: Any) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer._parameters["weight"] = parameter
    return layer


def four_bits() -> nn.Module:
    codes: Any = Params4bit(torch.zeros(2, 1, dtype=torch.uint8), requires_grad=False)
    codes.quant_state = {"absmax": torch.ones(1)}
    return holding(codes)


def plain_with_scales() -> nn.Module:
    codes: Any = nn.Parameter(torch.zeros(2, 1, dtype=torch.uint8), requires_grad=False)
    codes.quant_state = {"absmax": torch.ones(1)}
    return holding(codes)


def wrapped() -> nn.Module:
    return holding(nn.Parameter(Int8Tensor(torch.zeros(2, 2, dtype=torch.int8)), False))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (four_bits, "part.weight is a tests.unit.test_supported.Params4bit, not a plain"),
        (plain_with_scales, "part.weight is a torch.nn.parameter.Parameter, not a plain"),
        (wrapped, "part.weight is a tests.unit.test_supported.Int8Tensor, not a plain"),
        (lambda: nn.Embedding(4, 2, max_norm=1.0), "embedding part: max_norm"),
        (lambda: nn.Embedding(4, 2, sparse=True), "embedding part: max_norm"),
        (lambda: nn.Embedding(4, 2, scale_grad_by_freq=True), "embedding part: max_norm"),
        (lambda: nn.EmbeddingBag(4, 2, max_norm=1.0), "embedding part: max_norm"),
        (lambda: nn.EmbeddingBag(4, 2, sparse=True), "embedding part: max_norm"),
        (lambda: nn.LazyLinear(2), "part.weight has no shape yet"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "part is a ScriptModule"),
        (lambda: torch.compile(nn.Linear(2, 2)), "part is compiled by torch.compile"),
        (compiled, "part is compiled by torch.compile"),
        (with_hook, "part.weight has a gradient hook"),
        (with_copies, "part.cached holds the parameter part.weight"),
        (with_closure, "part.function holds the parameter part.weight"),
        (with_default, "part.functions holds the parameter part.weight"),
        (with_partial, "part.function holds the parameter part.weight"),
        (with_object, "part.held holds the parameter part.weight"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_model_with_such_a_part_is_refused_with_the_parts_name(make: Any, words: str) -> None:
    model: Any = Tiny()
    require_supported(model)
    model.part = make()
    raises(StructureError, lambda: require_supported(model), words)


@pytest.mark.parametrize("make", [four_bits, plain_with_scales, wrapped])
def test_a_quantized_parameter_that_a_rule_ignores_may_stay(make: Any) -> None:
    model: Any = Tiny()
    model.part = make()
    require_supported(model, [PlanRule(match="part.weight", ignore=True)])
    rules = [PlanRule(match="part", ignore=False), PlanRule(match="part.bias", shard_dim=0)]
    raises(StructureError, lambda: require_supported(model, rules), "part.weight is a")


def test_a_class_that_adds_nothing_to_a_parameter_is_taken() -> None:
    model: Any = Tiny()
    model.part = holding(Marked(torch.zeros(2, 2)))
    require_supported(model)


@dataclass(frozen=True)
class Pair:
    first: Tensor
    second: Any


def test_only_tensors_that_a_call_has_made_or_written_into_are_its_own() -> None:
    x, y, z = (torch.ones(2, requires_grad=True) * n for n in (1, 2, 3))
    before = input_tensors(((x, {"y": y}), {"z": z}))
    y.add_(1)  # written into and returned
    z.mul_(2)  # written into and not returned
    made = x * 2
    found = new_tensors([x, y, Pair(made, x)], before)
    assert {id(tensor) for tensor in found} == {id(y), id(z), id(made)}
    with torch.no_grad():
        assert new_tensors(x, input_tensors(x)) == [x], "no graph, no difference"


def test_views_of_weights_leave_as_clones_with_gradients_and_nothing_else_is_touched() -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    other = torch.randn(3)
    named = torch.return_types.max((weight[0], other))
    output = {"t": weight.t(), "list": [weight, other], "pair": Pair(weight.data[1:], (named,))}
    found = clone_aliases(output, [weight.detach()])
    ends = weight.data_ptr(), weight.data_ptr() + 4 * weight.numel()
    inner = found["pair"].second[0]
    cloned = [found["t"], found["list"][0], found["pair"].first, inner[0]]
    for tensor, wanted in zip(cloned, (weight.t(), weight, weight[1:], weight[0]), strict=True):
        assert not ends[0] <= tensor.data_ptr() < ends[1]
        assert torch.equal(tensor, wanted)
    assert found["list"][1] is other
    assert inner[1] is other
    assert type(inner) is type(named)
    (gradient,) = torch.autograd.grad(found["t"].sum() + inner[0].sum(), weight)
    assert torch.equal(gradient[0], torch.full((3,), 2.0))
    alone = (other, [other])
    assert clone_aliases(alone, [weight.detach()]) is alone


BESIDE, WITHIN = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)
SHARED = WITHIN.weight


class ReadsBeside(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * BESIDE


class ReadsShared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ SHARED


class ReadsModule(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ WITHIN.weight  # what stands there then: found


@pytest.mark.parametrize(("reader", "words"), [
    (ReadsBeside, "layer: forward of ReadsBeside reads the parameter BESIDE .* does not register"),
    (ReadsShared, "layer: forward of ReadsShared reads the parameter SHARED .* is own.weight"),
])  # fmt: skip
def test_a_parameter_that_a_forward_reads_from_a_global_is_refused(
    reader: type[nn.Module], words: str
) -> None:
    model = nn.ModuleDict({"own": WITHIN, "layer": reader()})
    with pytest.raises(StructureError, match=words):
        require_supported(model)
    require_supported(nn.ModuleDict({"own": WITHIN, "layer": ReadsModule()}))
