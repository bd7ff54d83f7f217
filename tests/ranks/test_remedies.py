"""Every remedy that an error text names is run: the table below, and a scan that it is complete.

A row has a piece of an error's text, and for each remedy in it the words that name it and what was
done: a function that runs the remedy on two ranks and compares with one process, or the test of
another file that does so.
"""

from __future__ import annotations

import ast
import copy
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.nn import functional as F
from torch.nn.utils import parametrize

import internsp
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.optim import ZeroOptimizer
from internsp.parallel.parallelize import initialize, parallelize
from tests.ranks.test_state_dict_helpers import Scaled
from tests.support import hf, reads
from tests.support.compare import check, close, gradients
from tests.support.meshes import mesh_of
from tests.support.models import ALL, Block, Reordered, Tiny, Twin
from tests.support.ranks import ranks
from tests.support.remedies import ROOT, Remedy, require_tests, run, text_of

OWN_CLASS = "tests/ranks/test_own_class.py::test_trained_classes_have_the_numbers_of_one_import"
ROOMS = ("modules", "dtensor", "wp", "base/autograd.py")
FULL = ActivationCheckpointConfig(mode="full")

NONE: dict[str, Remedy] = {}
# The remedy where data decide which blocks a rank runs.
OTHER_DATA = (
    "tests/ranks/test_agreement.py::"
    "test_a_block_that_a_rank_has_no_data_for_runs_with_other_data"
)


def right(
    make: Callable[..., nn.Module] = Tiny,
    checkpoint: Any = None,
    before: Callable[[Any], Any] = lambda model: None,
    after: Callable[[Any], Any] = lambda model: None,
    degrees: Mapping[str, int] = MappingProxyType({"weight": 2}),
    **config: Any,
) -> Twin:
    """Two backwards of a model in which the remedy was done, on two ranks and on one process.

    Args:
        before: done to the model before ``parallelize``.
        after: done to both models afterwards.
        degrees: of the mesh.
    """

    def made() -> nn.Module:
        model = make(layers=2)
        before(model)
        return model

    twin = Twin(made, mesh_of(**degrees), checkpoint, **config)
    for model in (twin.plain, twin.ours):
        after(model)
    for number in range(2):
        twin.backward()
        twin.check_gradients(f"backward {number}")
    twin.zero_grad()
    return twin


def stepped(optimizer: Callable[[Any], Any]) -> None:
    """Steps of an optimizer of each model."""
    twin = right()
    made = [optimizer(model.parameters()) for model in (twin.plain, twin.ours)]
    for step in range(2):
        twin.backward()
        twin.check_step(made, f"step {step}")


class Positional(torch.optim.SGD):
    """Takes its rate by position, so that its groups' settings alone make no second one."""

    def __init__(self, parameters: Any, rate: float, **options: Any) -> None:
        super().__init__(parameters, lr=rate, **options)


def loads_what_was_saved() -> None:
    twin = right(lambda layers: Scaled())

    def pair() -> list[Any]:
        models = (twin.plain, twin.ours)
        return [Positional(model.parameters(), 0.1, momentum=0.9) for model in models]

    before, after = pair(), pair()
    twin.backward()
    twin.check_step(before, "before the save")
    for saved, loaded in zip(before, after, strict=True):
        loaded.load_state_dict(saved.state_dict())
    twin.backward()
    twin.check_step(after, "after the load")


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(*batch)
    return found


# torch's transforms, compilers and tracers


def finite_differences() -> None:
    twin = Twin(partial(Tiny, layers=2), mesh_of(2))
    everybody, mine = twin.batch()
    others, our_others = twin.batch()
    for model, pairs in ((twin.plain, [(everybody, others)]), (twin.ours, [(mine, our_others)])):
        for one, other in pairs:
            ((loss_of(model, one) - loss_of(model, other)) / 0.1).backward()
    twin.check_gradients("a difference of two forwards")


def a_copy_under_a_transform() -> None:
    twin = Twin(partial(Tiny, layers=2), mesh_of(2))
    everybody, mine = twin.batch()
    before = copy.deepcopy(twin.plain)  # a copy of before parallelize()
    whole = {
        name: p.full_tensor(grad_placements=[Partial()] * p.device_mesh.ndim)  # type: ignore
        for name, p in twin.ours.named_parameters()
    }

    def row(weights: Any, ids: Tensor, labels: Tensor) -> Tensor:
        given = ids.unsqueeze(0), labels.unsqueeze(0)
        found: Tensor = torch.func.functional_call(before, weights, given)
        return found

    torch.vmap(row, in_dims=(None, 0, 0))(whole, *mine).sum().backward()
    loss_of(twin.plain, everybody).backward()
    twin.check_gradients("a copy under torch.vmap")
    values = {name: w.detach() for name, w in whole.items()}
    plain = {name: p.detach() for name, p in twin.plain.named_parameters()}
    for transformed in (
        lambda w: torch.func.grad(row)(w, everybody[0][0], everybody[1][0])["embed.weight"],
        lambda w: torch.func.jvp(lambda t: row(t, everybody[0][0], everybody[1][0]), (w,), (w,))[1],
    ):
        close(transformed(values), transformed(plain), "a copy under torch.func")


