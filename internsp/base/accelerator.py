"""The device that this machine computes on, by torch's generic API (``torch.accelerator``).

No kind of device is named here: a device whose support is an out-of-tree plugin of torch works as
soon as the plugin is installed. Every device except the host has streams, events, a memory counter
and a random state; its process groups use torch's default backend for the device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from internsp.errors import MachineError

HOST = "cpu"
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Variables in which torchrun, Slurm and MPI give a process its number on its machine."""


class Stream(Hashable, Protocol):
    """The part of ``torch.Stream`` that is used here."""

    def wait_stream(self, stream: Any) -> None:
        """Work queued here from now on runs after all work that is queued on ``stream`` now."""


CurrentStream = Callable[[], Stream]


class Arrival:
    """The streams that stand behind a result: it arrives on each stream, not once for all.

    A wait for a collective, or a kernel that writes, orders the stream on which it is queued. Every
    other stream that uses the result must stand behind one of those that do; :meth:`order` says
    so. On a device without streams there is no such object.
    """

    __slots__ = ("_streams",)

    def __init__(self, *streams: Stream) -> None:
        self._streams = set(streams)

    def reached(self, stream: Stream) -> None:
        """Work queued on ``stream`` from now on runs after the result."""
        self._streams.add(stream)

    def order(self, stream: Stream) -> None:
        """Make ``stream`` stand behind the result, once; before any wait this does nothing."""
        if self._streams and stream not in self._streams:
            stream.wait_stream(next(iter(self._streams)))
            self._streams.add(stream)


class StreamTurns:
    """Orders the streams that use the same memory: who takes it stands behind all users so far."""

    def __init__(self) -> None:
        self._users: set[Stream] = set()

    def join(self, stream: Stream) -> None:
        """``stream`` uses the memory beside the others."""
        self._users.add(stream)

    def take(self, stream: Stream) -> None:
        """``stream`` changes the memory: it waits for the others."""
        for user in self._users:
            if user != stream:
                stream.wait_stream(user)
        self._users = {stream}  # to wait for this stream is now to wait for all of them


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """The backend that carries tensors of each kind of device, by device type.

    A group may have several; torch's own name of it (``get_backend``) is then all of them,
    ``"cpu:gloo,cuda:nccl"``.

    Args:
        group: ``None``: the default group.

    Raises:
        ValueError: the group has ended.
    """
    try:
        pairs = dist.get_backend_config(group).split(",")
    except TypeError:  # torch's own words are of an invariant
        raise ValueError("this process group has ended") from None
    return dict(pair.split(":") for pair in pairs)


def copy_to(device: torch.device | str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` on ``device``; a copy from the host is queued, and the host goes on.

    It leaves from pinned memory, which torch frees when the copy is done: from other memory the
    host would wait for all work that is queued before it.
    """
    queued = tensor.device.type == HOST and has_streams(torch.device(device))
    return (tensor.pin_memory() if queued else tensor).to(device, non_blocking=queued)


class HostCopy:
    """The values of ``tensor`` for the host: copied when the device has them, and read later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values, self._copied = tensor, None
        if has_streams(tensor.device):
            there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values = there.copy_(tensor, non_blocking=True)
            self._copied = torch.accelerator.current_stream(tensor.device.index).record_event()

    def read(self) -> list[float]:
        """The values. The host waits for them, but for nothing that is queued behind them."""
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = self._values.tolist()
        return values


def default_device_type() -> str:
    """The device type of this machine's accelerator; ``"cpu"`` if torch finds none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return HOST if found is None else found.type


def device_count(device_type: str) -> int:
    """Number of devices of a type on this machine; 0 for types other than its accelerator's."""
    return torch.accelerator.device_count() if device_type == default_device_type() else 0


def device_name(device: torch.device) -> str:
    """The product name of a device; empty if torch does not know it."""
    module = getattr(torch, device.type, None)
    found = getattr(module, "get_device_name", None)
    return "" if found is None else str(found(device))


def local_device(device_type: str) -> torch.device:
    """This rank's device. Makes it the current device, which backends use.

    A device other than the first stays if the program has made it current. Else it is that of this
    rank's number on its machine, from :data:`LOCAL_RANKS`.

    Raises:
        MachineError: the number is not one of a device of this machine.
    """
    count, index = device_count(device_type), torch.accelerator.current_device_index()
    name = next((name for name in LOCAL_RANKS if name in os.environ), None)
    if index == 0 and name is not None and count > 1:
        index = int(given) if (given := os.environ[name]).strip().isdecimal() else count
        if index >= count:
            raise MachineError(
                f"{name} = {given!r}, and this machine has {count} devices: start at most {count} "
                "ranks on it, or make a device current before (torch.accelerator.set_device_index)"
            )
    torch.accelerator.set_device_index(index)
    return torch.device(device_type, index)


def has_streams(device: torch.device) -> bool:
    """Whether work on ``device`` is queued on streams, and runs asynchronously to the host."""
    return device.type not in (HOST, "meta")


def current_stream(device: torch.device) -> Callable[[], Any] | None:
    """A function that returns the current stream of ``device``; ``None`` without streams."""
    # By its number: for a device torch looks up this machine's accelerator again in each call.
    return partial(torch.accelerator.current_stream, device.index) if has_streams(device) else None


def timed_event(device: torch.device) -> torch.Event:
    """An event with timing, recorded on the current stream. Does not block."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device.index))
    return event


def moment(device: torch.device) -> Any:
    """When ``device`` comes to the end of what is queued now, for :func:`seconds_between`."""
    return timed_event(device) if has_streams(device) else time.perf_counter()


def seconds_between(start: Any, end: Any) -> float:
    """Seconds from one :func:`moment` to another. Blocks until ``end``."""
    if isinstance(end, float):
        return end - float(start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def random_state(device: torch.device) -> torch.Tensor:
    """State of the device's own generator. Torch has no generic call: uses the device's module."""
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Set what :func:`random_state` returns."""
    torch.get_device_module(device).set_rng_state(state, device)


class DeviceClock:
    """Times at which the device reached points of its stream (:class:`internsp.base.trace.Clock`).

    The host only queues work, so its own clock shows when work was queued, not when it ran.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Align the device's clock with the host's. Blocks until the device is idle."""
        torch.accelerator.synchronize(self._device)
        self._base = timed_event(self._device)
        torch.accelerator.synchronize(self._device)
        self._began = time.perf_counter()

    def mark(self) -> Any:
        """Mark the current point of the current stream. Does not block."""
        return timed_event(self._device)

    def seconds(self, mark: Any) -> float:
        """``time.perf_counter()`` seconds at which ``mark`` was reached. Blocks until it is."""
        mark.synchronize()
        return self._began + self._base.elapsed_time(mark) / 1e3

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another, also over a restart. Blocks until ``end``."""
        return seconds_between(start, end)


def device_clock(device: torch.device) -> DeviceClock | None:
    """A clock for work on ``device``; ``None`` without streams, where the host's clock is right."""
    return DeviceClock(device) if has_streams(device) else None
