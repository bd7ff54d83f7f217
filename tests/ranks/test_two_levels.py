"""``reduce``: gradients are summed within near groups, then between them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

import internsp.fsdp
from internsp.config import ActivationCheckpointConfig, PlanRule
from internsp.errors import ConfigError
from internsp.fsdp.module import attached_to
from internsp.mesh import ParallelMesh
from internsp.mesh.program import mesh_of_program
from internsp.schedule.chunk import ScheduleLine
from internsp.schedule.simulate import simulate
from tests.ranks.test_pipeline_parity import run
from tests.ranks.test_rules_idle import Upwards
from tests.support import fsdp, parity
from tests.support.compare import TOLERANCE, check
from tests.support.few import few
from tests.support.meshes import mesh_of
from tests.support.models import ALL, ROLLING, SOME, Tiny, Twin, raises
from tests.support.pipeline import Case
from tests.support.ranks import ranks, run_ranks
from tests.support.zero import Little

HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
LEVELS: dict[str, Any] = {"reduce": 2}
KINDS = ("RS", "WAIT", "FINISH")

CASES: list[tuple[Any, dict[str, Any]]] = [
    (None, {}), (HALF, {"coalesce_bytes": 400}), (None, {"overlap": False}), (None, SOME),
    (HALF, ALL | {"memory_pool": False}), (HALF, {"granularity": "module"}), (None, ROLLING),
    (None, {"near_ranks": 2, "reductions_in_flight": 1}), (None, {"offload": ("gradients",)}),
    (None, {"accumulation": "full"}),
]  # fmt: skip


def lines(events: Any) -> list[tuple[str, int]]:
    """Reductions with their bytes, and the waits for them."""
    return [
        (e.line(), e.nbytes) for e in events
        if e.kind in ("RS", "FINISH") or (e.kind == "WAIT" and e.phase in ("finish",))
    ]  # fmt: skip


def trained(twin: Twin, what: str, overlap: bool) -> tuple[list[int], list[ScheduleLine]]:
    """Train three steps as one process does, with reductions as planned.

    Returns:
        Bytes that the reductions of each step have sent; and what is planned.
    """
    plan, sent = twin.communicator.plan, []
    assert plan is not None
    planned = simulate(plan, overlap=overlap).actions
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (twin.plain, twin.ours)]
    for step in range(3):
        twin.trace.clear()
        twin.backward()
        found = lines(twin.trace.events)
        if step:  # the first forward still counts uses
            assert found == lines(planned), what
        sent.append(sum(nbytes for _, nbytes in found))
        twin.check_step(optimizers, f"{what}, step {step}")
    return sent, planned


@few("cases", CASES, 5)
@ranks(4)
def test_sums_in_two_levels_train_as_one_process_and_send_what_the_plan_says(
    cases: list[Any],
) -> None:
    mesh = mesh_of(4)
    for checkpoint, config in cases:
        twin = Twin(Tiny, mesh, checkpoint, **(LEVELS | config))
        sent, planned = trained(twin, f"{checkpoint} {config}", config.get("overlap", True))
        units = twin.communicator.plan.units  # type: ignore[union-attr]
        far = sum(w.far_bytes for u in units for w in u.weights if w.trainable)
        near = sum(action.nbytes for action in planned if action.near and action.kind == "RS")
        assert sent == [near + far] * 3


@ranks(4)
def test_a_units_second_messages_leave_before_the_next_ones_first() -> None:
    twin = Twin(Tiny, mesh_of(4), **LEVELS)
    twin.backward()
    twin.trace.clear()
    twin.backward()
    events = [e for e in twin.trace.events if e.kind == "RS"]
    sizes = {w.name: w.layout.shard_numel * 8 for w in twin.communicator.replicated.sharded}
    for unit, found in groupby(events, lambda event: event.unit):
        sent = [(e.weight, e.nbytes) for e in found]
        names = [name for name, _ in sent[: len(sent) // 2]]
        # Of 4 parts each rank gets, from the neighbor, its own and the far group's, then one sum.
        near, far = ([(name, times * sizes[name]) for name in names] for times in (2, 1))
        assert sent == near + far, unit
    assert len(events) == 2 * len(sizes)


@ranks(4)
def test_a_sum_travels_in_fp32_where_gradients_are_narrower() -> None:
    mesh, own = mesh_of(4), {"compute_dtype": "bfloat16"}
    both = [Twin(Tiny, mesh, None, torch.float32, **(own | more)) for more in ({}, LEVELS)]
    for twin in both:
        _, mine = twin.batch()
        twin.ours(*mine).backward()
    one, other = ({n: p.grad for n, p in t.ours.named_parameters()} for t in both)
    check(other, {n: g.full_tensor() for n, g in one.items()}, "two levels", 1e-6)  # type: ignore[union-attr]
    sums = Counter(w.dtypes.reduce for u in both[1].communicator.plan.units for w in u.weights)  # type: ignore[union-attr]
    assert sums[torch.bfloat16]
    far = {e.weight: e.nbytes for e in both[1].trace.events if e.kind == "RS"}  # the last of two
    for weight in both[1].communicator.replicated.sharded:
        assert far[weight.name] == weight.layout.shard_numel * 4


@ranks(8)
def test_four_near_groups_of_two_and_two_of_four_are_right() -> None:
    mesh = mesh_of(8)
    for near in (2, 4):
        twin = Twin(partial(Tiny, layers=2), mesh, reduce=near)
        twin.backward()
        twin.check_gradients(f"{near} near ranks of 8")
        sent = [e.nbytes for e in twin.trace.events if e.kind == "RS" and "q" in e.weight]
        weights = twin.communicator.replicated.sharded
        shard = next(8 * w.layout.shard_numel for w in weights if "q" in w.name)
        assert sent[:2] == [(near - 1) * (8 // near) * shard, (8 // near - 1) * shard]


@ranks(4)
def test_zero_micro_batches_and_weights_idle_on_a_rank_are_right(rank: int) -> None:
    for form in (2, "backend"):
        twin = Twin(Little, mesh_of(4), reduce=form)
        plain = torch.optim.AdamW(twin.plain.parameters(), lr=0.01)
        ours = internsp.ZeroOptimizer(twin.communicator, torch.optim.AdamW, lr=0.01)
        for step in range(2):
            for _ in range(2):
                (ids, labels), _ = twin.batch()
                for each in range(4):  # one process does all ranks' rows
                    rows = slice(2 * each, 2 * each + 2)
                    twin.plain(ids[rows], labels[rows], side=each == step).backward()
                rows = slice(2 * rank, 2 * rank + 2)
                twin.ours(ids[rows], labels[rows], side=rank == step).backward()
            for optimizer in (plain, ours):
                optimizer.step()
                optimizer.zero_grad()
            twin.check_parameters(f"{form}, step {step}")


@ranks(4)
def test_auto_takes_the_ranks_of_a_machine_where_that_sends_less(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for machine, narrow, near in ((rank // 2, False, 2), (rank // 2, True, 0), (7, False, 0)):
            patch.setenv("GROUP_RANK", str(machine))
            with ParallelMesh.create(weight=4, device_type="cpu") as mesh:
                own: dict[str, Any] = {}
                if narrow:  # but for one weight
                    wide = PlanRule(match="head.weight", reduce_dtype="float32")
                    own = {"compute_dtype": "bfloat16", "rules": (wide,)}
                twin = Twin(Tiny, mesh, None, torch.float32 if narrow else torch.float64, **own)
                assert twin.communicator.plan.reduce_near == near  # type: ignore[union-attr]
                twin.backward()
                levels = sum(e.kind == "RS" for e in twin.trace.events)
                assert levels == (2 if near else 1) * len(twin.communicator.replicated.sharded)
                if not narrow:
                    twin.check_gradients(f"on machine {machine}")


@ranks(4)
def test_ranks_that_use_other_weights_ask_for_the_next_block_without_a_standstill(
    rank: int,
) -> None:
    """A near rank's data leave weights unused, whose reductions leave it with the block's end."""
    own = {"unexpected_order": "gather", "reductions_in_flight": 1} | LEVELS
    twin = Twin(Upwards, mesh_of(4), **own)
    ids = torch.tensor([[0, 1, 2], [1, 2, 0], [1, 0, 2], [0, 2, 1]])
    for step in range(2):
        twin.plain(ids).backward()
        twin.ours(ids[rank : rank + 1]).backward()
        twin.check_gradients(f"backward {step}")
    for model in (twin.plain, twin.ours):
        model.requires_grad_(False)
        model.layers[1].requires_grad_(True)
    twin.zero_grad()
    plain = torch.optim.AdamW(twin.plain.layers[1].parameters(), lr=0.01)
    ours = internsp.ZeroOptimizer(twin.communicator, torch.optim.AdamW, lr=0.01)
    for _ in range(3):  # the sums of one backward are finished in the next
        twin.plain(ids).backward()
        twin.ours(ids[rank : rank + 1]).backward()
    plain.step()
    ours.step()
    twin.check_parameters("after a step")


@ranks(4)
def test_two_ranks_of_a_job_on_two_machines_know_it(rank: int) -> None:
    """As stages of a program's pipeline: each mesh is made by its own ranks."""
    ours = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_RANK", f"node {rank}")
        assert mesh_of_program(ours).shape.machines == {
            other: f"node {other}" for other in (rank // 2 * 2, rank // 2 * 2 + 1)
        }


@ranks(4)
def test_a_failed_pass_drops_both_messages_and_the_next_step_is_right() -> None:
    twin = Twin(Tiny, mesh_of(4), **LEVELS)

    def fail(*_: Any) -> None:
        raise ValueError("on every rank")

    handle = twin.ours.layers[1].register_full_backward_pre_hook(fail)
    _, mine = twin.batch()
    raises(ValueError, twin.ours(*mine).backward, "on every rank")
    handle.remove()
    twin.zero_grad()
    twin.backward()
    twin.check_gradients("after a failed pass")


@pytest.mark.parametrize(("near", "word"), [(3, "is 2;"), (1, "is 2;")])
@ranks(4)
def test_near_groups_that_do_not_divide_the_weight_group_are_refused(near: int, word: str) -> None:
    make = lambda: Twin(Tiny, mesh_of(4), reduce=near)  # noqa: E731
    raises(ConfigError, make, word, f"reduce = {near}", "sharded over 4 ranks")
    make = lambda: Twin(Tiny, mesh_of(2), **LEVELS)  # noqa: E731
    raises(ConfigError, make, "has no effect", "2 ranks, all of them near", "leave it out")


def cut(rank: int, world_size: int) -> list[tuple[float, float]]:
    cases = [
        parity.Case(weight=4, sequence=2, weights=LEVELS, micro_batches=2),
        parity.Case(
            weight=4, sequence=4, weights=LEVELS | {"accumulation": "full"}, micro_batches=2,
            checkpoint={"mode": "selective"},
        ),
    ]  # fmt: skip
    return [parity.run_case(case) for case in cases]


@pytest.mark.thorough(8)
def test_sequences_may_be_cut_beside_it() -> None:
    for found in run_ranks(cut, 4):
        assert all(gap < TOLERANCE for gaps in found for gap in gaps)


@pytest.mark.thorough(15)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_stages_of_a_pipeline_sum_in_two_levels_as_planned(schedule: str) -> None:
    weights = {"overlap": True, **LEVELS}
    case = Case(schedule, chunks=1 if schedule == "1F1B" else 2, weight=4, weights=weights)
    for ((found, ordered),) in run_ranks(run, 8, [case], timeout=200):
        assert found.loss < TOLERANCE
        assert found.gradient < TOLERANCE
        assert ordered


@ranks(4)
def test_a_program_of_fsdp2_chooses_it_by_an_option(rank: int) -> None:
    found = []
    for fully_shard in (internsp.fsdp.fully_shard, torch_fsdp.fully_shard):
        torch.manual_seed(0)
        model = fsdp.Model().double()
        fsdp.shard(fully_shard, model, "blocks", fsdp.mesh_of((4,)))
        if fully_shard is internsp.fsdp.fully_shard:
            internsp.fsdp.options(model, **LEVELS)
        found.append(fsdp.steps(model, rank))
        if fully_shard is internsp.fsdp.fully_shard:
            plan = attached_to(model).communicator.plan  # type: ignore[union-attr]
            assert any(w.far_bytes for u in plan.units for w in u.weights)  # type: ignore[union-attr]
    fsdp.require_same(*found, 1e-9)  # another order of sums, which AdamW sees in noise
