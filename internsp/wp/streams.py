"""Streams of a device: who still reads a slot, and who has seen its weights arrive (WP-4).

A kernel is queued long before it runs, so a lease that has ended on the host says nothing about
the device. One stream needs no help: a collective waits, at its launch, for what the launching
stream has queued, and a wait makes the waiting stream stand behind the collective. Two or more
(a user's own, or autograd's, which runs each node on the stream of its forward) need this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from internsp import accelerator


class Stream(Hashable, Protocol):
    """What is needed of ``torch.Stream``."""

    def wait_stream(self, stream: Any) -> None:
        """Everything queued here from now on runs after what is queued on ``stream`` now."""


CurrentStream = Callable[[], Stream]


class SlotStreams:
    """The streams that touch one slot. On a device without streams every method does nothing.

    Attributes:
        active: whether the device has streams.

    Args:
        current: see :func:`internsp.accelerator.current_stream`.
    """

    def __init__(self, current: CurrentStream | None) -> None:
        self._current = current
        self.active = current is not None
        self._readers: set[Stream] = set()
        self._arrived: dict[Hashable, set[Stream]] = {}

    def before_overwrite(self, *weights: Hashable) -> None:
        """The current stream stands behind all readers of the slot; the gather behind it (WP-4)."""
        if self._current is None:
            return
        here = self._current()
        for stream in self._readers:
            if stream != here:
                here.wait_stream(stream)
        self._readers = {here}  # what stands behind this one stands behind them all
        for weight in weights:
            self._arrived.pop(weight, None)

    def read(self, *weights: Hashable) -> None:
        """The current stream is about to read ``weights``, whose gathers some stream waited for."""
        if self._current is None:
            return
        here = self._current()
        for weight in weights:
            arrived = self._arrived.setdefault(weight, set())
            if here not in arrived:
                if arrived:  # a gather is waited for once, by another stream
                    here.wait_stream(next(iter(arrived)))
                arrived.add(here)
        self._readers.add(here)


class DeviceClock:
    """When the device reached a point of the current stream (:class:`internsp.trace.Clock`).

    The host only queues work, so its own clock says when something was asked for, not when it ran.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Tie the device's clock to the host's. Blocks until the device is idle."""
        torch.accelerator.synchronize(self._device)
        self._base = accelerator.timed_event(self._device)
        torch.accelerator.synchronize(self._device)
        self._began = time.perf_counter()

    def mark(self) -> Any:
        """A point of the current stream. Does not block."""
        return accelerator.timed_event(self._device)

    def seconds(self, mark: Any) -> float:
        """When it was reached, as ``time.perf_counter()`` would say. Blocks until it is."""
        mark.synchronize()
        return self._began + self._base.elapsed_time(mark) / 1e3


def device_clock(device: torch.device) -> DeviceClock | None:
    """A clock for work on ``device``; ``None`` where the host's own is right."""
    return DeviceClock(device) if accelerator.has_streams(device) else None
