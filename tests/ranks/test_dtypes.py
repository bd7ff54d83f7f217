"""Dtypes per weight: fp32 gradients of 16-bit weights, fp32 parts of 16-bit models.

A tolerance for bf16 would hide mistakes, so the reference does what the ranks do: one process runs
each rank's rows separately, with the same kernels, and adds their 16-bit gradients in the requested
dtype. The only remaining difference is the order of fp32 sums.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.optim import ZeroOptimizer, clip_grad_norm_
from internsp.parallel.parallelize import parallelize
from tests.support.compare import check, gradients, parameters
from tests.support.meshes import mesh_of
from tests.support.models import CUT, VOCABULARY, Block, Tiny
from tests.support.ranks import ranks

BF16, FP32 = torch.bfloat16, torch.float32
ORDER_OF_SUMS = 2e-6  # fp32
MICRO_BATCHES = 3


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank correction in another dtype, as in PEFT.

    Both matrices are attributes of this module; the input is cast to the adapter's dtype.
    """

    def __init__(self, base: nn.Linear, rank: int = 5) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        down = self.lora_a(x.to(self.lora_a.weight.dtype))
        return out + self.lora_b(down).to(out.dtype)


class AdaptedBlock(Block):
    """A block whose ``q`` and ``w1`` have adapters, everything else being frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.q = Adapted(self.q)  # type: ignore[assignment]
        self.w1 = Adapted(self.w1)  # type: ignore[assignment]


def adapted() -> Tiny:
    """A bf16 base, frozen, with fp32 adapters."""
    model = Tiny(AdaptedBlock, layers=3)
    for part in (model.embed, model.norm, model.head):
        part.requires_grad_(False)
    model.to(BF16)
    for name, module in model.named_modules():
        if "lora" in name:
            module.to(FP32)
    return model


def batches(world: int, rows: int = 2, length: int = 5) -> list[Any]:
    """(ids, labels) of each rank's rows, micro-batch by micro-batch."""
    generator = torch.Generator().manual_seed(5)
    shape = (MICRO_BATCHES, world, 2, rows, length)
    return list(torch.randint(0, VOCABULARY, shape, generator=generator))


def loss_of(model: nn.Module, pair: Tensor, autocast: bool) -> Tensor:
    with torch.autocast("cpu", BF16, enabled=autocast):
        logits = model(pair[0])
    return F.cross_entropy(logits.flatten(0, 1).float(), pair[1].flatten(), reduction="sum")


def alone(model: nn.Module, world: int, autocast: bool = False) -> None:
    """Gradients on one process: each rank's rows have a separate forward and backward."""
    trained = [p for p in model.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, FP32)) for p in trained]
    for everyones in batches(world):
        for pair in everyones:
            found = torch.autograd.grad(loss_of(model, pair, autocast), trained)
            for total, gradient in zip(sums, found, strict=True):
                total += gradient
    for parameter, total in zip(trained, sums, strict=True):
        parameter.grad_dtype = None
        parameter.grad = total


def cut(model: nn.Module, mesh: Any, checkpoint: Any = None, **config: Any) -> Any:
    config = {"min_shard_elements": CUT, "coalesce_bytes": 0} | config
    made = parallelize(
        model, mesh, WeightParallelConfig(**config), activation_checkpoint=checkpoint
    )
    made.state.pool.poison = True
    return made


def accumulate(model: nn.Module, rank: int, world: int, autocast: bool = False) -> None:
    for everyones in batches(world):
        loss_of(model, everyones[rank], autocast).backward()


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("weight", "how", "config"),
    [
        (2, "option", {"coalesce_bytes": 400}),
        (1, "option", {"accumulation": "full"}),
        (2, "user", {"gather_before": "rolling"}),
    ],
)
@ranks(2)
def test_16_bit_weights_have_fp32_gradients_in_a_plain_loop(
    rank: int, weight: int, how: str, config: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    plain = Tiny(layers=3).to(BF16)
    ours, narrow = copy.deepcopy(plain), copy.deepcopy(plain)
    if how == "user":  # as on one process: on the parameters, before or after
        for parameter in ours.parameters():
            parameter.grad_dtype = FP32
    else:
        config = {**config, "grad_dtype": "float32"}
    communicator = cut(ours, mesh_of(weight), **config)
    with communicator.no_replica_sync():  # the interim .grad has this dtype, too
        loss_of(ours, batches(2)[0][rank], False).backward()
    ours.zero_grad()
    accumulate(ours, rank, 2)
    alone(plain, 2)
    found = gradients(ours)
    assert {g.dtype for g in found.values() if g is not None} == {FP32}
    check(found, gradients(plain), "fp32 gradients", ORDER_OF_SUMS)
    for everyones in batches(2):  # bf16 sums differ: the test can distinguish them
        for pair in everyones:
            loss_of(narrow, pair, False).backward()
    rounded = {n: g.float() for n, g in gradients(narrow).items() if g is not None}
    with pytest.raises(AssertionError, match="differs by"):
        check(found, rounded, "bf16 gradients", 10 * ORDER_OF_SUMS)

    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    norm = clip_grad_norm_(ours.parameters(), 0.5)
    assert abs(float(norm) - float(wanted)) < 1e-5 * float(wanted)
    check(gradients(ours), gradients(plain), "clipped", 1e-5)
    for model in (plain, ours):
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9).step()
    check(parameters(ours), parameters(plain), "after a step", 2**-8)  # a rounding of bf16
    assert all(p.dtype == BF16 for p in ours.parameters())


