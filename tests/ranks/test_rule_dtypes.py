"""Dtypes by rule: weights are gathered and used in them, inputs and outputs are cast."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import ConfigError
from internsp.mesh import ParallelMesh
from internsp.parallel.parallelize import parallelize
from tests.support.models import Tiny, Twin, raises
from tests.support.ranks import ranks

LOW, HIGH = torch.float32, torch.float64
FULL = ActivationCheckpointConfig(mode="full")


def lower(model: nn.Module, names: Sequence[str], output: torch.dtype | None = None) -> None:
    """On one process: the modules compute in fp32 with cast inputs; all other blocks in fp64."""
    for name, module in model.named_modules():
        if name not in names and not (name.startswith("layers.") and name.count(".") == 1):
            continue
        shadow = copy.deepcopy(module)
        dtype = LOW if name in names else HIGH

        def forward(
            x: Tensor, module: nn.Module = module, shadow: nn.Module = shadow,
            dtype: torch.dtype = dtype, out: torch.dtype | None = output if dtype is LOW else None,
        ) -> Any:  # fmt: skip
            values = {n: p.to(dtype) for n, p in module.named_parameters()}
            y = functional_call(shadow, values, (x.to(dtype),))
            return y if out is None else y.to(out)

        if dtype is LOW or not any(n.startswith(f"{name}.") for n in names):
            module.forward = forward


class Low(Twin):
    """One process takes the ranks' rows one by one, so that its fp32 gradients equal theirs."""

    def backward(self, **options: Any) -> None:
        (ids, labels), mine = self.batch(**options)
        rows = len(ids) // self.mesh.world_size
        for some, wanted in zip(ids.split(rows), labels.split(rows), strict=True):
            self.plain(some, wanted).backward()
        self.ours(*mine).backward()


def trained(names: Sequence[str], rules: list[dict[str, Any]], output: torch.dtype | None,
            **options: Any) -> None:  # fmt: skip
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    twin = Low(options.pop("make", Tiny), mesh, options.pop("checkpoint", None),
               rules=rules, reduce_dtype="float64", **options)  # fmt: skip
    lower(twin.plain, names, output)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin.plain, twin.ours)]
    low = {w.name for w in twin.communicator.replicated.sharded if w.compute_dtype is LOW}
    inside = tuple(f"{name}." for name in names)
    named = dict(twin.plain.named_parameters())
    assert low == {n for n, p in named.items() if n.startswith(inside) and p.ndim > 1}
    for step in range(3):
        twin.backward()
        with torch.no_grad():
            (_, mine) = twin.batch()
            twin.ours(*mine)  # an evaluation in between
        twin.check_step(optimizers, f"step {step}")


@pytest.mark.thorough(4)
@ranks(2)
def test_blocks_of_another_dtype_compute_in_it_and_those_after_them_in_their_own() -> None:
    rules = [{"match": "layers.{1-2}", "compute_dtype": "float32"}]
    names = ["layers.1", "layers.2"]
    for checkpoint in (None, FULL, ActivationCheckpointConfig(mode="full", reentrant=True)):
        trained(names, rules, None, checkpoint=checkpoint)
    trained(names, rules, None, coalesce_bytes=65536)  # unsharded at block entry


@ranks(2)
def test_a_module_inside_a_block_is_cast_to_and_from_its_dtype() -> None:
    rules = [{"match": ["**.w1", "head"], "compute_dtype": "float32", "output_dtype": "float64"}]
    names = [*(f"layers.{i}.w1" for i in range(4)), "head"]
    trained(names, rules, HIGH, checkpoint=ActivationCheckpointConfig(mode="full", fraction=0.5))
    trained(names, rules, HIGH, granularity="module")


@ranks(2)
def test_inputs_are_not_cast_where_a_rule_says_so_and_compiled_blocks_are_refused() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    rule = {"match": "layers.1", "compute_dtype": "float32", "cast_inputs": False}
    twin = Low(Tiny, mesh, rules=[rule])
    with pytest.raises(RuntimeError, match=r"type|Float"):
        twin.ours(*twin.batch()[1])
    inner = {"match": "**.w1", "compute_dtype": "float32"}
    compiled = partial(Twin, Tiny, mesh, rules=[inner], compile=True, gather_before="qkv")
    raises(ConfigError, compiled, "cast inside a block", "layers.0.w1")
    twin = Twin(Tiny, mesh, compute_dtype="float32", cast_inputs=False)
    asked: list[torch.dtype] = []
    twin.ours.register_forward_pre_hook(lambda _, args: asked.append(args[0].dtype))
    with pytest.raises((RuntimeError, TypeError, IndexError)):
        twin.ours(torch.ones(2, 3, dtype=HIGH))  # used as ids, but not integers: they stay fp64
    assert asked == [HIGH]


@ranks(1)
def test_a_models_inputs_are_cast_again_where_a_program_recomputes_the_whole_model() -> None:
    mesh = ParallelMesh.create(weight=1, device_type="cpu", timeout_seconds=20)
    model = Tiny().double()
    inner, asked = model.layers[0], list[torch.dtype]()
    model.embed = nn.Identity()  # inputs are hidden states
    parallelize(model, mesh, WeightParallelConfig(compute_dtype="float32"))
    inner.register_forward_pre_hook(lambda _, args: asked.append(args[0].dtype))
    hidden = torch.randn(2, 3, inner.wo.in_features, dtype=HIGH, requires_grad=True)
    torch_checkpoint(model, hidden, use_reentrant=False).sum().backward()
    assert asked == [LOW, LOW]
    assert hidden.grad is not None
    assert hidden.grad.dtype is HIGH
