"""Reductions in two levels (``weight_parallel.reduce``): within a machine, then between.

A reduction at once sends each rank of another machine its part of this rank's gradient. In two
levels the ranks of a machine first sum what goes to the same place, in fp32 or wider, and send that
sum: with ``n`` ranks to a machine, ``n`` times fewer elements between machines, and as many in
all::

    weight group of 4, near groups of 2       rank 0    rank 1  |  rank 2    rank 3
    1. within near groups, part by part       a0 c0     b1 d1   |  a2 c2     b3 d3     (sums of two)
    2. between ranks of the same place        a = a0 + a2       |  c = c0 + c2         (rank 0, 2)

The second message of a reduction leaves where its unit has been reduced (``GO_ON``), or when it is
waited for: all ranks come to both in one order (WP-2). With the next reduction would be too late.
Data decide when a rank launches that, and a rank that waits for the sum may be the one that others
wait for, in an exchange, or where ranks ask which block comes next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from internsp.wp.collectives import Collectives, Handle
from internsp.wp.reduce import Buffers


@dataclass
class Sum:
    """A reduction in flight: its message within the near group, then the one between them."""

    near: Handle
    places: TwoLevels
    received: Tensor
    """``[size * part]``: what the near group's ranks have sent."""
    packed: Tensor
    """``[size * part]``: what this rank has sent them; pooled."""
    unit: str
    weights: Mapping[str, int]
    far: Handle | None = None
    sums: Tensor | None = None
    """``[groups * part]``: sums of the near group, one part for each near group."""
    output: Tensor | None = None
    """``[groups * part]``: this rank's part of each near group's sums; pooled."""

    def go_on(self) -> None:
        """Wait for the near group's message, sum, and send between near groups; once."""
        if self.far is not None:
            return
        places, first = self.places, next(iter(self.weights))
        places.near.wait(self.near, self.unit, first, "backward")
        self.near.keep = ()
        self.sums = places.near.total(self.received, self.packed)
        places.buffers.release(self.packed)
        self.output = places.buffers.acquire(self.sums.numel(), self.sums.dtype)
        self.far = places.far.reduce_scatter(
            self.output, self.sums, self.unit, self.weights, "backward"
        )


class TwoLevels:
    """What a :class:`GradientReducer` asks of the collectives of a gradient group, in two levels.

    Args:
        near, far: collectives of the near group and of the ranks in this rank's place in others.
        in_flight: sums that have not arrived, oldest first; those of all axes of a model.
    """

    def __init__(
        self, near: Collectives, far: Collectives, buffers: Buffers, in_flight: deque[Sum]
    ) -> None:
        self.near, self.far, self.buffers = near, far, buffers
        self._in_flight, self.received = in_flight, near.size * far.size
        self._arrived: Sum | None = None

    def reduce_scatter(
        self, output: Tensor, input: Tensor, unit: str, weights: Mapping[str, int], phase: str
    ) -> Handle:
        """As :meth:`Collectives.reduce_scatter`; ``output`` receives the near group's message."""
        groups, ranks = self.far.size, self.near.size
        packed = self.buffers.acquire(input.numel(), input.dtype)
        packed.view(ranks, groups, -1).copy_(input.view(groups, ranks, -1).transpose(0, 1))
        shares = {weight: groups * numel for weight, numel in weights.items()}
        handle = self.near.reduce_scatter(output, packed, unit, shares, phase)
        self._in_flight.append(Sum(handle, self, output, packed, unit, weights))
        if not self.near.overlap:
            self._in_flight[-1].go_on()
        return handle

    def wait(self, handle: Handle, unit: str, weight: str, phase: str) -> None:
        """Wait for the oldest reduction, whose handle is ``handle``."""
        oldest = self._in_flight.popleft()
        assert oldest.near is handle, "reductions are finished in the order of their launch"
        oldest.go_on()
        assert oldest.far is not None
        self.far.wait(oldest.far, unit, weight, phase)
        oldest.far.keep = ()
        self._arrived = oldest

    def total(self, output: Tensor, input: Tensor, shape: Sequence[int] = (-1,)) -> Tensor:
        """The sum of the reduction that was waited for last; see :meth:`Collectives.total`."""
        arrived, self._arrived = self._arrived, None
        assert arrived is not None
        assert arrived.output is not None
        assert arrived.sums is not None
        total = self.far.total(arrived.output, arrived.sums, shape)
        self.buffers.release(arrived.output)
        return total