@ranks(2)
def test_grad_dtype_set_after_parallelize_counts_from_then_on(rank: int) -> None:
    model = Tiny(layers=2).to(BF16)
    cut(model, mesh_of(2))
    loss_of(model, batches(2)[0][rank], False).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {BF16}
    model.zero_grad()
    for parameter in model.parameters():
        parameter.grad_dtype = FP32
    loss_of(model, batches(2)[0][rank], False).backward()
    assert all(p.grad is not None and p.grad.dtype == FP32 for p in model.parameters())


ADAPTED: list[tuple[int, bool, dict[str, Any], Any, bool]] = [
    (2, False, {}, None, False),
    (2, False, {"coalesce_bytes": 65536}, ActivationCheckpointConfig(mode="full"), True),
    (2, True, {"gather_before": "rolling"}, None, True),
    (1, True, {}, None, False),
]


@pytest.mark.thorough(2)
@pytest.mark.parametrize(("weight", "autocast", "config", "checkpoint", "zero"), ADAPTED)
@ranks(2)
def test_fp32_adapters_train_over_a_frozen_bf16_base_as_on_one_process(
    rank: int, weight: int, autocast: bool, config: dict[str, Any], checkpoint: Any, zero: bool
) -> None:
    torch.manual_seed(0)
    plain = adapted()
    ours = copy.deepcopy(plain)
    start = {n: p.detach().clone() for n, p in plain.named_parameters()}
    communicator = cut(ours, mesh_of(weight), checkpoint, **config)
    theirs = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    made: torch.optim.Optimizer
    if zero:
        made = ZeroOptimizer(communicator, torch.optim.SGD, lr=0.1)
    else:
        made = torch.optim.SGD([p for p in ours.parameters() if p.requires_grad], lr=0.1)
    for step in range(2):
        alone(plain, 2, autocast)
        accumulate(ours, rank, 2, autocast)
        if not zero:
            check(gradients(ours), gradients(plain), f"gradients of step {step}", 1e-5)
        for optimizer in (theirs, made):
            optimizer.step()
            optimizer.zero_grad()
    found = parameters(ours)
    check(found, parameters(plain), "after two steps", 1e-5)
    for name, value in plain.named_parameters():
        assert torch.equal(value, start[name]) != ("lora" in name), f"{name}: frozen or trained?"
        assert found[name].dtype == (FP32 if "lora" in name else BF16)


OWN = {"match": ["**.w2.*", "**.norm.*"], "compute_dtype": "none"}
"""A rule of parameters, not of their modules, whose inputs would be cast then."""


@ranks(2)
def test_parameters_whose_rule_says_none_compute_in_it_while_others_are_cast(rank: int) -> None:
    torch.manual_seed(0)
    plain = Tiny(layers=2)
    ours = copy.deepcopy(plain)
    seen: dict[str, torch.dtype] = {}
    for name, module in ours.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda m, _, out, name=name: seen.__setitem__(name, m.weight.dtype)
            )
            if name.endswith("w2"):  # like a router in fp32: it casts its input
                module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
                module.register_forward_hook(lambda *a: a[-1].to(BF16))
    communicator = cut(ours, mesh_of(2), compute_dtype="bfloat16", rules=[OWN])
    accumulate(ours, rank, 2)
    sent = {w.name: (w.compute_dtype, w.reduce_dtype) for w in communicator.replicated.sharded}
    for name, dtypes in sent.items():
        own = name.endswith("w2.weight")
        assert dtypes == ((FP32, FP32) if own else (BF16, BF16)), name
    rounded = copy.deepcopy(plain)
    for name, parameter in rounded.named_parameters():
        if "w2" not in name and "norm" not in name:
            parameter.data = parameter.data.to(BF16)
    for name, module in rounded.named_modules():
        if name.endswith("w2"):
            module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            module.register_forward_hook(lambda *a: a[-1].to(BF16))
    alone(rounded, 2)
    check(gradients(ours), gradients(rounded), "gradients", ORDER_OF_SUMS)