class Helped(Block):
    """Compiles a function of plain tensors."""

    helper = staticmethod(torch.compile(lambda x: torch.tanh(x) * 1.5, backend="eager"))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.helper(x))


def traced(exported: bool) -> None:
    twin = Twin(partial(Tiny, layers=2), mesh_of(2))
    model, (_, mine) = copy.deepcopy(twin.plain), twin.batch()
    if exported:
        with internsp.full_params(twin.ours):
            values = {name: p.clone() for name, p in twin.ours.named_parameters()}
        model.load_state_dict(values)
    traced = torch.jit.trace(model, mine[:1], check_trace=False)
    close(traced(mine[0]), twin.plain(mine[0]), "a traced model")


# parameters outside of a forward


def written(write: Callable[[Any], Any]) -> None:
    """Values drawn of one seed, written into both models in the same way."""

    def draw(model: nn.Module) -> None:
        write(model)

    right(after=draw)


def drawn(shape: Any) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def by_data(model: Any) -> None:
    model.head.weight.data = drawn(model.head.weight.shape)


def within_full_params(model: Any) -> None:
    if isinstance(model.head.weight, DTensor):
        with internsp.full_params(model, write="shards"), torch.no_grad():
            model.head.weight.copy_(drawn(model.head.weight.shape))
    else:
        by_data(model)


def initialized() -> None:
    twin = Twin(partial(Tiny, layers=2), mesh_of(2))

    def fill(name: str, values: Tensor, generator: torch.Generator) -> None:
        values.normal_(0, 0.2, generator=generator)

    initialize(twin.communicator, fill, 7)
    for name, p in twin.plain.named_parameters():
        p.data = twin.ours.get_parameter(name).full_tensor().detach()  # type: ignore[operator]
    twin.backward()
    twin.check_gradients("filled by initialize")


def by_a_dtensor_placed_alike(model: Any) -> None:
    weight = model.head.weight
    values = drawn(weight.shape)
    if isinstance(weight, DTensor):
        whole = [Replicate()] * weight.device_mesh.ndim
        there = distribute_tensor(values, weight.device_mesh, whole)
        weight.data = there.redistribute(placements=weight.placements)
    else:
        weight.data = values


def averaged(model: Any) -> None:
    average = model.head.weight.detach().clone()
    average.lerp_(model.head.weight.detach() * 3, 0.25)
    model.head.weight.data = average


def loaded(model: Any) -> None:
    state = dict(model.state_dict())
    state["head.weight"] = drawn(model.head.weight.shape)
    model.load_state_dict(state)


def clamped(model: Any) -> None:
    with torch.no_grad():
        model.head.weight.clamp_(-0.1, 0.1)


