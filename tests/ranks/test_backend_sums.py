"""``reduce = "backend"``: gradients are summed on their way, by the backend's reduce-scatter."""

from __future__ import annotations

from typing import Any

import torch

import internsp
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from tests.ranks.test_two_levels import trained
from tests.support.few import few
from tests.support.meshes import mesh_of
from tests.support.models import ALL, ROLLING, SOME, Tiny, Twin
from tests.support.ranks import ranks

HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
BACKEND: dict[str, Any] = {"reduce": "backend"}
CASES: list[tuple[Any, dict[str, Any]]] = [
    (None, {}), (HALF, {"coalesce_bytes": 400}), (None, {"overlap": False}), (None, SOME),
    (HALF, ALL | {"memory_pool": False}), (None, ROLLING), (None, {"accumulation": "full"}),
    (None, {"offload": ("gradients",), "near_ranks": 2}),
]  # fmt: skip


@few("cases", CASES, 4)
@ranks(4)
def test_it_trains_as_one_process_and_sends_what_the_plan_says(cases: list[Any]) -> None:
    mesh = mesh_of(4)
    for checkpoint, config in cases:
        twin = Twin(Tiny, mesh, checkpoint, **(BACKEND | config))
        sent, planned = trained(twin, f"{checkpoint} {config}", config.get("overlap", True))
        assert sent == [sum(action.nbytes for action in planned if action.kind == "RS")] * 3


@ranks(4)
def test_buffers_hold_a_sum_and_not_each_ranks_part() -> None:
    own: dict[str, Any] = {"compute_dtype": "bfloat16", "reduce_dtype": "float32"}  # a copy of each
    made = {}
    for form in (0, "backend"):
        twin = Twin(Tiny, mesh_of(4), None, torch.float32, **own, reduce=form)
        _, mine = twin.batch()
        twin.ours(*mine).backward()
        buffers = twin.communicator.state.reducer.buffers
        plan = twin.communicator.plan
        assert plan is not None
        most = max(sum(w.reduction_bytes(form != 0) for w in u.weights) for u in plan.units)
        made[form] = buffers.nbytes, most
    for before, after in zip(made[0], made["backend"], strict=True):
        assert after == before * 5 // 8  # what is sent, and a quarter of it


class Sums(torch.nn.Module):
    """Blocks of one weight each, whose gradient is this rank's input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 8, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((layer(x).sum() for layer in self.layers), x.new_zeros(()))


@ranks(4)
def test_it_adds_in_the_dtype_in_which_gradients_travel(rank: int) -> None:
    """A half and three times 2^-10, which is less than bf16 can add to a half."""
    found = {}
    for form, reduce_dtype in ((0, None), ("backend", None), ("backend", "float32")):
        model = Sums().to(torch.bfloat16)
        config = WeightParallelConfig(
            min_shard_elements=1, reduce=form, reduce_dtype=reduce_dtype, grad_dtype="float32",
            gather_before="qkv",
        )  # fmt: skip
        internsp.parallelize(model, mesh_of(4), config)
        model(torch.full((1, 4), 2.0**-10 if rank else 0.5, dtype=torch.bfloat16)).backward()
        grads = [layer.weight.grad.full_tensor() for layer in model.layers]
        found[form, reduce_dtype] = torch.stack(grads).unique().tolist()
    exact = [0.5 + 3 * 2.0**-10]
    assert found[0, None] == found["backend", "float32"] == exact
    assert found["backend", None] != exact
