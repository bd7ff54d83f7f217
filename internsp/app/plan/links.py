"""Seconds of collectives over near and far links. Pure.

A ring over ranks of several near domains crosses each domain's adapters: a group with several ranks
in a domain drives as many adapters. Every part passes each link of a ring but one, those between
domains, too. Each step of a ring takes a latency besides its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from internsp.app.plan.devices import Device

FAR_HOP = 14e-6
"""Seconds of a step of a ring between two domains: what NCCL's tuning takes for large messages
(NVIDIA/nccl, src/graph/tuning.cc, hwLat of the protocol Simple)."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate.

    Attributes:
        size: ranks.
        stride: distance of two neighbors, in ranks: 1 for those beside each other.
        device: whose links they use.
    """

    size: int
    stride: int
    device: Device

    @property
    def within(self) -> int:
        """How many of them are in one near domain."""
        return max(1, min(self.size, self.device.near_ranks // max(1, self.stride)))

    def _rate(self) -> tuple[float, float]:
        share = self.device.fitted.links
        return self.device.near * share, self.device.far * share * self.within

    @property
    def latency(self) -> float:
        """Seconds of an all-gather of nothing."""
        if self.size <= 1:
            return 0.0
        domains = -(-self.size // self.within)
        steps = self.size - 1
        far = domains - 1
        return self.device.start + (steps - far) * self.device.hop + far * FAR_HOP

    def gather(self, nbytes: float) -> float:
        """Seconds of an all-gather or reduce-scatter of ``nbytes``, the whole of all ranks."""
        if self.size <= 1:
            return 0.0
        near, far = self._rate()
        moved = nbytes * (self.size - 1) / self.size
        seconds = 0.0 if self.within == 1 else moved / near
        if self.within < self.size:
            seconds = max(seconds, moved / far)
        return seconds + self.latency

    def reduce(self, nbytes: float, in_parts: bool = False) -> float:
        """Seconds of a reduce-scatter of ``nbytes`` on each rank: round a ring, or in parts that
        are sent to their ranks."""
        return self.exchange(nbytes) if in_parts else self.gather(nbytes)

    def all_reduce(self, nbytes: float, in_parts: bool = False) -> float:
        """Seconds of an all-reduce of ``nbytes``: a reduce-scatter and a gather."""
        return self.reduce(nbytes, in_parts) + self.gather(nbytes)

    def exchange(self, nbytes: float) -> float:
        """Seconds of an all-to-all in which each rank has ``nbytes``, for all of them."""
        if self.size <= 1:
            return 0.0
        near, _ = self._rate()
        seconds = nbytes * (self.size - 1) / self.size / near
        if self.within < self.size:
            outside = nbytes * (self.size - self.within) / self.size
            seconds = max(seconds, outside / (self.device.far * self.device.fitted.links))
        return seconds + (FAR_HOP if self.within < self.size else self.device.hop)

    def pass_on(self, nbytes: float) -> float:
        """Seconds in which each rank sends ``nbytes`` to the next."""
        if self.size <= 1:
            return 0.0
        near, far = self._rate()
        if self.within < self.size:
            return nbytes / (far / self.within) + FAR_HOP
        return nbytes / near + self.device.hop


def beside(compute: float, messages: float, slowdown: float) -> float:
    """Seconds of computation and of messages that run beside it and slow it down.

    Beside a message, computation advances at ``1 / (1 + slowdown)`` of its rate.
    """
    return max(messages, compute + messages * slowdown / (1 + slowdown))
