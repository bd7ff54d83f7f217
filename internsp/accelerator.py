"""The device that this machine computes on, by torch's common calls (``torch.accelerator``).

Nothing here names a kind of device: one whose support is a plugin of torch's (out of tree) works as
soon as the plugin is installed. A device that is not the host has streams, events, a memory counter
and random state; its groups have the backend that torch has for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Protocol

import torch

HOST = "cpu"


class Stream(Hashable, Protocol):
    """What is needed of ``torch.Stream``."""

    def wait_stream(self, stream: Any) -> None:
        """Everything queued here from now on runs after what is queued on ``stream`` now."""


CurrentStream = Callable[[], Stream]


def kind() -> str:
    """The type of this machine's accelerator, ``"cpu"`` where torch finds none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return HOST if found is None else found.type


def count(device_type: str) -> int:
    """Devices of a type on this machine; of another type than its accelerator's none."""
    return torch.accelerator.device_count() if device_type == kind() else 0


def name_of(device: torch.device) -> str:
    """As its maker calls it; empty where torch does not know."""
    module = getattr(torch, device.type, None)
    found = getattr(module, "get_device_name", None)
    return "" if found is None else str(found(device))


def local_device(device_type: str) -> torch.device:
    """This rank's, by ``LOCAL_RANK``; makes it the current one, which communication looks at."""
    device = torch.device(
        device_type, int(os.environ.get("LOCAL_RANK", 0)) % max(count(device_type), 1)
    )
    torch.accelerator.set_device_index(device.index)
    return device


def has_streams(device: torch.device) -> bool:
    """Whether work on it is queued, and done behind the host's back."""
    return device.type not in (HOST, "meta")


def current_stream(device: torch.device) -> Callable[[], Any] | None:
    """Asks for the stream that work on ``device`` is queued on now; ``None`` without streams."""
    return partial(torch.accelerator.current_stream, device) if has_streams(device) else None


def timed_event(device: torch.device) -> torch.Event:
    """An event that knows when it was reached, recorded on the current stream. Does not block."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def random_state(device: torch.device) -> torch.Tensor:
    """Of its own generator. Torch has no common call: the device's module has it."""
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """See :func:`random_state`."""
    torch.get_device_module(device).set_rng_state(state, device)


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
        self._base = timed_event(self._device)
        torch.accelerator.synchronize(self._device)
        self._began = time.perf_counter()

    def mark(self) -> Any:
        """A point of the current stream. Does not block."""
        return timed_event(self._device)

    def seconds(self, mark: Any) -> float:
        """When it was reached, as ``time.perf_counter()`` would say. Blocks until it is."""
        mark.synchronize()
        return self._began + self._base.elapsed_time(mark) / 1e3


def device_clock(device: torch.device) -> DeviceClock | None:
    """A clock for work on ``device``; ``None`` where the host's own is right."""
    return DeviceClock(device) if has_streams(device) else None
