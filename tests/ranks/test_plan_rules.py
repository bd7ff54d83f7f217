"""Rules of the plan for single weights take effect, and change no value."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from internsp.config import ActivationCheckpointConfig
from internsp.errors import ConfigError, StructureError
from internsp.mesh import ParallelMesh
from internsp.optim import ZeroOptimizer
from internsp.schedule.simulate import simulate
from tests.ranks.test_quantize import WIDE, Rounding
from tests.support.compare import check, gradients, parameters
from tests.support.models import Tiny, Twin, raises
from tests.support.pipeline import Case, batches, compare, make
from tests.support.ranks import ranks, run_ranks

KINDS = ("AG", "WAIT", "RS", "FINISH")
EVERYTHING: tuple[dict[str, Any], ...] = (
    {"match": "layers.{0-1}.w?", "shard_dim": 1},
    {"match": "layers.2.w?.bias", "min_shard_elements": 1},
    {"match": "layers.3", "min_shard_elements": 1 << 20},
    {"match": ["layers.0.q", "layers.1.w2", "head"], "coalesce_bytes": 1 << 20},
    {"match": "layers.2.w1", "reduce_dtype": "none"},
    {"match": "layers.1", "keep_unsharded": True, "gather_before": "mlp"},
    {"match": "layers.{2-3}", "gather_before_modules": ["w2"]},
    {"match": ["layers.0", "layers.2"], "prefetch_depth": 0},
)


@ranks(2)
def test_gradients_are_one_process_whatever_the_rules_and_the_plan_is_what_runs() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for checkpoint, options in (
        (None, {}),
        (ActivationCheckpointConfig(mode="full", fraction=0.5), {"overlap": False}),
        (None, {"granularity": "module", "rules": [*EVERYTHING[:3], *EVERYTHING[4:-1]]}),
    ):
        config = {"rules": EVERYTHING, "reduce_dtype": "float64", **options}
        twin = Twin(Tiny, mesh, checkpoint, **config)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin.plain, twin.ours)]
        assert twin.communicator.plan is not None
        wanted = simulate(twin.communicator.plan, 1, config.get("overlap", True)).lines(KINDS)
        placed = {n: p.placements for n, p in twin.ours.named_parameters()}  # type: ignore[attr-defined]
        cut = {n: next((at.dim for at in p if at.is_shard()), None) for n, p in placed.items()}
        assert {n for n, dim in cut.items() if dim == 1} == {
            f"layers.{i}.{w}.weight" for i in (0, 1) for w in ("wo", "w1", "w2")
        }
        assert {n for n, dim in cut.items() if n.endswith("bias") and dim == 0} == {
            f"layers.2.w{n}.bias" for n in (1, 2)
        }
        assert all(dim is None for n, dim in cut.items() if n.startswith("layers.3."))
        for step in range(3):
            twin.trace.clear()
            twin.backward()
            if step:
                assert twin.lines(*KINDS) == wanted, f"{options} step {step}"
            twin.check_step(optimizers, f"{options} step {step}")


@ranks(2)
def test_blocks_gather_ahead_what_rules_say_and_the_plan_is_what_runs() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    rules = [
        {"match": "layers.0", "forward_prefetch": 2},
        {"match": "layers.{1-2}", "forward_prefetch": 0, "backward_prefetch": 1},
        {"match": "layers.4", "backward_prefetch": 2},
        {"match": "layers.3", "forward_prefetch": 2},
    ]
    half = ActivationCheckpointConfig(mode="full", fraction=0.5)
    for checkpoint, options in ((None, {}), (half, {"overlap": False, "keep_unsharded": 1})):
        twin = Twin(partial(Tiny, layers=5), mesh, checkpoint, rules=rules, prefetch_depth=0,
                    **options)  # fmt: skip
        assert twin.communicator.plan is not None
        assert twin.communicator.plan.policy.depth == 2
        wanted = simulate(twin.communicator.plan, 1, "overlap" not in options).lines(KINDS)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin.plain, twin.ours)]
        for step in range(3):
            twin.trace.clear()
            twin.backward()
            if step:
                assert twin.lines(*KINDS) == wanted, f"{options} step {step}"
            twin.check_step(optimizers, f"{options} step {step}")


@pytest.mark.thorough(1)
@ranks(2)
def test_ignored_parameters_stay_what_they_were_and_belong_to_the_user() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    plan = [{"match": ["layers.1.w1", "norm"], "ignore": True}]
    twin = Twin(Tiny, mesh, ActivationCheckpointConfig(mode="full", fraction=0.5), rules=plan)
    names = {"layers.1.w1.weight", "layers.1.w1.bias", "norm.weight"}
    mine = {n: p for n, p in twin.ours.named_parameters() if n in names}
    assert all(type(p) is torch.nn.Parameter for p in mine.values())
    ours = ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.1)
    own = torch.optim.SGD(mine.values(), lr=0.1)
    plain = torch.optim.SGD(twin.plain.parameters(), lr=0.1)
    for step in range(3):
        twin.ours.extra = torch.nn.Identity()  # the modules are examined again
        twin.backward()
        for parameter in mine.values():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)  # left to the user
        wanted = gradients(twin.plain)
        check({n: p.grad for n, p in mine.items()}, {n: wanted[n] for n in names}, f"step {step}")
        for optimizer in (ours, own, plain):
            optimizer.step()
            optimizer.zero_grad()
        check(parameters(twin.ours), parameters(twin.plain), f"after step {step}")


@pytest.mark.thorough(1)
@ranks(2)
def test_weights_quantized_by_rule_in_two_ways_are_rounded_and_no_others() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    plan = [
        {"match": "layers.{0-1}.w?", "quantize": "fp8"},
        {"match": "layers.3.q.weight", "quantize": "int8"},
        {"match": ["layers.2", "layers.{0-1}.q", "layers.3.wo"], "quantize": "none"},
    ]
    twin = Twin(WIDE, mesh, quantize="int8", rules=plan)
    fp8 = {f"layers.{i}.{w}.weight" for i in (0, 1) for w in ("wo", "w1", "w2")}
    int8 = {f"layers.3.{w}.weight" for w in ("q", "w1", "w2")}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (twin.plain, twin.ours)]
    for step in range(3):
        with Rounding(twin.plain, fp8, 2, "fp8"), Rounding(twin.plain, int8, 2, "int8"):
            twin.backward()
        twin.check_step(optimizers, f"step {step}")


@ranks(2)
def test_an_axis_by_rule_cuts_over_other_ranks() -> None:
    mesh = ParallelMesh.create(weight=2, expert_weight=1, device_type="cpu", timeout_seconds=20)
    plan = [{"match": "layers.*.w?", "axis": "experts"}, {"match": "layers.*.wo", "axis": "dense"}]
    twice = partial(Twin, Tiny, mesh, rules=plan)
    raises(StructureError, twice, "axis of layers.0.wo.weight is set twice")
    plan[0]["match"] = "layers.*.w{*}"
    twin = Twin(Tiny, mesh, rules=plan, expert_parameters=["layers.3"])
    assert twin.communicator.plan is not None
    made = {w.name: w.expert for unit in twin.communicator.plan.units for w in unit.weights}
    assert {n for n, expert in made.items() if expert} == {
        *(f"layers.{i}.w{n}.weight" for i in range(4) for n in (1, 2)),
        "layers.3.q.weight",
    }
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=False)
                  for m in (twin.plain, twin.ours)]  # fmt: skip
    for step in range(2):
        twin.backward()
        twin.check_step(optimizers, f"step {step}")


@ranks(2)
def test_ranks_whose_models_bring_other_rules_all_refuse(rank: int) -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)

    class Own(Tiny):
        weight_parallel_plan = ({"match": "layers.0", "coalesce_bytes": 7 * rank},)

    class Wrong(Tiny):
        weight_parallel_plan = ({"match": "layers.0", "coalesce": 7},) if rank else ()

    raises(ConfigError, partial(Twin, Own, mesh), "different configuration", "coalesce_bytes")
    kind = StructureError if rank else ConfigError
    raises(kind, partial(Twin, Wrong, mesh), "did you mean coalesce_bytes?")
    twin = Twin(Tiny, mesh)  # both ranks are still in step
    twin.backward()
    twin.check_gradients()


def piped(rank: int, world_size: int, case: Case) -> tuple[float, float]:
    """Rules for blocks of several stages; loss and gradients compared with one process."""
    pipeline, plain = make(case)
    kept = {unit.name for c in pipeline.communicators for unit in c.blocks
            if c.plan is not None and unit.block in c.plan.policy.kept}  # fmt: skip
    every: list[set[str]] = [set()] * world_size
    dist.all_gather_object(every, kept)
    assert set().union(*every) == {"layers.1", "layers.3"}
    losses = pipeline.step(batches(case, pipeline.mesh))
    found = compare(case, pipeline, plain, losses)
    return found.loss, found.gradient


@pytest.mark.thorough(1)
def test_rules_of_a_pipeline_hold_for_the_blocks_of_each_stage() -> None:
    rules = (
        {"match": ["layers.1", "layers.3"], "keep_unsharded": True},
        {"match": "layers.0", "shard_dim": 1},
        {"match": "head", "reduce_dtype": "float64"},
    )
    case = Case(weight=2, pipeline=2, weights={"rules": rules})
    for gaps in run_ranks(piped, 4, case):
        assert max(gaps) < 1e-10