def a_backward_of_its_own() -> None:
    twin = Twin(partial(Tiny, layers=2), mesh_of(2))
    everybody, mine = twin.batch()
    for model, batch in ((twin.plain, everybody), (twin.ours, mine)):
        loss_of(model, batch).backward()
        sum(p.pow(2).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    twin.check_gradients("a penalty with a backward of its own")


def decayed(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, weight_decay=0.3)


class TermWithin(Tiny):
    """A term of a parameter, in the forward."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(ids, labels) + self.head.weight.pow(2).sum() * ids.sum()


def cast(before: bool) -> None:
    """Values in 16 bits are taken where the model was cast, or computed in where it was not."""
    if before:
        twin = Twin(partial(Tiny, layers=2), mesh_of(2), dtype=torch.bfloat16)
        by = drawn(twin.plain.head.weight.shape).bfloat16()  # type: ignore[union-attr, arg-type]
        for model in (twin.plain, twin.ours):
            model.head.weight.data = by  # type: ignore[union-attr]
        close(twin.ours.head.weight.full_tensor(), by, "16-bit values")  # type: ignore
        return
    twin = Twin(partial(Tiny, layers=2), mesh_of(2), compute_dtype="bfloat16")
    twin.ours.to(torch.float64)  # its own dtype
    _, mine = twin.batch()
    assert twin.ours(mine[0]).dtype == torch.bfloat16


def partial_weights_redistributed() -> None:
    mesh = mesh_of(1, tensor=2)
    model = Tiny(layers=2).double()
    plain = copy.deepcopy(model)
    tensor = mesh.tensor_mesh
    halves = DTensor.from_local(model.head.weight.detach() / 2, tensor, [Partial()])
    model.head.weight = nn.Parameter(halves.redistribute(placements=[Replicate()]))
    parallelize(model, mesh, WeightParallelConfig(min_shard_elements=20))
    close(model.head.weight.full_tensor(), plain.head.weight, "a weight that was Partial")


# sums that wait


def sums_that_wait(drop: Callable[[Any], Any]) -> None:
    twin = Twin(partial(Tiny, layers=2), mesh_of(2))
    with twin.communicator.no_sync():
        twin.backward()
    drop(twin)
    twin.backward()
    twin.check_gradients("sums that waited")


def drop_each(twin: Twin) -> None:
    for model in (twin.plain, twin.ours):
        for p in model.parameters():
            p.grad = None


# what blocks return, and what they read past their modules


@dataclass
class Result:
    x: Tensor


def taking(put: Callable[[Tensor], Any], take: Callable[[Any], Tensor]) -> Callable[..., Tiny]:
    """A model whose blocks, and a module within each, return ``put`` of their result."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6) / 3)

        def forward(self, x: Tensor) -> Any:
            return put(x @ self.weight)

    class Container(Block):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Any:
            return put(super().forward(take(self.inner(x))))

    class Model(Tiny):
        def blocks(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = take(layer(x))
            return x

    return partial(Model, Container)


def containers() -> None:
    for put, take in (
        (lambda x: x, lambda y: y),
        (lambda x: (x, 1), lambda y: y[0]),
        (lambda x: [x], lambda y: y[0]),
        (lambda x: {"x": x}, lambda y: y["x"]),
        (Result, lambda y: y.x),
    ):
        right(taking(put, take))


class Handed(Block):
    """Returns a tensor that it made with a weight of its child, which the model uses."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), F.linear(x, self.w1.weight).square().tanh()


class UsesHanded(Tiny):
    def __init__(self, **options: Any) -> None:
        super().__init__(Handed, **options)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x, total = self.embed(ids), torch.zeros((), dtype=torch.float64)
        for layer in self.layers:
            x, more = layer(x)
            total = total + more.sum()
        return super().forward(ids, labels) if labels is None else self.loss(x, labels) + total

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class ForAWhile(Block):
    """Registers a parametrization in its forward, and removes it there."""

    def forward(self, x: Tensor) -> Tensor:
        parametrize.register_parametrization(self.q, "weight", Twice())
        try:
            return super().forward(x)
        finally:
            parametrize.remove_parametrizations(self.q, "weight", leave_parametrized=False)


def parametrized(model: Any) -> None:
    for layer in model.layers:
        parametrize.register_parametrization(layer.q, "weight", Twice())


class WritesCopy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone().mul_(1.5))


class Codes(nn.Parameter):
    """A quantized weight: frozen codes, whose values the program computes."""

    def dequantize(self) -> Tensor:
        return self.data * 0.5


class Coded(Block):
    def __init__(self) -> None:
        super().__init__()
        self.coded = Codes(torch.randn(6, 6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        values = self.coded.dequantize() if isinstance(self.coded, Codes) else self.coded
        return super().forward(x @ values)


def dequantized(model: Any) -> None:
    for layer in model.layers:
        layer.coded = nn.Parameter(layer.coded.dequantize())


# models as parallelize takes them


class Own(nn.Module):
    """Holds its parameters as torch knows them, and lists them itself."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(width, width) / 3)])
        self.named = nn.ParameterDict({"mix": nn.Parameter(torch.randn(width, width) / 3)})
        self.one = nn.Parameter(torch.randn(width, width) / 3)
        self.all = [self.one]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.listed[0] @ self.named["mix"] @ self.all[0])
        return x @ self.one


class Owning(Block):
    def __init__(self) -> None:
        super().__init__()
        self.own = Own()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.own(x)


class Lazy(Block):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.LazyLinear(6)  # type: ignore[assignment]


def run_once(model: nn.Module) -> None:
    model.double()(torch.zeros(1, 3, dtype=torch.int64))


def hooked_output(model: Any) -> None:
    model.layers[0].q.register_forward_hook(
        lambda _, __, output: output.register_hook(lambda g: g * 2) and None
    )


def scripted() -> None:
    torch.jit.script(nn.Linear(6, 6))
    right()


def a_copy_of_its_state() -> None:
    twin = right()
    again = copy.deepcopy(twin.plain)
    again.load_state_dict({n: v.full_tensor() for n, v in twin.ours.state_dict().items()})
    file = io.BytesIO()
    torch.save(twin.ours.state_dict(), file)
    for name, p in again.named_parameters():
        close(p, twin.plain.get_parameter(name), name)
    assert file.tell() > 0


# passes and what lies between


def left() -> None:
    twin = Twin(partial(Tiny, layers=2), mesh_of(2))
    with internsp.full_params(twin.ours):
        pass
    twin.backward()
    twin.check_gradients("after full_params was left")


def promised(write: Callable[[Any], Any]) -> None:
    """Writes where nothing is promised, then forwards that reuse what slots hold."""
    twin = right()
    for _ in range(2):
        write(twin.plain)
        write(twin.ours)
        with twin.communicator.unchanged():
            for _ in range(2):
                twin.backward()
        twin.check_gradients("within unchanged()")
        twin.zero_grad()


def prefetched(call: Callable[[Any], Any]) -> None:
    twin = right()
    for model in (twin.plain, twin.ours):
        clamped(model)
    call(twin)
    twin.backward()
    twin.check_gradients("prefetched after the last write")


def foreach_between_passes() -> None:
    twin = right()
    for _ in range(2):
        twin.backward()
        for model in (twin.plain, twin.ours):
            with torch.no_grad():
                torch._foreach_mul_([p.detach() for p in model.parameters()], 0.9)
        twin.check_gradients("written after backward by foreach")
        twin.zero_grad()


class Skipping(Tiny):
    """Runs all its blocks but the second."""

    def __init__(self, **options: Any) -> None:
        super().__init__(layers=3)

    def blocks(self, x: Tensor) -> Tensor:
        return self.layers[2](self.layers[0](x))  # type: ignore[no-any-return]


class InOrder(Reordered):
    def __init__(self, **options: Any) -> None:
        super().__init__(layers=4)


ORDER = [f"layers.{i}" for i in Reordered.order]


def unsharded(which: str, **config: Any) -> None:
    twin = Twin(partial(Tiny, layers=4), mesh_of(2), **config)
    twin.communicator.unshard(twin.ours.get_submodule(which))
    twin.backward()
    twin.check_gradients("unsharded ahead")


def zero_offloaded() -> None:
    twin = Twin(partial(Tiny, layers=2), mesh_of(2), offload=("optimizer",))
    own = ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.05)
    plain = torch.optim.SGD(twin.plain.parameters(), lr=0.05)
    twin.backward()
    for optimizer in (own, plain):
        optimizer.step()
    twin.check_parameters("a ZeroOptimizer with offloaded state")


