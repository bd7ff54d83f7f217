"""How a step's tokens were spread over the experts, for its metrics."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.app.session.session import Session
from internsp.base.accelerator import HostCopy
from internsp.layers.router import routers


class ExpertLoads:
    """Measures the routers of a session; those of all stages of a pipeline together.

    Collective if there is a pipeline.
    """

    def __init__(self, session: Session) -> None:
        self._mesh, self._routers = session.mesh, routers(session.modules)
        limited = sum(r.capacity_factor > 0 for r in self._routers)
        found = torch.tensor([len(self._routers), limited], device=self._mesh.device)
        if self._mesh.pipeline > 1:  # a stage may have blocks without experts alone
            dist.all_reduce(found, group=self._mesh.pipeline_group)
        self._any, self._limited = (bool(number) for number in found)

    def taken(self) -> Tensor | None:
        """This rank's counts since the last step, to be taken before the next one clears them.

        The host waits for nothing.
        """
        if not self._any:
            return None
        parts = [part for r in self._routers for part in (r.load, r.entropy[None], r.dropped[None])]
        nothing = torch.zeros(0, dtype=torch.float64, device=self._mesh.device)
        return torch.cat([nothing, *parts])

    def told(self, taken: Tensor | None) -> Callable[[], dict[str, float]]:
        """``expert_load`` and ``router_entropy`` of all ranks' counts; empty without routers.

        With a capacity also ``dropped_tokens``. Collective; the host waits in what is returned.
        """
        if taken is None:
            return dict
        dist.all_reduce(taken, group=self._mesh.stage_group)
        worst, sums = taken.new_zeros(1), taken.new_zeros(3)
        parts = iter(taken.split([n for r in self._routers for n in (r.experts, 1, 1)]))
        for router, load, entropy, dropped in zip(self._routers, parts, parts, parts, strict=True):
            worst = torch.maximum(worst, load.max() / load.mean().clamp(min=1e-9))
            sums = sums + torch.cat((entropy, load.sum()[None] / router.top_k, dropped))
        if self._mesh.pipeline > 1:
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._mesh.pipeline_group)
            dist.all_reduce(sums, group=self._mesh.pipeline_group)
        copy = HostCopy(torch.cat((worst, sums)))

        def read() -> dict[str, float]:
            load, entropy, tokens, dropped = copy.read()
            told = {"expert_load": load, "router_entropy": entropy / max(tokens, 1.0)}
            return told | ({"dropped_tokens": dropped} if self._limited else {})

        return read
