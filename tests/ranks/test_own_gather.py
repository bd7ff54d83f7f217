"""A user's functions before and after an all-gather: forward uses the weights that they return."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from internsp.config import ActivationCheckpointConfig, PlanRule, WeightParallelConfig
from internsp.errors import ConfigError, StructureError
from internsp.mesh import ParallelMesh
from internsp.mesh.shape import MeshShape
from internsp.optim import ZeroOptimizer
from internsp.parallel.parallelize import parallelize
from internsp.schedule.simulate import simulate
from internsp.structure.assign import plan_sharding
from internsp.structure.blocks import read_structure
from internsp.structure.units import chunk_layout
from internsp.wp.encode import encoder_bytes
from tests.support.models import CUT, Tiny, Twin, raises
from tests.support.ranks import ranks

HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)


def low_scaled(shard: Tensor) -> tuple[Tensor, Tensor]:
    """Half the bytes: fp32 of the shard over its largest element, and that element."""
    largest = shard.abs().amax() if shard.numel() else shard.new_ones(())
    return (shard / largest).float(), largest.double()


def scaled_back(parts: tuple[Tensor, Tensor], out: Tensor) -> None:
    values, largest = parts
    torch.mul(values.to(out.dtype), largest.view(-1, *[1] * (out.ndim - 1)), out=out)


def signs(shard: Tensor) -> Tensor:
    return shard.sign().to(torch.int8)


def signs_back(codes: Tensor, out: Tensor) -> None:
    out.copy_(codes)


def packed(whole: Tensor, ranks: int, dim: int) -> Tensor:
    """The values of ``whole`` after pack and unpack, its rows sharded over ``ranks`` on ``dim``."""
    rows = -(-whole.shape[dim] // ranks)
    parts = []
    for part in whole.detach().split(rows, dim):
        values, largest = low_scaled(part)
        parts.append(values.double() * largest)
    return torch.cat(parts, dim)


class Packing:
    """Sets the packed weights in a model on one process, and restores the original ones."""

    def __init__(self, model: nn.Module, names: dict[str, int]) -> None:
        self.members = [(p, names[n]) for n, p in model.named_parameters() if n in names]

    def __enter__(self) -> None:
        self.kept = [p.detach().clone() for p, _ in self.members]
        for parameter, dim in self.members:
            parameter.data.copy_(packed(parameter, 2, dim))

    def __exit__(self, *_: object) -> None:
        for (parameter, _), kept in zip(self.members, self.kept, strict=True):
            parameter.data.copy_(kept)


OWN = {"pre_all_gather": low_scaled, "post_all_gather": f"{__name__}:scaled_back"}
PLAN: list[dict[str, Any]] = [
    {"match": ["layers.{*}.w1.weight", "head"], **OWN},
    {"match": "layers.2.w1", "shard_dim": 1},  # of 13 rows and 6 columns
    {"match": "layers.3.wo", "quantize": "none"},
]


@ranks(2)
def test_every_gradient_and_step_is_that_of_what_the_functions_make_of_the_weights() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for options, checkpoint in (
        ({}, None),
        ({"overlap": False, "memory_pool": False}, HALF),
        ({"gather_before": "rolling", "prefetch_depth": 2}, HALF),
    ):
        make = partial(Tiny, tied="memory_pool" in options)  # type: ignore[arg-type]
        twin = Twin(make, mesh, checkpoint, rules=PLAN, **options)
        names = {f"layers.{i}.w1.weight": int(i == 2) for i in range(4)}
        names["embed.weight" if "memory_pool" in options else "head.weight"] = 0
        encoder = twin.communicator.state.encoder
        assert encoder is not None
        sharded = twin.communicator.replicated.sharded
        assert {w.name for w in sharded if w.encoding is not None} == set(names)
        plan = twin.communicator.plan
        assert plan is not None
        for unit in twin.ours.layers:  # frozen weights are gathered as well
            unit.w2.weight.requires_grad_(False)
        for unit in twin.plain.layers:
            unit.w2.weight.requires_grad_(False)
        optimizers: list[Any] = [
            torch.optim.SGD(twin.plain.parameters(), lr=0.05),
            ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.05),
        ]
        for step in range(3):
            with Packing(twin.plain, names):
                twin.backward()
            with torch.no_grad():  # an evaluation in between
                everybody, mine = twin.batch()
                with Packing(twin.plain, names):
                    wanted = twin.plain(everybody[0])[mesh.rank * 2 : mesh.rank * 2 + 2]
                torch.testing.assert_close(twin.ours(mine[0]), wanted, rtol=1e-10, atol=1e-12)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            twin.check_parameters(f"{options} step {step}")
        schedule = simulate(plan, 1, options.get("overlap", True))  # type: ignore[arg-type]
        assert encoder.buffers.nbytes <= encoder_bytes(plan, schedule, mesh.shape)
        sizes = {w.name: w.gather_bytes for u in plan.units for w in u.weights if w.encoding}
        assert sizes["layers.0.w1.weight"] == 7 * 6 * 4 + 8 + 16  # 42 in fp32, up to 176, and one
        assert all(n % 16 == 0 for n in sizes.values())


@pytest.mark.thorough(1)
@ranks(2)
def test_gradients_of_a_plain_loop_and_functions_of_one_tensor() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    plan = [{"match": "**.w1.weight", "pre_all_gather": signs, "post_all_gather": signs_back}]
    twin = Twin(Tiny, mesh, HALF, rules=plan)
    for _ in range(2):
        kept = [layer.w1.weight.detach().clone() for layer in twin.plain.layers]
        for layer in twin.plain.layers:
            layer.w1.weight.data.sign_()
        twin.backward()
        for layer, weight in zip(twin.plain.layers, kept, strict=True):
            layer.w1.weight.data.copy_(weight)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin.plain, twin.ours)]
        twin.check_step(optimizers)


def unlike(shard: Tensor) -> Tensor:
    return shard.float() if shard.is_meta else shard


def fails(shard: Tensor) -> Tensor:
    return shard * float(shard.sum())


def returns(parts: Tensor, out: Tensor) -> Tensor:
    return parts


def first_of_one(parts: Any, out: Tensor) -> None:
    out.copy_(parts[0])  # of a tensor this is the first rank's part


def unpacks_one(parts: Any, out: Tensor) -> None:
    codes, _ = parts  # two ranks are taken for two tensors
    out[:] = codes


def takes_tensor(parts: Any, out: Tensor) -> None:
    out.copy_(parts)


def returns_in_place(parts: Tensor, out: Tensor) -> Tensor:
    return out.copy_(parts)


def returns_new(parts: Tensor, out: Tensor) -> Tensor:
    return parts.to(out.dtype)


def does_nothing(parts: Any, out: Tensor) -> None:
    pass


def late(parts: Tensor, out: Tensor) -> Tensor:
    return parts.to(out.dtype) if parts.is_meta else parts[0].to(out.dtype)


def low_tuple(shard: Tensor) -> tuple[Tensor]:
    return (shard.sign().to(torch.int8),)


class Subclass(nn.Parameter):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise NotImplementedError


@ranks(2)
def test_functions_that_cannot_be_served_are_refused_by_name() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)

    def refuses(kind: type[Exception], pre: Any, post: Any, *words: str) -> None:
        rule = {"match": "layers.0.w1.weight", "pre_all_gather": pre, "post_all_gather": post}
        raises(kind, partial(Twin, Tiny, mesh, rules=[rule]), *words)

    refuses(ConfigError, "no.such:function", signs_back, "pre_all_gather = 'no.such:function'")
    refuses(StructureError, fails, signs_back, "test_own_gather:fails", "on the meta device")
    refuses(StructureError, len, signs_back, "gave a int", "a tuple of tensors")
    rules = [{"match": "layers.0.w1", **OWN}, {"match": "layers.0", "quantize": "int8"}]
    raises(StructureError, partial(Twin, Tiny, mesh, rules=rules), "only one of the two can pack")
    none = [{"match": "norm", **OWN}]
    raises(StructureError, partial(Twin, Tiny, mesh, rules=none), "has no effect", "not a sharded")
    other = [{"match": "layers.0.w1.weight", "pre_all_gather": unlike if mesh.rank else signs,
              "post_all_gather": signs_back}]  # fmt: skip
    raises(ConfigError, partial(Twin, Tiny, mesh, rules=other), "different configuration")
    model = Tiny()
    model.head.weight = Subclass(model.head.weight.detach())
    raises(StructureError, partial(parallelize, model, mesh), "Subclass, not a plain parameter")

    for pre, post, words in (
        (unlike, signs_back, "gave float64 [7, 6] and has given float32 [7, 6]"),
        (signs, late, "returned float64 [7, 6] where the unsharded weight is float64 [2, 7, 6]"),
    ):
        rule = {"match": "layers.0.w1.weight", "pre_all_gather": pre, "post_all_gather": post}
        twin = Twin(Tiny, mesh, rules=[rule], min_shard_elements=CUT)
        raises(StructureError, partial(twin.ours, *twin.batch()[1]), words)


@pytest.mark.parametrize(("pre", "post", "words"), [
    (signs, returns, "returned int8 [2, 7, 6] where the unsharded weight is float64 [2, 7, 6]"),
    (signs, lambda parts, out: out[0], "returned float64 [7, 6] where"),
    (signs, lambda parts, out: [out], "returned list where"),
    (signs, first_of_one, "writes [7, 6] into the unsharded weight [2, 7, 6] [ranks, rows, ...]"),
    (signs, unpacks_one, "gets a tensor [2, 7, 6]: write every rank's own rows"),
    (low_tuple, takes_tensor, "raised TypeError"),
    (low_tuple, takes_tensor, "It gets a tuple of 1, the first [2, 7, 6]"),
    (signs, does_nothing, "neither writes the unsharded weight into its second argument nor"),
    (signs, lambda parts, out: float(out.sum()), "raised RuntimeError"),
])  # fmt: skip
def test_what_does_not_fill_the_weight_is_refused_before_anything_runs(
    pre: Any, post: Any, words: str
) -> None:
    rule = PlanRule(match="layers.0.w1.weight", pre_all_gather=pre, post_all_gather=post)
    config = WeightParallelConfig(rules=[rule], min_shard_elements=CUT)
    structure = read_structure(model := Tiny().double(), rules=config.rules)
    shardings = plan_sharding(model, structure, config)
    planned = partial(chunk_layout, shardings, structure, config, MeshShape(2, weight=2), set())
    raises(StructureError, planned, words, "a rule gives layers.0.w1.weight")


@pytest.mark.thorough(1)
@ranks(2)
def test_a_weight_that_is_returned_is_copied_into_its_slot() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    values = []
    for post in (signs_back, returns_new, returns_in_place):
        plan = [{"match": "**.w1.weight", "pre_all_gather": signs, "post_all_gather": post}]
        twin = Twin(Tiny, mesh, rules=plan, min_shard_elements=CUT)
        values.append(twin.ours(*twin.batch()[1]))
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])
