"""Small sums over all ranks that share a router: started, and waited for later.

As the messages of :mod:`internsp.experts.exchange` they are operators with a token, whose results
selective checkpointing keeps. They have no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.base.handles import HandleTable
from internsp.base.trace import Trace
from internsp.errors import CollectiveError
from internsp.experts.exchange import Wait


@dataclass(eq=False)
class RouterRanks:
    """The ranks whose tokens one router's losses and balance are about: those of a stage.

    Attributes:
        wait: waits for a collective, and names it if it fails.
    """

    process_group: dist.ProcessGroup
    trace: Trace | None
    wait: Wait
    in_flight: dict[int, tuple[Any, Tensor, torch.UntypedStorage]] = field(default_factory=dict)
    handle: int = field(init=False)

    def __post_init__(self) -> None:
        self.handle = _RANKS.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> RouterRanks:
        """Return itself: a copied model communicates over the same group."""
        return self


_RANKS: HandleTable[RouterRanks] = HandleTable("group of ranks that share a router")


def _start_impl(values: Tensor, handle: int) -> Tensor:
    ranks, total = _RANKS.find(handle), values.clone()
    if ranks.trace is not None:
        ranks.trace.record("COUNT", "routers", nbytes=total.nbytes)
    work = dist.all_reduce(total, group=ranks.process_group, async_op=True)
    token = values.new_zeros(1)
    storage = token.untyped_storage()
    ranks.in_flight.clear()  # of a pass that failed: each sum is waited for before the next
    ranks.in_flight[int(storage._cdata)] = work, total, storage
    return token


def _finish_impl(token: Tensor, like: Tensor, handle: int) -> Tensor:
    ranks = _RANKS.find(handle)
    found = ranks.in_flight.pop(int(token.untyped_storage()._cdata), None)
    if found is None:
        raise CollectiveError("a sum over the ranks of a router was dropped after an exception")
    ranks.wait(found[0], "the tokens of experts")
    return found[1]


_start = torch.library.custom_op("internsp_experts::sum_start", _start_impl, mutates_args=())
_finish = torch.library.custom_op("internsp_experts::sum_finish", _finish_impl, mutates_args=())


class Total:
    """The sum of ``values`` over ``ranks`` (``None``: this process alone), in flight."""

    def __init__(self, values: Tensor, ranks: RouterRanks | None) -> None:
        self._values, self._ranks = values, ranks
        self._token = None if ranks is None else _start(values, ranks.handle)

    def wait(self) -> Tensor:
        """The sum; blocks until it has arrived."""
        if self._token is None or self._ranks is None:
            return self._values
        total: Tensor = _finish(self._token, self._values, self._ranks.handle)
        return total


def summed(values: Tensor, ranks: RouterRanks) -> Tensor:
    """The sum of ``values`` over ``ranks``, in ``values``. Collective; blocks."""
    work = dist.all_reduce(values, group=ranks.process_group, async_op=True)
    ranks.wait(work, "the loads of experts")
    return values
