"""WP-13: compiled blocks see plain tensors, give eager's numbers and send eager's messages."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from internsp.config import ActivationCheckpointConfig
from internsp.errors import ConfigError
from internsp.layers import entry as compiled
from internsp.mesh import ParallelMesh
from tests.support.models import Block, Tiny, Twin, raises
from tests.support.ranks import ranks

FULL = ActivationCheckpointConfig(mode="full", fraction=0.5)


class Gated(nn.Module):
    """A user's module with parameters of its own, one cut and one small."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(width, width) / 3)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x @ self.gate) * self.gain


class Own(Block):
    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.gated = Gated(width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.gated(x)


@pytest.mark.slow(14)
@pytest.mark.parametrize(("backend", "tolerance"), [("aot_eager", 1e-10), ("inductor", 1e-9)])
@ranks(2, timeout=300)
def test_compiled_blocks_equal_eager_with_the_same_messages(
    backend: str, tolerance: float
) -> None:
    compiler = compiled.torch.compile

    def counting(function: Any, **options: Any) -> Any:
        return compiler(function, backend=backend, fullgraph=True)

    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=50)
    raises(ConfigError, lambda: Twin(Tiny, mesh, compile=True), "trigger", "qkv")
    cases: list[tuple[Any, dict[str, Any], Any]] = [
        (Block, {}, None), (Own, {}, FULL), (Own, {"granularity": "module"}, None),
        (Block, {"trigger": "rolling"}, FULL),
    ]  # fmt: skip
    # A compiler in C++ takes its time: one case, with recomputed blocks and others.
    for block, config, checkpoint in cases if backend == "aot_eager" else cases[1:2]:
        messages = []
        for compile_ in (False, True):
            options = {"compile": compile_, "trigger": "qkv"} | config
            compiled.torch.compile = counting  # type: ignore[assignment]
            try:
                twin = Twin(partial(Tiny, block, layers=3), mesh, checkpoint, **options)
            finally:
                compiled.torch.compile = compiler  # type: ignore[assignment]
            pair = (twin.plain, twin.ours)
            optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in pair]
            for step in range(3):
                twin.trace.clear()
                twin.backward()
                twin.check_gradients(f"{config} compiled {compile_}, step {step}", tolerance)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            messages.append(sorted(twin.lines("AG", "RS")))
        assert messages[0] == messages[1], "the same gathers and reductions"
