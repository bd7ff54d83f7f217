"""Head exchanges that send nothing: the duration of a step without their communication.

Everything else is unchanged: the outgoing data is prepared, and the incoming data is there at once,
but with wrong values. So the training differs, and its loss is not compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from internsp.sp import DistributedAttention, ExchangeGroup


class Over:
    """A completed work handle."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(eq=False)
class FakedGroup(ExchangeGroup):
    """A group that sends nothing."""

    def all_to_all(
        self, received: Tensor, send: Tensor, receive_counts: list[int], send_counts: list[int]
    ) -> Over:
        """Copy this rank's values, and fill the rest with zeros."""
        common = min(received.numel(), send.numel())
        received[common:].zero_()
        received[:common] = send[:common]
        return Over()

    def irecv(self, place: Tensor, peer: int, tag: int) -> Over:
        """Receive zeros."""
        place.zero_()
        return Over()

    def isend(self, part: Tensor, peer: int, tag: int) -> Over:
        """Send nothing."""
        return Over()


def fake_exchanges(model: nn.Module) -> None:
    """Replace the exchange group of every attention of ``model``."""
    for module in model.modules():
        if isinstance(module, DistributedAttention) and module.group is not None:
            real = module.group
            module.group = FakedGroup(real.process_group, real.trace, real.rank, real.size)
