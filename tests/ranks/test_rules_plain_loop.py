"""WP-5, WP-9: an ordinary loop with torch's own optimizers, every step equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from internsp.config import ActivationCheckpointConfig
from internsp.errors import LayoutError
from internsp.layers import GroupedLinearWithCommExt, RowParallelLinearWithCommExt
from internsp.mesh import ParallelMesh
from tests.support.compare import close
from tests.support.models import ALL, ROLLING, SOME, Tiny, Twin, raises
from tests.support.ranks import ranks

FULL = ActivationCheckpointConfig(mode="full")
HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
REENTRANT = ActivationCheckpointConfig(mode="full", blocks=(1, 2), reentrant=True)
OPTIMIZERS: dict[str, Any] = {
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
}


class Scaled(nn.Module):
    """Several direct parameters, two of them sharded, used in another order than declared."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.down = nn.Parameter(torch.randn(width, 5) / 3)
        self.up = nn.Parameter(torch.randn(5, width) / 3)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        inner = torch.tanh(x @ self.up.T)
        return (inner @ self.down.T) * self.gain, {"inner": inner.square()}


class Mixed(nn.Module):
    """Row-sharded and grouped weights, direct parameters, fewer rows than ranks, any order."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.narrow = nn.Linear(7, 3)
        self.wo = RowParallelLinearWithCommExt(width, 7, bias=True)
        self.groups = GroupedLinearWithCommExt(3, width, width)
        self.scaled = Scaled(width)
        self.widen = nn.Linear(3, width * 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow(torch.tanh(self.wo(self.norm(x))))
        y = self.widen(y).unflatten(-1, (3, -1)).movedim(-2, 0).flatten(1, 2)
        y = self.groups(y).sum(0).view_as(x)
        z, more = self.scaled(y)
        return torch.tanh(x + z) + more["inner"].sum(-1, keepdim=True)


def mixed(tied: bool = False) -> nn.Module:
    return Tiny(Mixed, layers=3, tied=tied)


def tied() -> nn.Module:
    return Tiny(tied=True)


HIDDEN: dict[str, Any] = {"rules": [{"match": "embed", "shard_dim": 1}]}
CASES: list[tuple[Any, int, int, str, dict[str, Any], ActivationCheckpointConfig | None]] = [
    (Tiny, 2, 1, "foreach", {}, None),
    (mixed, 2, 2, "sgd", SOME, HALF),
    (Tiny, 2, 1, "loop", ALL, REENTRANT),
    (tied, 2, 3, "fused", {"overlap": False, **HIDDEN}, HALF),
    (mixed, 2, 2, "sgd", {"prefetch_depth": 2, "granularity": "block"}, None),
    (mixed, 2, 1, "loop", {"granularity": "module", "memory_pool": False}, None),
    (mixed, 2, 2, "fused", {"gather_before": "qkv", **HIDDEN}, FULL),
    (Tiny, 1, 2, "fused", {"gather_before": "mlp"}, REENTRANT),
    (tied, 2, 1, "sgd", {"granularity": "module", "prefetch_depth": 2}, REENTRANT),
    (Tiny, 2, 1, "loop", {"memory_pool": False, "unexpected_order": "gather"}, HALF),
    (Tiny, 2, 1, "foreach",
     {"reductions_in_flight": 1, "gather_before": "mlp", "overlap": False}, None),
]
WIDE: list[Any] = [
    (mixed, 4, 2, "foreach", {"granularity": "module"}, None),
    (Tiny, 4, 1, "fused", ALL, HALF),
    (tied, 2, 1, "sgd", SOME | {"memory_pool": False}, FULL),
]


def train(twin: Twin, optimizer: Any, micro_batches: int, what: str, steps: int = 3) -> None:
    a, b = optimizer(twin.plain.parameters()), optimizer(twin.ours.parameters())
    for step in range(steps):
        for _ in range(micro_batches):
            twin.backward()
            # Complete when backward returns, whatever follows.
            twin.check_gradients(f"{what}, step {step}")
        norms = [
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (twin.plain, twin.ours)
        ]
        close(norms[1].full_tensor(), norms[0], f"{what}, norm of step {step}")  # type: ignore[attr-defined]
        a.step()
        b.step()
        twin.check_parameters(f"{what}, step {step}", 1e-9)
        twin.zero_grad()
    for (name, p), q in zip(twin.plain.named_parameters(), twin.ours.parameters(), strict=True):
        close(q.full_tensor(), p, f"{what}, whole {name}", 1e-9)  # type: ignore[attr-defined]


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (2, CASES[1::3]), (4, WIDE[:1]),
        pytest.param(2, CASES[::3] + CASES[2::3], marks=pytest.mark.thorough(10)),
        pytest.param(4, WIDE[1:], marks=pytest.mark.thorough(7)),
    ],
    ids=["two ranks", "four ranks, with replicas and empty shards", "others", "others, four"],
)  # fmt: skip
@ranks()
def test_each_step_of_an_ordinary_loop_equals_one_process(
    world_size: int, cases: list[Any]
) -> None:
    meshes = {
        w: ParallelMesh.create(weight=w, device_type="cpu", timeout_seconds=20)
        for w in sorted({case[1] for case in cases})
    }
    for make, weight, micro_batches, optimizer, config, checkpoint in cases:
        twin = Twin(make, meshes[weight], checkpoint, **config)
        what = f"{make.__name__} {weight} {optimizer} {config}"
        train(twin, OPTIMIZERS[optimizer], micro_batches, what)
        assert twin.communicator.plan is not None
        slots = [s.nbytes for s in twin.communicator.state.pool.slots]
        assert twin.communicator.plan.slots() == slots, what


class MeanLoss(Tiny):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None, "always given"
        return super().forward(ids, labels) / labels.numel()


@ranks(2)
def test_a_mean_loss_is_averaged_and_unequal_counts_are_refused_everywhere(rank: int) -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    train(Twin(MeanLoss, mesh, reduction="mean"), OPTIMIZERS["sgd"], 1, "mean")
    unequal = Twin(MeanLoss, mesh, reduction="mean")
    ids = torch.zeros(1 + rank, 3, dtype=torch.int64)
    with torch.no_grad():  # an evaluation
        close(unequal.ours(ids, ids), unequal.plain(ids, ids), "an evaluation of unequal counts")
    raises(LayoutError, lambda: unequal.ours(ids, ids), "[3, 6]", "reduction = 'sum'")



@ranks(2)
def test_backward_gathers_no_block_below_the_last_that_is_trained() -> None:
    def above() -> nn.Module:
        model = Tiny(layers=4)
        for part in (model.embed, *model.layers[:3]):
            part.requires_grad_(False)
        return model

    twin = Twin(above, ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20))
    (ids, *rest), _ = twin.batch()

    def gathers() -> int:
        below = ("layers.0", "layers.1", "layers.2")
        return sum(e.kind == "AG" and e.unit in below for e in twin.trace.events)

    loss = twin.ours(ids, *rest)
    before = gathers()
    assert before
    loss.backward()
    assert gathers() == before


@pytest.mark.thorough(3)
@ranks(2)
def test_frozen_weights_and_blocks_keep_no_gradient_and_may_be_thawed() -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)

    def partly() -> nn.Module:
        model = Tiny()
        for p in (
            *model.layers[1].parameters(),
            model.layers[2].w1.weight,  # type: ignore[union-attr]
            model.layers[0].norm.bias,  # type: ignore[union-attr]
            *model.embed.parameters(),
        ):
            p.requires_grad_(False)
        return model

    for together in ({}, SOME, ALL, ROLLING):
        train(Twin(partly, mesh, **together), OPTIMIZERS["foreach"], 1, f"frozen {together}")  # type: ignore[arg-type]
    train(Twin(partly, mesh, HALF), OPTIMIZERS["sgd"], 2, "frozen, recomputed")
    # Unfrozen and frozen while training.
    twin = Twin(partly, mesh)
    twin.backward()
    for model in (twin.plain, twin.ours):
        model.layers[1].requires_grad_(True)
        model.layers[3].requires_grad_(False)
    twin.zero_grad()
    twin.backward()
    twin.check_gradients("thawed")