def without_a_cache() -> None:
    mesh, models = mesh_of(2), [hf.tiny("llama"), hf.tiny("llama")]
    for model in models:
        model.config.use_cache = False
    parallelize(models[1], mesh, activation_checkpoint=FULL)
    sum(models[0](**hf.plain_batch(data)).loss for data in range(2)).backward()
    models[1](**hf.plain_batch(mesh.data_rank)).loss.backward()
    check(gradients(models[1]), gradients(models[0]), "without a cache", hf.SINGLE)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.05)


TILES = "tests/ranks/test_tiles.py::test_a_module_that_cannot_be_tiled_says_so"
TENSOR = "tests/ranks/test_tensor_parallel.py::"
TENSOR_RIGHT = TENSOR + "test_gradients_norm_and_steps_of_layers_cut_twice_are_one_processs"
MIXED = "tests/ranks/test_reads_mixed.py::"
MIXED_RIGHT = MIXED + (
    "test_parameters_mixed_with_plain_tensors_are_refused_and_the_remedies_are_right"
)
NUMBERS = MIXED + "test_a_number_of_a_part_is_refused_and_one_of_the_whole_is_right"
VECTORS = MIXED + ("test_what_works_goes_on_working_and_vectors_of_parameters_are_right_or_refused")
READS = "tests/ranks/test_reads.py::test_weights_read_past_their_modules_are_right"
REFUSED = "tests/ranks/test_reads_refused.py::"
MIXTURE = "tests/ranks/test_mixture_layer.py::"
CLOSED = "tests/ranks/test_mesh_close.py::test_a_pass_that_runs_or_has_failed_is_not_cut_off"
FULL_TENSOR = (
    "tests/ranks/test_full_tensor.py::"
    "test_reads_whose_gradient_no_rank_would_sum_are_refused_by_name"
)
PENALTY: dict[str, Remedy] = {
    "loss.backward(), then penalty.backward()": a_backward_of_its_own,
    "the optimizer's weight_decay": partial(stepped, decayed),
}
WHOLE_CAST: dict[str, Remedy] = {
    "cast the model before": partial(cast, True),
    "weight_parallel.compute_dtype": partial(cast, False),
}
CONTAINERS: dict[str, Remedy] = {
    "return tensors, or tuples, lists, mappings or dataclasses of them": containers
}
NOT_TILED: dict[str, Remedy] = {
    "leave it out of activation_checkpoint.tiled_modules":
        "tests/ranks/test_tiles.py::test_loss_every_gradient_and_a_step_equal_one_process"
}  # fmt: skip

