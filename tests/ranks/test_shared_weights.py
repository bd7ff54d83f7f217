"""Weights shared by several modules, and modules used in several places, train as one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from internsp.config import ActivationCheckpointConfig
from internsp.errors import OrderError
from internsp.optim import ZeroOptimizer
from tests.support.compare import close
from tests.support.few import few
from tests.support.meshes import mesh_of
from tests.support.models import ALL, VOCABULARY, Block, Tiny, Twin, raises
from tests.support.ranks import ranks

STEPS = 3
FULL = ActivationCheckpointConfig(mode="full")


class TwoHeads(Tiny):
    """Two projections to the vocabulary, neither in a block, share a weight."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.aux = nn.Linear(6, VOCABULARY, bias=False)
        self.aux.weight = self.head.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None, "this one always has a loss"
        hidden = self.blocks(self.embed(ids))
        logits = self.head(self.norm(hidden)) + 0.3 * self.aux(torch.tanh(hidden))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class TwoTables(Tiny):
    """Two lookups and the head share a weight."""

    def __init__(self) -> None:
        super().__init__(layers=2, tied=True)
        self.other = nn.Embedding(VOCABULARY, 6)
        self.other.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None, "this one always has a loss"
        hidden = self.blocks(self.embed(ids) + self.other(ids.flip(1)))
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Tied(Block):
    """A block that uses one weight in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.wo.weight = self.q.weight


def small_ones() -> nn.Module:
    """Two blocks share a module with replicated parameters, and a replicated parameter."""
    model = Tiny(layers=3, tied=True)
    model.layers[2].norm = model.layers[0].norm  # type: ignore[union-attr]
    model.layers[2].q.bias = model.layers[1].q.bias  # type: ignore[union-attr]
    return model


def twice() -> nn.Module:
    """One block is used twice."""
    model = Tiny(layers=2, tied=True)
    model.layers.append(model.layers[0])
    return model


def between_blocks() -> nn.Module:
    """Two blocks, not neighbors, share a weight."""
    model = Tiny(layers=3)
    model.layers[2].q.weight = model.layers[0].q.weight  # type: ignore[union-attr]
    return model


class Reader(Block):
    """A block that shares the embedding's table, and a weight with every other block."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(6, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * torch.tanh(self.table(x)) @ self.table.weight


def everywhere() -> nn.Module:
    """Weights that all blocks share, among them the embedding's and the head's."""
    model = Tiny(Reader, layers=3, tied=True)
    for layer in model.layers:
        layer.table.weight = model.embed.weight  # type: ignore[union-attr]
        layer.w1.weight = model.layers[1].w1.weight  # type: ignore[union-attr]
    return model


class Adapted(Block):
    """A block that begins with a module given by its model."""

    def __init__(self, adapter: nn.Module) -> None:
        super().__init__()
        self.adapter = adapter

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.adapter(x))


def modules_of_several(layers: int = 4, modules: int = 1) -> nn.Module:
    """Blocks share entire modules, in turn."""
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(modules)]
    numbers = iter(range(layers))
    return Tiny(lambda: Adapted(made[next(numbers) % modules]), layers=layers)


def head_in_a_block() -> nn.Module:
    """A module of the root is also part of a block."""
    model = Tiny(Reader, layers=3)
    model.layers[1].table = model.head  # type: ignore[union-attr]
    return model


MODELS: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (TwoHeads, {}), (TwoTables, {}), (small_ones, {}), (lambda: Tiny(Tied, layers=2), {}),
    (twice, {"unexpected_order": "gather"}),
    (lambda: Tiny(tied=True), {"gather_before": "rolling"}),
    (between_blocks, {"gather_before": "rolling"}),
    (everywhere, {}), (everywhere, {"checkpoint": FULL}),
    (everywhere, {"granularity": "module", "rules": [{"match": "embed", "shard_dim": 1},
                  {"match": "layers.0.w1.weight", "shard_dim": -1}]}),
    (modules_of_several, {}), (modules_of_several, {"checkpoint": FULL}),
    (partial(modules_of_several, 2), {"checkpoint": FULL, "granularity": "module"}),
    (partial(modules_of_several, 5, 2), {}), (head_in_a_block, {"checkpoint": FULL}),
    (partial(modules_of_several, 5, 2), {"gather_before": "rolling", "memory_pool": False}),
]  # fmt: skip


@pytest.mark.unmeasured
@few("numbers", range(len(MODELS)), 4)
@ranks(2)
def test_shared_weights_and_blocks_move_as_on_one_process_or_are_refused(
    numbers: list[int],
) -> None:
    for number in numbers:
        make, config = MODELS[number]
        for zero in (False, True):
            # Each model with one of two meshes, and small weights coalesced or not.
            together = ALL if (number + zero) % 2 else {}
            twin = Twin(make, mesh_of(1 + (number + zero) % 2), **config, **together)
            start = {n: p.detach().clone() for n, p in twin.plain.named_parameters()}
            theirs = torch.optim.AdamW(twin.plain.parameters(), lr=1e-2, eps=1e-3)
            ours: torch.optim.Optimizer
            if zero:
                ours = ZeroOptimizer(twin.communicator, torch.optim.AdamW, lr=1e-2, eps=1e-3)
            else:
                ours = torch.optim.AdamW(twin.ours.parameters(), lr=1e-2, eps=1e-3)
            for step in range(STEPS):
                for _ in range(1 + step % 2):
                    twin.backward()
                for optimizer in (theirs, ours):
                    optimizer.step()
                    optimizer.zero_grad()
            what = f"model {number}, ZeroOptimizer {zero}"
            twin.check_parameters(what)
            for name, parameter in twin.plain.named_parameters():
                assert not torch.equal(parameter, start[name]), f"{what}: {name} has not moved"
    raises(OrderError, Twin(twice, mesh_of(2)).backward, "unexpected_order = 'learn'")


@ranks(2)
def test_blocks_run_by_themselves_read_what_a_step_has_made_of_a_shared_weight() -> None:
    twin = Twin(between_blocks, mesh_of(2))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin.ours, twin.plain)]
    for _ in range(2):
        twin.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found = []
        for model in (twin.ours, twin.plain):
            x = torch.linspace(-1, 1, 18, dtype=torch.float64).view(1, 3, 6)
            with torch.no_grad():
                for layer in model.layers:  # type: ignore[union-attr]
                    x = layer(x)
            found.append(x)
        torch.testing.assert_close(found[0], found[1], atol=1e-12, rtol=0.0)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@ranks(2)
def test_parts_beside_the_blocks_run_by_themselves_read_what_a_step_has_made(tied: bool) -> None:
    twin = Twin(partial(Tiny, tied=tied), mesh_of(2))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin.plain, twin.ours)]
    for step in range(3):
        everyone, mine = twin.batch()
        twin.plain(*everyone).backward()
        twin.ours(*mine).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                found, wanted = (m.embed(mine[0]) for m in (twin.ours, twin.plain))
                close(found, wanted, f"step {step}: the embedding, gradients {gradients}")
                found, wanted = (m.head(wanted) for m in (twin.ours, twin.plain))
                close(found, wanted, f"step {step}: the head, gradients {gradients}")
