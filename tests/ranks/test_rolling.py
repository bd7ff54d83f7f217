"""Trigger "rolling": slots are reused weight by weight, and every rule holds (design.md 4.1).

Most rules' own tests have it as a case, and so do the printed schedule in ``test_rules_order.py``
and the covering sets of ``test_parity.py``; this file tests what is specific to it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from internsp.app.config import Config
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import ConfigError, PoolError
from tests.support.few import few
from tests.support.meshes import mesh_of
from tests.support.models import ALL, ROLLING, SOME, Block, Tiny, Twin, raises
from tests.support.ranks import ranks

HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
FULL = ActivationCheckpointConfig(mode="full")
REENTRANT = ActivationCheckpointConfig(mode="full", reentrant=True)


def steps(twin: Twin, what: str, count: int = 3) -> None:
    """Train both, so that every weight changes between steps (WP-3, WP-11)."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (twin.plain, twin.ours)]
    for step in range(count):
        twin.backward()
        twin.check_gradients(f"{what}, step {step}", 1e-9)
        for optimizer in optimizers:
            optimizer.step()
        twin.zero_grad()


class Repeating(Block):
    """Uses one weight twice in a forward, and another by two modules."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.again = nn.Linear(width, width)
        self.shared = nn.Linear(width, width, bias=False)
        self.shared.weight = self.wo.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(torch.tanh(self.shared(super().forward(x))))
        return x + self.again(x)


class Uneven(Block):
    """Blocks whose weights differ in size from those two blocks later."""

    made = 0

    def __init__(self) -> None:
        super().__init__(6)
        Uneven.made += 1
        inner = 5 + 9 * (Uneven.made % 3)
        self.w1, self.w2 = nn.Linear(6, inner), nn.Linear(inner, 6)
        if Uneven.made % 2:
            self.more = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.more(x) if hasattr(self, "more") else x


class TwoOutputs(nn.Module):
    """Its second output does not depend on the weight, and its gradient is computed late."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.split = Split()
        self.wo = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        late = torch.tanh(x)
        y, other = self.split(self.first(x), late)
        return x + self.wo(y) + late * other


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x: Tensor, late: Tensor) -> tuple[Tensor, Tensor]:
        other = late * 2  # before the use, so that its node runs after the gradient is ready
        return x @ self.mix, other


UNUSUAL: list[tuple[Any, dict[str, Any], Any]] = [
    (block, config, checkpoint)
    for config, checkpoint in (
        ({}, None), (SOME, HALF), ({"memory_pool": False, "prefetch_depth": 2}, FULL),
        (ALL, REENTRANT), ({"overlap": False}, None),
    )
    for block in (Repeating, Uneven, TwoOutputs)
]  # fmt: skip


@pytest.mark.thorough(5)
@pytest.mark.unmeasured
@few("cases", UNUSUAL, 5)
@ranks(2)
def test_weights_used_twice_uneven_blocks_and_outputs_without_a_weights_part(
    cases: list[Any],
) -> None:
    mesh = mesh_of(2)
    for block, config, checkpoint in cases:
        Uneven.made = 0
        made = partial(Tiny, block, layers=7)
        twin = Twin(made, mesh, checkpoint, gather_before="rolling", **config)
        steps(twin, f"{block.__name__} {config}")


@pytest.mark.thorough(1)
@ranks(2)
def test_a_place_is_handed_on_after_the_last_use_once_uses_have_been_counted() -> None:
    """When the byte range of a weight is released, in the first forward and later."""
    mesh = mesh_of(2)
    for block, last in ((Block, "w2"), (Repeating, "again")):
        twin = Twin(partial(Tiny, block, layers=4), mesh, gather_before="rolling")
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin.plain, twin.ours)]
        for step in range(2):
            twin.trace.clear()
            twin.backward()
            twin.check_step(optimizers, f"{block.__name__}, step {step}")
            lines = twin.lines("AG", "FREE")

            def before(line: str, lines: list[str] = lines) -> str:
                return lines[lines.index(line) - 1]

            over = len(lines) - 1 - lines[::-1].index(f"FREE forward layers.0.{last}.weight")
            if step == 0:  # the first forward cannot know how often a weight will be used
                assert lines[over + 1] == "AG forward layers.2.q.weight"
                continue
            assert before("AG forward layers.2.q.weight") == "FREE forward layers.0.q.weight"
            if block is Repeating:  # its second weight is used by two modules, its last one twice
                assert before("AG forward layers.2.wo.weight") == "FREE forward layers.0.wo.weight"
                handed = lines.index("AG forward layers.2.wo.weight")
                assert lines[:handed].count("FREE forward layers.0.wo.weight") == 2
                first = "FREE backward layers.3.again.weight"
                assert before("AG backward layers.1.again.weight") == first
            else:
                assert before("AG forward layers.2.wo.weight") == "FREE forward layers.0.wo.weight"
                freed = "FREE backward layers.3.w1.weight"
                assert before("AG backward layers.1.w1.weight") == freed


class Sometimes(Block):
    """Uses one weight a second time if ``twice`` is set."""

    twice = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.q(x) if self.twice else x


@pytest.mark.thorough(1)
@ranks(2)
def test_a_second_use_that_comes_unexpectedly_names_both_holders_and_is_known_afterwards() -> None:
    mesh = mesh_of(2)
    for config in ({}, {"memory_pool": False}):
        twin = Twin(partial(Tiny, Sometimes), mesh, gather_before="rolling", **config)  # type: ignore[arg-type]
        steps(twin, "used once")
        for model in (twin.plain, twin.ours):
            model.layers[0].twice = True  # type: ignore[index, union-attr, assignment]
        raises(
            PoolError, lambda twin=twin: twin.ours(*twin.batch()[1]), "slot 0", "layers.0.q.weight",
            "held by layers.2 for layers.2.q.weight", "out_proj",
        )  # fmt: skip
        steps(twin, "after the error it is known")


@ranks(1)
def test_what_rolling_takes_the_place_of_is_refused() -> None:
    mesh = mesh_of(1)
    for config in ({"granularity": "module"}, {"gather_before_modules": ("wo",)}):
        key = next(iter(config))
        raises(ConfigError, partial(Twin, Tiny, mesh, **ROLLING, **config), "gather_before", key)
        section = WeightParallelConfig(**ROLLING, **config)
        raises(ValueError, partial(Config, weight_parallel=section), "gather_before", key)
