"""Exchanges of attention's heads that send nothing: what a step takes without their wire.

Everything else is as it is: what would be sent is made, and what would arrive is there at once, but
with other values. So it trains something else, and no loss is compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from internsp.sp import DistributedAttention, ExchangeGroup


class Over:
    """A work that is over."""

    def wait(self) -> None:
        """At once."""


@dataclass(eq=False)
class FakedGroup(ExchangeGroup):
    """A channel without a link."""

    def all_to_all(
        self, received: Tensor, send: Tensor, receive_counts: list[int], send_counts: list[int]
    ) -> Over:
        """Own values, as often as it takes."""
        common = min(received.numel(), send.numel())
        received[common:].zero_()
        received[:common] = send[:common]
        return Over()

    def irecv(self, place: Tensor, peer: int, tag: int) -> Over:
        """Zeros."""
        place.zero_()
        return Over()

    def isend(self, part: Tensor, peer: int, tag: int) -> Over:
        """Nothing."""
        return Over()


def fake_exchanges(model: nn.Module) -> None:
    """Take the link from every attention of ``model``."""
    for module in model.modules():
        if isinstance(module, DistributedAttention) and module.group is not None:
            real = module.group
            module.group = FakedGroup(real.process_group, real.trace, real.rank, real.size)
