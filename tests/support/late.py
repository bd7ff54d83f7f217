"""A publication that comes as late as it can, so that a read before it shows."""

from __future__ import annotations

from typing import Any

import torch


class Late:
    """Happens only when somebody waits for it; until then there is NaN.

    Args:
        real: what gathers (``internsp.optim.zero.gather_slices``).
    """

    def __init__(self, real: Any, output: torch.Tensor, piece: torch.Tensor, group: Any) -> None:
        self.real, self.output, self.group = real, output, group
        self.piece = piece.clone()
        output.fill_(float("nan"))

    def wait(self) -> None:
        work = self.real(self.output, self.piece, self.group)
        if work is not None:
            work.wait()
