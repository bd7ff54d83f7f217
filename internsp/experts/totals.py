"""Small sums over all ranks that share a router: started, and waited for later. No gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.sp.exchange import ExchangeGroup


class Total:
    """The sum of ``values`` over ``ranks`` (``None``: this process alone), in flight.

    Collective; the host waits for nothing before :meth:`wait`.
    """

    @torch.compiler.disable
    def __init__(self, values: Tensor, ranks: ExchangeGroup | None) -> None:
        self._total, self._ranks, self._work = values, ranks, None
        if ranks is not None:
            self._total = values.clone()
            ranks.trace.record("COUNT", "routers", nbytes=self._total.nbytes)
            self._work = dist.all_reduce(self._total, group=ranks.process_group, async_op=True)

    def wait(self) -> Tensor:
        """The sum; blocks until it has arrived."""
        if self._work is not None and self._ranks is not None:
            with self._ranks.reporter.naming("the tokens of experts"):
                self._work.wait()
            self._work = None
        return self._total
