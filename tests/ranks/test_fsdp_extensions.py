"""Weights whose classes have all-gather functions of their own: PyTorch's ``extensions`` tests.

Each program runs with torch's ``fully_shard`` and with ``internsp.fsdp``'s, in fp64, with slots
that are filled with NaN before each gather of ours (tests/support/extensions.py has the classes).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp as torchs
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

import internsp.fsdp as ours
from internsp.errors import ConfigError, StructureError
from internsp.fsdp.attach import attached_to
from internsp.schedule.chunk import aligned
from tests.support.extensions import Held, Quantized, Rounded
from tests.support.fsdp import Model, Program, batch, compare, loss_of, mesh_of, shard, steps
from tests.support.ranks import ranks

# Of layers whose rows no number of ranks divides a class must pad: the head has 19.
EVEN = ("up", "attention.qkv")
CLASSES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "held": (Held, EVEN),
    "rounded": (Rounded, (*EVEN, "head")),
    "quantized": (Quantized.of, EVEN),  # type: ignore[dict-item]
}


def build(kind: str) -> Any:
    model = Model(12, blocks=2).double()
    make, names = CLASSES[kind]
    for parent in (*model.blocks, model):
        for name in names:
            layer: Any = dict(parent.named_modules()).get(name)
            if layer is not None:
                layer.weight = nn.Parameter(make(layer.weight.detach()), kind != "quantized")
    return model


def poison(model: Any, rank: int) -> None:
    """Poison the slots before each gather from now on."""
    with torch.no_grad():  # FSDP2 could not: an optimizer that is made then steps whole weights
        model(batch(0, 0, rank))
    found = attached_to(model)
    assert found is not None
    found.communicator.state.pool.poison = True


def _program(
    kind: str, units: str, sizes: tuple[int, ...] = (2,), micro: int = 1, recompute: bool = False,
    **options: Any,
) -> Program:  # fmt: skip
    def program(names: Any, rank: int) -> dict[str, Tensor]:
        model = build(kind)
        for number, block in enumerate(model.blocks if recompute else ()):
            model.blocks[number] = checkpoint_wrapper(block)
        shard(names.fully_shard, model, units, mesh_of(sizes), **options)
        if names is ours:
            poison(model, rank)
        return steps(model, rank, micro=micro, clip=float(micro > 1))

    program.__name__ = f"{kind} {units} {sizes} {options}"
    return program


IN_HOST_MEMORY = torchs.CPUOffloadPolicy(pin_memory=False)
FP32 = torchs.MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)


@ranks(2)
def test_classes_that_gather_themselves_train_as_under_fsdp2(rank: int) -> None:
    compare(
        *(_program(kind, "blocks", recompute=kind == "held") for kind in CLASSES),
        _program("held", "whole"),
        _program("rounded", "nested", micro=2),
        _program("quantized", "nested", recompute=True, offload_policy=IN_HOST_MEMORY),
        rank=rank,
    )
    compare(_program("rounded", "blocks", mp_policy=FP32), rank=rank, tolerance=1e-5)


def _layers_alone(names: Any, rank: int) -> dict[str, Tensor]:
    model = build("rounded")
    for block in model.blocks:
        names.fully_shard(block.up, mesh=mesh_of((2,)))
    shard(names.fully_shard, model, "blocks", mesh_of((2,)))
    return steps(model, rank)


@ranks(2)
def test_a_plain_weight_that_a_class_makes_is_no_weight_that_was_written(rank: int) -> None:
    """A unit that is one layer looks for writes of its forward."""
    compare(_layers_alone, rank=rank)


def _ignored(names: Any, rank: int) -> dict[str, Tensor]:
    model, called = build("rounded"), []
    left = {model.blocks[0].up.weight, model.blocks[1].attention.qkv.weight}
    model.blocks[0].up.weight.register_post_accumulate_grad_hook(called.append)
    shard(names.fully_shard, model, "blocks", mesh_of((2,)), ignored_params=left)
    found = steps(model, rank)
    assert len(called) == 3
    return {name: getattr(value, "_data", value) for name, value in found.items()}


@ranks(2)
def test_ignored_weights_may_be_of_any_class_and_have_hooks(rank: int) -> None:
    compare(_ignored, rank=rank)


@pytest.mark.thorough(2)
@ranks(4)
def test_they_train_as_under_fsdp2_with_replicas(rank: int) -> None:
    compare(*(_program(kind, "blocks", (2, 2), micro=2) for kind in CLASSES), rank=rank)


@pytest.mark.thorough(1)
@ranks(1)
def test_one_rank_alone_computes_with_what_the_class_makes(rank: int) -> None:
    """FSDP2 does not call the class there, but for a cast."""
    model, plain = build("rounded"), build("rounded")
    plain.load_state_dict(model.state_dict())
    shard(ours.fully_shard, model, "blocks", mesh_of((1,)))
    for layer in [plain.head, *(b.up for b in plain.blocks)]:
        layer.weight = nn.Parameter(layer.weight._data.bfloat16().double())
    for block in plain.blocks:
        weight = block.attention.qkv.weight._data
        block.attention.qkv.weight = nn.Parameter(weight.bfloat16().double())
    loss_of(plain, batch(0, 0, 0)).backward()
    loss_of(model, batch(0, 0, 0)).backward()
    for (name, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad.full_tensor(), wanted.grad, msg=name)


# PyTorch's own: a class of two tensors, both forms of the function, functions of an instance


def _old_form(self: Any, mesh: Any) -> Any:
    return (self.a, self.b), None


def _new_form(
    self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
) -> Any:
    return (self.a, self.b), None


def _both(self: Any, gathered: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
    first, second = gathered
    if out is None:
        return TwoTensor(first, second).to(dtype), gathered
    if first.dtype != dtype:
        out.a.copy_(first)
        out.b.copy_(second)
    return None


def _two(form: Any, mixed: bool = False, **options: Any) -> Program:
    def program(names: Any, rank: int) -> dict[str, Tensor]:
        layers = [nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False)]
        model: Any = nn.Sequential(*layers).double()
        for layer in (model[0], model[2]):
            values = layer.weight.detach()
            layer.weight = nn.Parameter(TwoTensor(values, values.clone()))
            names.fully_shard(layer, mesh=mesh_of((2,)), **options)
        names.fully_shard(model, mesh=mesh_of((2,)), **options)
        optimizer, found = torch.optim.Adam(model.parameters(), foreach=True), {}
        for step in range(3):
            draw = torch.Generator().manual_seed(step + rank)
            model(torch.randn(2, 8, generator=draw).double()).sum().backward()
            for name, parameter in model.named_parameters():
                found[f"gradient {step} {name}"] = parameter.grad.full_tensor()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
            for name, parameter in model.named_parameters():
                found[f"{step} {name}"] = parameter._local_tensor.b.clone()
        return found

    program.__name__ = f"two tensors {form.__name__} {options}"
    return program


@ranks(2)
def test_pytorchs_class_of_two_tensors_trains_as_under_fsdp2(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TwoTensor, "fsdp_post_all_gather", _both, raising=False)
    for form, options in ((_old_form, {}), (_new_form, {"reshard_after_forward": False})):
        monkeypatch.setattr(TwoTensor, "fsdp_pre_all_gather", form, raising=False)
        compare(_two(form, **options), rank=rank)
    # torch joins columns of what is sent, and gives the function the shape of joined rows.
    compare(_two(_new_form, shard_placement_fn=lambda parameter: Shard(1)), rank=rank)
    compare(_two(_new_form, mp_policy=FP32), rank=rank, tolerance=1e-5)


def _instances(names: Any, rank: int) -> dict[str, Tensor]:
    """A model from the meta device, whose plain local tensors get functions afterwards."""
    with torch.device("meta"):
        model = Model(12, blocks=2).double()
    shard(names.fully_shard, model, "blocks", mesh_of((2,)))
    model.to_empty(device="cpu")
    called: list[str] = []
    for name, parameter in model.named_parameters():
        local: Any = parameter._local_tensor  # type: ignore[attr-defined]
        draw = torch.Generator().manual_seed(len(name))
        local.copy_(torch.randn(local.shape, generator=draw) / 8)
        if name.endswith("up.weight"):

            local.fsdp_pre_all_gather = partial(_pre, local, called, name)
            local.fsdp_post_all_gather = Rounded.fsdp_post_all_gather.__get__(local)
    found = steps(model, rank)
    assert len({*called}) == 2, "functions of the instances were called"
    return found


def _pre(local: Tensor, called: list[str], name: str, mesh: Any) -> Any:
    called.append(name)
    return (local.to(torch.bfloat16),), "metadata"


@ranks(2)
def test_functions_of_an_instance_are_called_as_by_fsdp2(rank: int) -> None:
    compare(_instances, rank=rank)


@ranks(2)
def test_functions_that_come_after_the_plan_are_refused_at_the_next_forward(rank: int) -> None:
    model = _made(ours, "rounded", 3)
    wanted = model(batch(0, 0, rank))
    local = model.embed.weight._local_tensor
    local.fsdp_pre_all_gather = partial(_pre, local, [], "embed.weight")
    with pytest.raises(StructureError, match=r"embed\.weight has got fsdp_pre_all_gather since"):
        model(batch(0, 0, rank))
    del local.fsdp_pre_all_gather
    assert torch.equal(model(batch(0, 0, rank)), wanted)


# states, whole weights


def _inner(value: Any) -> list[Tensor]:
    """The plain tensors of a parameter."""
    local = getattr(value, "_local_tensor", value)
    if not hasattr(local, "__tensor_flatten__"):
        return [local]
    return [getattr(local, name) for name in local.__tensor_flatten__()[0]]


def _made(names: Any, kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = build(kind)
    shard(names.fully_shard, model, "blocks", mesh_of((2,)))
    return model


@ranks(2)
def test_states_pass_between_both_and_whole_weights_are_of_the_class(rank: int) -> None:
    for kind in CLASSES:
        for one, other in ((torchs, ours), (ours, torchs)):
            first, second = _made(one, kind, 3), _made(other, kind, 4)
            steps(first, rank, number=1)
            second(batch(0, 0, rank))
            second.load_state_dict(first.state_dict())
            for found, wanted in zip(second.parameters(), first.parameters(), strict=True):
                assert type(found._local_tensor) is type(wanted._local_tensor), kind
                assert all(map(torch.equal, _inner(found), _inner(wanted))), kind
            assert torch.equal(first(batch(1, 0, rank)), second(batch(1, 0, rank))), kind
            whole: list[Any] = []
            for model in (first, second):
                model.blocks[1].unshard()
                whole.append(model.blocks[1].up.weight.data)
                assert not isinstance(whole[-1], DTensor), kind
                whole[-1] = type(whole[-1]), [part.clone() for part in _inner(whole[-1])]
                model.blocks[1].reshard()
                assert isinstance(model.blocks[1].up.weight, DTensor), kind
            assert whole[0][0] is whole[1][0], kind
            assert all(map(torch.equal, whole[0][1], whole[1][1])), kind


@ranks(2)
def test_values_that_are_swapped_come_back(rank: int) -> None:
    model = _made(ours, "held", 3)
    before = model(batch(0, 0, rank)).detach()
    trained = [p for p in model.parameters() if p.dtype == torch.double]
    kept = [parameter.data for parameter in trained]
    for parameter in trained:
        parameter.data = parameter.detach() * 2
    with torch.inference_mode():
        other = model(batch(0, 0, rank))
    assert not torch.allclose(other, before)
    for parameter, old in zip(trained, kept, strict=True):
        parameter.data = old
    found = model(batch(0, 0, rank))
    assert torch.equal(found, before)
    found.sum().backward()  # of what an evaluation in inference mode has gathered before


class Seen(nn.Linear):
    """Notes the weight that its forward computes with."""

    def forward(self, x: Tensor) -> Tensor:
        self.noted = [self.weight]
        return nn.functional.linear(x, *self.noted, self.bias)


@ranks(2)
def test_what_a_class_holds_lies_in_a_slot_of_just_these_bytes(rank: int) -> None:
    for kind, nbytes in (("held", 36 * 12 * 4 + 2 * 8), ("quantized", 36 * 12 + 36 * 8)):
        model = build(kind)
        for block in model.blocks:
            block.up.__class__ = Seen
        offload = IN_HOST_MEMORY if kind == "quantized" else torchs.OffloadPolicy()
        shard(ours.fully_shard, model, "blocks", mesh_of((2,)), offload_policy=offload)
        model(batch(0, 0, rank))
        found = attached_to(model)
        assert found is not None
        planned = {w.name: w for unit in found.communicator.plan.units for w in unit.weights}
        for number, block in enumerate(model.blocks):
            layout = planned[f"blocks.{number}.up.weight"]
            assert layout.unsharded_bytes == layout.slot_bytes == aligned(nbytes), kind
            assert not layout.hosted, f"{kind}: torch copies it to the device itself"
            weight: Any = found.communicator.parameters_of[block.up, "weight"]
            (slot,) = found.communicator.state.pool.slots[weight.unit.slot].storages()
            lies = [part.data_ptr() - slot for part in _inner(block.up.noted[0])]
            first = weight.unit.offsets[weight]
            assert all(first <= start < first + nbytes for start in lies), kind


# what is refused


NO_SHARD = "blocks.0.attention.qkv.weight is a Held with fsdp_pre_all_gather, of which no"


def _refuses(text: str, kind: str = "held", of_class: Any = None, **options: Any) -> None:
    model = build(kind)
    if of_class is not None:
        weight = model.blocks[0].up.weight
        model.blocks[0].up.weight = nn.Parameter(of_class(weight._data))
    settings = options.pop("settings", {})
    shard(ours.fully_shard, model, "blocks", mesh_of((2,)), **options)
    ours.options(model, **settings)
    with pytest.raises(StructureError, match=text):
        model(batch(0, 0, 0))


class Unknown(Tensor):
    """Of which no plain tensors are known."""

    def __new__(cls, like: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, like.shape, like.stride(), dtype=like.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0])


class MakesUnknown(Held):
    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        return Unknown(gathered[0]), gathered


class Changes(Rounded):
    calls = 0

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        given = mesh, outer_size, outer_stride, module, mp_policy
        (rows,), metadata = super().fsdp_pre_all_gather(*given)
        type(self).calls += 1
        return (rows if self.calls < 3 else rows.double(),), metadata


class FailsOnOne(Held):
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        if mesh.get_local_rank() == 1:
            raise ValueError("no scale")
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)


@ranks(2)
def test_what_such_a_class_cannot_do_is_refused_by_name(rank: int) -> None:
    _refuses(NO_SHARD, offload_policy=IN_HOST_MEMORY)
    for settings in ({"memory_pool": False}, {"near_ranks": 2}):
        _refuses(NO_SHARD, settings=settings)
    _refuses("a Unknown is not a plain contiguous tensor", of_class=MakesUnknown)


@ranks(2)
def test_functions_that_fail_or_change_are_told_by_name(rank: int) -> None:
    model = build("held")
    model.blocks[0].up.weight = nn.Parameter(FailsOnOne(model.blocks[0].up.weight._data))
    shard(ours.fully_shard, model, "blocks", mesh_of((2,)))
    with pytest.raises((StructureError, ValueError), match="no scale"):  # on both, at once
        model(batch(0, 0, 0))
    model = build("rounded")
    model.blocks[0].up.weight = nn.Parameter(Changes(model.blocks[0].up.weight._data))
    shard(ours.fully_shard, model, "blocks", mesh_of((2,)))
    model(batch(0, 0, 0))
    with pytest.raises(StructureError, match="shapes and dtypes must not change"):
        model(batch(0, 0, 0))
    model = Model(12, blocks=2).double()
    shard(ours.fully_shard, model, "blocks", mesh_of((2,)))
    local: Any = model.blocks[0].up.weight._local_tensor
    local.fsdp_pre_all_gather = partial(_pre, local, [], "up")
    local.fsdp_post_all_gather = Rounded.fsdp_post_all_gather.__get__(local)
    model(batch(0, 0, 0))
    del local.fsdp_pre_all_gather, local.fsdp_post_all_gather
    with pytest.raises(StructureError, match=r"0\.up\.weight has lost fsdp_pre_all_gather"):
        model(batch(0, 0, 0))


@ranks(2)
def test_zero_keeps_them_out_unless_they_are_frozen(rank: int) -> None:
    for kind in ("held", "quantized"):
        model = build(kind)
        shard(ours.fully_shard, model, "blocks", mesh_of((2, 1)))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        if kind == "held":
            with pytest.raises(ConfigError, match="keep a torch optimizer in a plain loop"):
                ours.zero_optimizer(model, optimizer)


class Shows(nn.Module):
    """Returns its weight, which the next block overwrites in its slot."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.Linear(12, 12, bias=False).double()
        self.layer.weight = nn.Parameter(Held(self.layer.weight.detach()))

    def forward(self, x: Tensor) -> Any:
        return self.layer(x), self.layer.weight


class Gallery(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shows() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        shown = []
        for block in self.blocks:
            x, weight = block(x)
            shown.append(weight)
        return x, shown


@ranks(2)
def test_a_weight_that_leaves_its_block_is_a_copy(rank: int) -> None:
    model: Any = Gallery()
    wanted = [block.layer.weight._data.clone() for block in model.blocks]
    for block in model.blocks:
        ours.fully_shard(block, mesh=mesh_of((2,)))
    ours.fully_shard(model, mesh=mesh_of((2,)))
    for found, given in zip(model(torch.ones(1, 12).double())[1], wanted, strict=True):
        torch.testing.assert_close(found.detach() + 0, given, rtol=1e-6, atol=0)
