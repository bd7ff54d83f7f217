"""A publication that comes as late as it can, so that a read before it shows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from internsp.wp.communicator import ISPCommunicator


class Late:
    """Happens only when somebody waits for it; until then there is NaN.

    Args:
        real: what gathers (``Collectives._send_all_gather``).
    """

    def __init__(self, real: Any, output: Tensor, piece: Tensor) -> None:
        self.real, self.output, self.piece = real, output, piece.clone()
        output.fill_(float("nan"))

    def wait(self) -> None:
        self.real(self.output, self.piece).wait()


def publish_late(communicator: ISPCommunicator) -> None:
    """From now on, of a communicator whose ``ZeroOptimizer`` is made or not."""
    for between in communicator.state.between.values():
        publication = between.publication
        real = publication._send_all_gather
        publication._send_all_gather = (  # type: ignore[method-assign]
            lambda output, piece, real=real: Late(real, output, piece)
        )
