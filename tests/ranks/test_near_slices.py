"""``near_ranks``: later gathers of a step use slices within a near group."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from internsp.config import ActivationCheckpointConfig
from internsp.errors import ConfigError, StaleWeightError
from internsp.schedule.simulate import simulate
from tests.support.compare import close
from tests.support.few import few
from tests.support.meshes import mesh_of
from tests.support.models import ALL, ROLLING, SOME, Tiny, Twin, raises
from tests.support.ranks import ranks

HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
REENTRANT = ActivationCheckpointConfig(mode="full", reentrant=True)
NEAR: dict[str, Any] = {"near_ranks": 2}


def gathers(twin: Twin) -> list[tuple[str, int]]:
    """Recorded gathers with their bytes; clears the trace."""
    found = [(e.line(), e.nbytes) for e in twin.trace.events if e.kind == "AG"]
    twin.trace.clear()
    return found


CASES: list[tuple[Any, dict[str, Any]]] = [
    (None, {}), (HALF, SOME), (REENTRANT, ROLLING), (HALF, {"granularity": "module"}),
    (None, ALL | {"memory_pool": False}), (HALF, {"overlap": False, "prefetch_depth": 0}),
    (None, {"keep_unsharded": 1}), (HALF, {"offload": ("weights", "gradients")}),
    (None, ROLLING | {"offload": ("weights",), "coalesce_bytes": 400}),
]  # fmt: skip


@few("cases", CASES, 4)
@ranks(4)
def test_gathers_from_slices_train_as_one_process_and_bring_what_the_plan_says(
    cases: list[Any],
) -> None:
    mesh = mesh_of(4)
    for checkpoint, config in cases:
        what = f"{checkpoint} {config}"
        twin = Twin(Tiny, mesh, checkpoint, **(NEAR | config))
        state, plan = twin.communicator.state, twin.communicator.plan
        assert state.near is not None
        assert plan is not None
        weights = [weight for unit in plan.blocks for weight in unit.weights]
        assert state.near.nbytes == sum(weight.slice_bytes for weight in weights), what
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (twin.plain, twin.ours)]
        overlap = config.get("overlap", True)
        for step in range(2):
            gathers(twin)
            twin.backward()
            found = gathers(twin)
            planned = [a for a in simulate(plan, overlap=overlap).actions if a.kind == "AG"]
            if step:  # the first forward still counts uses
                assert found == [(action.line(), action.nbytes) for action in planned], what
            near = [action for action in planned if action.near]
            assert near, what
            assert all(action.phase != "forward" for action in near), what
            everybody, _ = twin.batch()
            with torch.no_grad():
                close(twin.ours(*everybody), twin.plain(*everybody), what)
            twin.check_step(optimizers, f"{what}, step {step}")


@ranks(4)
def test_slices_hold_for_micro_batches_where_nothing_is_written_and_no_longer() -> None:
    twin = Twin(Tiny, mesh_of(4), HALF, **NEAR)
    communicator, plan = twin.communicator, twin.communicator.plan
    assert plan is not None
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (twin.plain, twin.ours)]
    for promised in (True, False, True):
        gathers(twin)
        with communicator.unchanged() if promised else nullcontext():
            for _ in range(3):
                twin.backward()
        found = gathers(twin)
        if promised:
            planned = simulate(plan, 3).actions
            assert found == [(a.line(), a.nbytes) for a in planned if a.kind == "AG"]
        whole = next(w for u in plan.blocks for w in u.weights if w.name == "layers.2.q.weight")
        forward = [n for line, n in found if line == "AG forward layers.2.q.weight"]
        later = whole.near_bytes if promised else whole.gather_bytes
        assert forward == [whole.gather_bytes, later, later]
        assert whole.near_bytes != whole.gather_bytes
        twin.check_step(optimizers, f"promised: {promised}")
        with torch.no_grad():  # a write that raises no version: every forward gathers again
            for model in (twin.plain, twin.ours):
                weight = model.layers[1].w1.weight
                (getattr(weight.data, "_local_tensor", weight.data)).mul_(1.01)
    _, mine = twin.batch()
    loss = twin.ours(*mine)
    with torch.no_grad():
        twin.ours.layers[0].q.weight.mul_(1.5)
    raises(StaleWeightError, loss.backward, "layers.0.q.weight")


@pytest.mark.thorough(2)
@ranks(4)
def test_slices_keep_what_was_gathered_in_low_precision_and_rounded() -> None:
    """The same bits as without slices, for fp32 shards gathered in bf16, and for rounded ones."""
    mesh = mesh_of(4)
    rounded = {"quantize": "int8"}
    configs: list[dict[str, Any]] = [{"compute_dtype": "bfloat16"}, rounded]
    for config in configs:
        both = [Twin(Tiny, mesh, HALF, torch.float32, **(config | near)) for near in ({}, NEAR)]
        for twin in both:
            _, mine = twin.batch()
            twin.ours(*mine).backward()
        near = both[1].communicator.state.near
        assert near is not None
        for weight in both[1].communicator.replicated.sharded:
            if weight.slices:
                held = near._slice_view(weight)
                assert held.dtype == weight.compute_dtype
                assert held.numel() * 2 == weight.layout.padded_numel
        for one, other in zip(both[0].ours.parameters(), both[1].ours.parameters(), strict=True):
            assert torch.equal(one.grad.to_local(), other.grad.to_local())  # type: ignore[union-attr]
        near_bytes = [n for line, n in gathers(both[1]) if line.startswith("AG backward layers.1")]
        assert near_bytes


@ranks(4)
def test_a_rule_slices_some_blocks_and_what_does_not_fit_is_refused() -> None:
    mesh = mesh_of(4)
    rules = ({"match": "layers.{1-2}", "near_ranks": 2},)
    twin = Twin(Tiny, mesh, rules=rules)
    twin.backward()
    twin.check_gradients("a rule")
    sliced = {w.name.split(".")[1] for w in twin.communicator.replicated.sharded if w.slices}
    assert sliced == {"1", "2"}
    for ranks_, word in ((3, "is 2;"), (4, "is 2;"), (1, "is 2;")):
        raises(ConfigError, lambda n=ranks_: Twin(Tiny, mesh, near_ranks=n), word,
               "layers.0.q.weight is sharded over 4 ranks")  # fmt: skip