REMEDIES: dict[str, dict[str, Remedy]] = {
    # base/autograd.py
    "create_graph=True is not supported": {
        "finite differences of two forwards": finite_differences,
        "torch.autograd.grad for inputs without create_graph is right":
            REFUSED + "test_a_gradient_penalty_is_refused_before_any_node_of_it_runs",
    },
    "was used under torch.vmap": {
        "call the module on the batch itself": right,
        "use the transform within a block's forward": partial(right, partial(Tiny, reads.Reading)),
        "a copy of the model from before parallelize()": a_copy_under_a_transform,
    },
    "is compiled by torch.compile around": {
        "weight_parallel.compile = true":
            "tests/ranks/test_rules_compile.py::"
            "test_compiled_blocks_equal_eager_with_the_same_messages",
        "functions of plain tensors may be compiled": partial(right, partial(Tiny, Helped)),
    },
    "where no weight can be gathered from another rank": {
        "with the plain model, before parallelize()": partial(traced, False),
        "internsp.full_params": partial(traced, True),
    },
    # dtensor
    "which torch cannot do with its placements": {
        ".full_tensor() of the parameter or of the value computed from it": VECTORS,
        "torch.cat([p.full_tensor().view(-1) for p in model.parameters()])": VECTORS,
    },
    "each rank would draw other numbers": {
        "write them by p.data = values": partial(written, by_data),
        "within internsp.full_params(model, write='shards')": partial(written, within_full_params),
        "fill the model by internsp.initialize": initialized,
    },
    "a function that torch.compile compiles needs of a parameter": {
        "leave that out of the function":
            "tests/ranks/test_compiled_functions.py::"
            "test_functions_of_parameters_are_compiled_in_one_graph",
    },
    "which is of this rank's part, and not of all": {
        "write .full_tensor() before it": NUMBERS, "or .to_local() for the part": NUMBERS,
    },
    "it is a view across the shards": {
        "p.data = values": partial(written, by_data),
        "within internsp.full_params(model, write='shards')": partial(written, within_full_params),
    },
    "with a plain tensor (of shape": {
        "Do it in that forward": partial(right, TermWithin),
        ".full_tensor() of the parameter or of the value computed from it": MIXED_RIGHT,
        "full_tensor(grad_placements=[Partial()] * p.device_mesh.ndim)": MIXED_RIGHT,
        "p.detach().clone()": partial(written, averaged),
        "p.data = values": partial(written, by_data),
    },
    "with a plain tensor, whose gradient would then be": {
        "Add .full_tensor() of a term": MIXED_RIGHT,
        "must be computed in its forward": partial(right, TermWithin),
        **PENALTY,
    },
    ".data was given": WHOLE_CAST,
    "has shape {list(parameter.shape)}, the given values": NONE,
    "the given values {values.placements}": {
        "redistribute them first": partial(written, by_a_dtensor_placed_alike)
    },
    "but no parameter is a DTensor on them": {
        "parallelize_module(model, mesh.tensor_mesh, plan)": TENSOR_RIGHT,
        "make the mesh without tensor ranks": right,
    },
    "parallelize a model once, and not after FSDP": {
        "parallelize a model once": right,
        "ParallelMesh.create(tensor=...)": TENSOR_RIGHT,
        "from_device_mesh(..., tensor=the name of its axis)": TENSOR_RIGHT,
    },
    "a rank cannot be a tensor rank and a weight or replica rank": {
        "the tensor ranks of this mesh are": TENSOR_RIGHT
    },
    "but the tensor ranks of internsp's mesh are": {
        "hand parallelize_module mesh.tensor_mesh": TENSOR_RIGHT
    },
    "is placed {placement} on its tensor ranks": {
        "redistribute it first": partial_weights_redistributed
    },
    "a pass that failed has taken with it": {
        "call zero_grad() on every rank and repeat":
            "tests/ranks/test_pipeline_recovery.py::"
            "test_a_failed_step_does_not_take_earlier_steps_gradients_along_in_silence",
    },
    "an unfinished gradient": NONE,
    "it cannot be put back": NONE,
    "its sums wait for the first backward outside": {
        "Run the last micro-batch outside": partial(sums_that_wait, lambda twin: None),
        "zero_grad()": partial(sums_that_wait, lambda twin: twin.zero_grad()),
        ".grad = None": partial(sums_that_wait, drop_each),
    },
    "that failed has added a part of its gradient": {
        "Drop it by zero_grad() or .grad = None on every rank":
            "tests/ranks/test_pipeline_recovery.py::"
            "test_what_a_failed_step_has_added_to_a_gradient_is_not_taken_for_one",
    },
    # modules
    "are cast inside a block that": {
        "cast in the module's own forward":
            "tests/ranks/test_rule_dtypes.py::"
            "test_inputs_are_not_cast_where_a_rule_says_so_and_compiled_blocks_are_refused",
        "set compile = false":
            "tests/ranks/test_rule_dtypes.py::"
            "test_a_module_inside_a_block_is_cast_to_and_from_its_dtype",
    },
    "the model's output was added to a term of its parameters": PENALTY,
    "so that its backward could not be prefetched": CONTAINERS,
    "torch.autograd.grad over a sharded weight": {
        "call backward() and read .grad": right,
        "internsp.Pipeline, or internsp.fsdp.install()":
            "tests/ranks/test_fsdp_pipelines.py::"
            "test_torchs_schedules_have_the_gradients_of_one_process",
    },
    "so that its weights could not be kept for its backward": CONTAINERS,
    "has registered a parametrization of": {
        "register it before parallelize()": partial(right, before=parametrized),
        "remove it before the block's forward ends": partial(right, partial(Tiny, ForAWhile)),
    },
    "was written into during a forward": {
        "Write into the parameter between optimizer steps": partial(written, clamped)
    },
    "was read past the forward of the module that owns it": {
        "return that tensor from the block": partial(right, UsesHanded)
    },
    "was replaced after parallelize(), so that": {
        "write into it": partial(written, clamped),
        "use load_state_dict": partial(written, loaded),
        "torch.func.functional_call takes whole plain tensors":
            REFUSED + "test_writes_transforms_and_replaced_weights_are_refused_by_name",
    },
    "while its unit is held whole (FSDPModule.unshard)": dict.fromkeys(
        (
            "call the unit itself", "a method given to register_fsdp_forward_method",
            "under torch.no_grad() this is right",
        ),
        "tests/ranks/test_fsdp_programs.py::test_methods_of_an_fsdp_module_do_what_torchs_do",
    ),
    "no longer holds {weight.name} where it did": {
        "change it before":
            "tests/ranks/test_torch_modules.py::"
            "test_modules_that_read_others_weights_train_as_on_one_process",
        "write into the parameter": partial(written, clamped),
    },
    "was replaced around a block that recomputes": {
        "leave the block out of activation_checkpoint":
            REFUSED + "test_writes_transforms_and_replaced_weights_are_refused_by_name",
        "copy the values into the parameter": partial(right, checkpoint=FULL, after=by_data),
    },
    "its gradient would be this rank's alone": {
        "Read the weight from its module": partial(right, TermWithin),
        "compute from full_tensor() of the parameter": FULL_TENSOR,
        "detach() it where no gradient is needed": FULL_TENSOR,
    },
    "so that its gradient cannot be summed": {
        "Read the weight from its module": partial(right, TermWithin),
        "detach() it where no gradient is needed": FULL_TENSOR,
    },
    "writes into one of its inputs": {
        "write into a copy of it": partial(right, partial(Tiny, WritesCopy), FULL),
        "leave the block out of activation_checkpoint":
            partial(right, partial(reads.Entering, reads.InPlace)),
    },
    "where reentrant checkpointing loses their gradients": {
        "activation_checkpoint.reentrant = false": partial(right, reads.Handed, FULL)
    },
    "that recomputes its activations was given a": {
        "use_cache=False":
            "tests/ranks/test_hf.py::test_adapters_of_peft_on_parameters_of_experts_are_right",
        "model.config.use_cache = False": without_a_cache,
    },
    "belongs to a parallel model": {"call it once, with the whole model": right},
    "is a ScriptModule": {"use the module that it was scripted from": scripted},
    "computes wrong gradients in compiled blocks": {
        "set weight_parallel.compile = false":
            MIXTURE + "test_gradients_losses_and_balance_are_those_of_one_process",
        "or install torch 2.12":
            MIXTURE + "test_compiled_blocks_give_the_same_with_owners_and_gathered",
    },
    "max_norm, sparse gradients and scale_grad_by_freq": {"build it without them": right},
    "has no shape yet (a lazy module)": {
        "run a forward before parallelize()": partial(right, partial(Tiny, Lazy), before=run_once)
    },
    "has a gradient hook, which parallelize() would lose": {
        "read .grad when backward() has returned": right,
        "hook the modules' outputs": partial(right, before=hooked_output),
    },
    "has lost fsdp_pre_all_gather since": {
        "keep the functions on its local tensor":
            "tests/ranks/test_fsdp_extensions.py::"
            "test_functions_of_an_instance_are_called_as_by_fsdp2",
    },
    "and its memory is read row by row": {"return .contiguous()": OWN_CLASS},
    "which is padded to {list(padded)} where it is sent": {
        "return tensors of that shape": OWN_CLASS,
        "choose a number of rows that the ranks divide": OWN_CLASS,
    },
    "past torch's registration": {
        "nn.ParameterList or nn.ParameterDict, a list of the module's own parameters":
            partial(right, partial(Tiny, Owning)),
        "read the attribute where it is needed": partial(right, partial(Tiny, reads.Reading)),
    },
    "from a global": {"Make it an attribute of the module": partial(right, partial(Tiny, Owning))},
    "the prefetch trigger {wrong[0]} of": {
        "choose another weight_parallel.gather_before":
            "tests/ranks/test_tiles.py::test_loss_every_gradient_and_a_step_equal_one_process",
        "leave the module out of activation_checkpoint.tiled_modules":
            "tests/ranks/test_tiles.py::test_loss_every_gradient_and_a_step_equal_one_process",
    },
    "keeps a parameter twice": NOT_TILED,
    "and its first argument is no tensor": NOT_TILED,
    "and takes a second tensor": NOT_TILED,
    "where a tensor with the same positions is needed": NOT_TILED,
    "and reads a trained tensor that is none of its own": NOT_TILED,
    "has a gradient hook, which autograd would call": {
        "read .grad when backward() has returned": right,
        "hook the modules' outputs": partial(right, after=hooked_output),
    },
    "the optimizer that steps on rank": {"make the optimizer after it": partial(stepped, adamw)},
    "torch.optim.LBFGS lays all parameters in one vector": {
        "an optimizer that works parameter by parameter": partial(stepped, adamw)
    },
    "steps whole matrices, and parameters": {
        "internsp.ZeroOptimizer(communicator, {name}, ...)":
            "tests/ranks/test_whole_matrices.py::"
            "test_experts_in_one_parameter_are_stepped_matrix_by_matrix",
        "internsp.fsdp.zero_optimizer(model, *optimizers)":
            "tests/ranks/test_fsdp_zero.py::"
            "test_muon_beside_another_optimizer_steps_as_one_process_on_any_mesh",
    },
    "was to be moved or cast": {
        "move or cast the model before": partial(cast, True),
        "weight_parallel.compute_dtype": partial(cast, False),
        "internsp.initialize fills one from the meta device":
            "tests/ranks/test_from_meta.py::"
            "test_buffers_from_meta_are_computed_by_their_modules_alike_on_every_mesh",
    },
    "of a model on this mesh: call it": {"call it between two passes": CLOSED},
    "after a pass that failed, while other ranks": {"run the next pass": CLOSED},
    "was called directly (block.forward(x))": {"Call the block itself, block(x)": right},
    "not a plain parameter: parallelize() would lose": {
        "module.weight = nn.Parameter(module.weight.dequantize())":
            partial(right, partial(Tiny, Coded), before=dequantized),
        'weight_parallel.quantize = "int8" sends plain weights as int8':
            "tests/ranks/test_quantize.py::"
            "test_loss_and_every_gradient_are_those_of_rounded_weights",
        "a rule of weight_parallel.rules with ignore = true": partial(
            right, partial(Tiny, Coded), rules=[{"match": "layers.*.coded", "ignore": True}]
        ),
    },
    "no second one could be made to see which": {
        "load DTensor, as its state_dict() has them": loads_what_was_saved,
    },
    # wp
    "this communicator has a ZeroOptimizer already": {
        "give one optimizer all parameters and use param_groups":
            "tests/ranks/test_optim_remedies.py::test_a_remedy_that_an_error_names_works",
    },
    "backward entered block": {
        "return that tensor from the block": partial(right, UsesHanded, **ALL),
        "coalesce_bytes = 0 and compile = false": partial(right, UsesHanded),
    },
    "shares its slot with blocks that run before it": {
        "raise weight_parallel.prefetch_depth":
            partial(unsharded, "layers.3", prefetch_depth=3),
        "set keep_unsharded for it": partial(unsharded, "layers.3", keep_unsharded="all"),
    },
    "of this model was called on rank": {"leave the context first": left},
    "blocks ran in this forward on rank": {
        "'learn' for models that always skip the same blocks":
            partial(right, Skipping, unexpected_order="learn"),
        "'gather' for those that skip others from step to step":
            partial(right, Skipping, unexpected_order="gather"),
    },
    "(): no sharded weight of this model lies in": NONE,
    "() belongs between two passes": {
        "belongs between two passes":
            "tests/ranks/test_prefetch_all.py::"
            "test_one_part_is_unsharded_and_mistakes_are_told_and_leave_order_behind",
    },
    "(): a communicator of your own gathers by itself": NONE,
    "the prefetch order would be wrong": {
        "Declare the blocks in the order in which they run": partial(right, InOrder, blocks=ORDER),
        "'learn' for an order that never changes":
            partial(right, InOrder, unexpected_order="learn"),
        "'gather' for one that changes on all ranks alike":
            partial(right, InOrder, unexpected_order="gather"),
    },
    "{error}. If the ranks run different blocks": {"{REMEDY}": OTHER_DATA},
    "the ranks run different blocks, as rank": {"{REMEDY}": OTHER_DATA},
    "the ranks run blocks in different orders": {"{REMEDY}": OTHER_DATA},
    "where weights in slots are used again": {
        "step, load or edit outside of it": partial(promised, clamped),
        "call unshard() or prefetch_all() after the last write":
            partial(prefetched, lambda twin: twin.communicator.prefetch_all()),
    },
    "by a way that no version counter shows": {
        "write weights between a backward and the next forward": foreach_between_passes
    },
    "between its use in forward and its backward: its gradient": {
        "Take the optimizer step, load_state_dict or edit after backward": partial(stepped, adamw)
    },
    "a parallel model cannot be copied or pickled": {
        "Copy it before parallelize()": a_copy_under_a_transform,
        "copy or save its state_dict()": a_copy_of_its_state,
    },
    "was given {given}: it takes whole values": NONE,
    "after parallelize(): cast the model before": WHOLE_CAST,
    "needs a ZeroOptimizer, and there is none": {
        "needs a ZeroOptimizer": zero_offloaded,
        'offload = "weights"':
            "tests/ranks/test_offload.py::"
            "test_a_plain_loop_accumulates_clips_and_steps_as_one_process",
    },
}  # fmt: skip


