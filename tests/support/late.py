"""Delays the parameter all-gather as long as possible, so that a read before its wait shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from internsp.wp.communicator import ISPCommunicator


class Late:
    """An all-gather that runs only in ``wait``; until then its output is NaN.

    Args:
        real: the function that gathers (``Transport.all_gather``).
    """

    def __init__(self, real: Any, output: Tensor, piece: Tensor) -> None:
        self.real, self.output, self.piece = real, output, piece.clone()
        on_device = piece.device.type != "cpu"
        self.stream = torch.accelerator.current_stream() if on_device else None
        output.fill_(float("nan"))

    def wait(self) -> None:
        if self.stream is not None:  # a trace waits on a stream of its own
            torch.accelerator.current_stream().wait_stream(self.stream)
        self.real(self.output, self.piece).wait()


def publish_late(communicator: ISPCommunicator) -> None:
    """Delay the parameter all-gathers of a communicator, before or after ``ZeroOptimizer``."""
    for between in communicator.state.between.values():
        transport = between.publication.transport
        real = transport.all_gather
        transport.all_gather = (  # type: ignore[method-assign]
            lambda output, piece, real=real: Late(real, output, piece)
        )
