"""One rank of ``tools.bench_two_levels``: reductions of one model at once, and in two levels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import internsp
from internsp.config import WeightParallelConfig
from tools.bench.ways import Ways

WAYS = {"at once": 0, "in two levels": 2}
"""``reduce`` of each."""
WIDTH, LAYERS, TOKENS = 384, 6, 64


class Model(nn.Module):
    """Blocks of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, WIDTH]`` -> a scalar."""
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Worker(Ways):
    """One rank: has each way's model, and the bytes of its reductions."""

    def __init__(self) -> None:
        self.traces = {way: internsp.Trace() for way in WAYS}
        super().__init__({way: self._model(way) for way in WAYS}, WIDTH)

    def _model(self, way: str) -> nn.Module:
        torch.manual_seed(0)
        model = Model()
        # Backward gathers within the near groups: what is left between them is one gather and
        # the reduction.
        config = WeightParallelConfig(
            near_ranks=2, reduce=WAYS[way], gather_before="qkv", blocks=("layers.*",)
        )
        mesh = internsp.ParallelMesh.create(weight=4, device_type="cpu")
        internsp.parallelize(model, mesh, config, trace=self.traces[way])
        return model

    def sent(self, way: str) -> tuple[int, int]:
        """Bytes of reductions that a rank receives in a step: within near groups, and between."""
        trace = self.traces[way]
        trace.enabled = True
        trace.clear()
        self.step(way, TOKENS)
        trace.enabled = False
        sent = [event for event in trace.events if event.kind == "RS"]
        total = sum(event.nbytes for event in sent)
        if way == "at once":  # of three parts one is the neighbor's
            return total // 3, 2 * total // 3
        first = {event.weight: event.nbytes for event in reversed(sent)}  # within the near group
        near = sum(first.values())
        return near, total - near
