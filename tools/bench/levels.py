"""One rank of ``tools.bench_two_levels``: reductions of one model at once, and in two levels."""

from __future__ import annotations

import time
from typing import Any

WAYS = {"at once": 0, "in two levels": 2}
"""``reduce`` of each."""
WIDTH, LAYERS, TOKENS = 384, 6, 64


class Worker:
    """One rank: builds each way's model, and times its steps."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        import internsp
        from internsp.config import WeightParallelConfig

        torch.set_num_threads(1)
        self.rank = dist.get_rank()
        self.models: dict[str, Any] = {}
        self.traces: dict[str, Any] = {}
        for way, near in WAYS.items():
            torch.manual_seed(0)
            blocks = [
                torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(),
                                    torch.nn.Linear(4 * WIDTH, WIDTH))
                for _ in range(LAYERS)
            ]  # fmt: skip
            model = torch.nn.Module()
            model.layers = torch.nn.ModuleList(blocks)
            model.forward = lambda x, layers=model.layers: _through(layers, x)  # type: ignore[method-assign]
            # Backward gathers within the near groups: what is left between them is one gather and
            # the reduction.
            config = WeightParallelConfig(
                near_ranks=2, reduce=near, gather_before="qkv", blocks=("layers.*",)
            )
            mesh = internsp.ParallelMesh.create(weight=4, device_type="cpu")
            self.traces[way] = trace = internsp.Trace()
            internsp.parallelize(model, mesh, config, trace=trace)
            self.models[way] = model

    def step(self, way: str) -> tuple[float, float]:
        """Seconds and loss of a forward and backward."""
        import torch
        import torch.distributed as dist

        model = self.models[way]
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(self.rank))
        dist.barrier()
        begin = time.perf_counter()
        loss = model(x).square().mean()
        loss.backward()
        seconds = time.perf_counter() - begin
        for parameter in model.parameters():
            parameter.grad = None
        return seconds, float(loss)

    def sent(self, way: str) -> tuple[int, int]:
        """Bytes of reductions that a rank receives in a step: within near groups, and between."""
        trace = self.traces[way]
        trace.enabled = True
        trace.clear()
        self.step(way)
        trace.enabled = False
        sent = [event for event in trace.events if event.kind == "RS"]
        total = sum(event.nbytes for event in sent)
        if way == "at once":  # of three parts one is the neighbor's
            return total // 3, 2 * total // 3
        first = {event.weight: event.nbytes for event in reversed(sent)}  # within the near group
        near = sum(first.values())
        return near, total - near


def _through(layers: Any, x: Any) -> Any:
    for layer in layers:
        x = x + layer(x)
    return x