WHOLE_TEXTS = {"an unfinished gradient"}  # not only a piece of one


def texts() -> Iterator[tuple[str, str, str]]:
    """Each error text of the rooms: where it is made, its source without the quotes, and all
    strings of its file, of which a text may be made."""
    paths = [
        path
        for room in ROOMS
        for path in sorted((ROOT / "internsp" / room).glob("*.py")) or [ROOT / "internsp" / room]
    ]
    for path in paths:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        strings = [n.value for n in nodes if isinstance(n, ast.Constant)]
        beside = "\n".join(value for value in strings if isinstance(value, str))
        for node in nodes:
            made = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if made and node.func.id.endswith("Error") and node.args:  # type: ignore[union-attr]
                yield f"{path.name}:{node.lineno}", text_of(node.args[0]), beside  # type: ignore
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_message"):
                returned = next(n for n in ast.walk(node) if isinstance(n, ast.Return))
                assert returned.value is not None
                yield f"{path.name}:{node.lineno}", text_of(returned.value), beside


def test_every_error_text_is_in_the_table_and_names_the_remedies_of_its_row() -> None:
    rows = set(REMEDIES)
    for where, text, beside in texts():
        if text.startswith("{self._message"):  # the texts of `_message` are read themselves
            continue
        found = [p for p in REMEDIES if p in text and (p == text or p not in WHOLE_TEXTS)]
        assert len(found) == 1, f"{where}: {text!r} is in {len(found)} rows: {found}"
        rows.discard(found[0])
        for words in REMEDIES[found[0]]:
            said = words in text or ("{" in text and words in beside)
            assert said, f"{where} no longer names {words!r}: {text}"
    assert not rows, f"no error has these texts any more: {sorted(rows)}"


def test_the_tests_that_run_remedies_elsewhere_exist() -> None:
    require_tests(REMEDIES)


PARTS = 6


@pytest.mark.parametrize("part", range(PARTS))
@ranks(2)
def test_every_remedy_that_an_error_text_names_works(part: int) -> None:
    run(REMEDIES, part, PARTS)
