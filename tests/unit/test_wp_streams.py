"""WP-4 on a device with streams, with mock streams and clocks: which stream waits for which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from internsp.base.accelerator import Arrival, current_stream, device_clock
from internsp.base.trace import Trace
from internsp.failure.comm_context import CommContext
from internsp.wp.collectives import Collectives, Handle
from internsp.wp.reduce import Buffers
from internsp.wp.slots import SlotStreams


@dataclass(eq=False)
class FakeStream:
    """Records, transitively, what it waits for."""

    name: str
    behind: set[str] = field(default_factory=set)

    def wait_stream(self, stream: Any) -> None:
        self.behind |= {stream.name, *stream.behind}


class Device:
    """Streams and which of them is current."""

    def __init__(self) -> None:
        self.a, self.b, self.c = FakeStream("a"), FakeStream("b"), FakeStream("c")
        self.here = self.a

    def current(self) -> FakeStream:
        return self.here


def on(device: Device, stream: FakeStream, action: Callable[..., None], *args: Any) -> None:
    device.here = stream
    action(*args)


def test_a_gather_stands_behind_every_stream_that_read_the_slot() -> None:
    device = Device()
    streams = SlotStreams(device.current)
    on(device, device.a, streams.read, "w")
    on(device, device.b, streams.read, "w")
    on(device, device.c, streams.before_overwrite, "v")
    assert device.c.behind == {"a", "b"}
    assert device.a.behind == set(), "only the one that overwrites waits"


def test_with_one_stream_nothing_waits() -> None:
    device = Device()
    streams = SlotStreams(device.current)
    for _ in range(2):
        streams.before_overwrite("w")
        streams.read("w")
        streams.read("v")
    assert device.a.behind == set()


def launched(device: Device, streams: SlotStreams, *weights: str) -> Arrival:
    """One gather of ``weights``, launched on stream a."""
    arrival = Arrival()
    on(device, device.a, streams.before_overwrite, *weights)
    streams.filled_by(arrival, weights)
    return arrival


@pytest.mark.parametrize("weight", ["w", "v"])
def test_a_second_stream_stands_behind_the_one_that_waited_for_the_gather(weight: str) -> None:
    device = Device()
    streams = SlotStreams(device.current)
    arrival = launched(device, streams, "w", "v")
    on(device, device.b, streams.read, "other")  # b is a reader of the slot, but not of w
    arrival.reached(device.a)  # a waits, and reads w
    on(device, device.a, streams.read, "w")
    assert device.b.behind == set()
    on(device, device.b, streams.read, weight)
    assert device.b.behind == {"a"}
    on(device, device.c, streams.read, weight)
    assert device.c.behind >= {"a"}


def test_after_a_refill_a_stream_that_read_before_waits_again() -> None:
    device = Device()
    streams = SlotStreams(device.current)
    on(device, device.b, streams.read, "w")
    arrival = launched(device, streams, "w")
    assert device.a.behind == {"b"}
    arrival.reached(device.a)
    on(device, device.b, streams.read, "w")
    assert "a" in device.b.behind


def test_what_a_stream_has_copied_itself_is_waited_for_by_every_other_one() -> None:
    device = Device()
    streams = SlotStreams(device.current)
    on(device, device.a, streams.before_overwrite, "w")
    streams.written("w")
    on(device, device.a, streams.read, "w")
    on(device, device.b, streams.read, "w")
    assert (device.a.behind, device.b.behind) == (set(), {"a"})


def test_who_stands_behind_one_overwriter_stands_behind_the_readers_before_it() -> None:
    device = Device()
    streams = SlotStreams(device.current)
    on(device, device.b, streams.read, "w")
    on(device, device.a, streams.before_overwrite, "w")
    on(device, device.c, streams.before_overwrite, "v")
    assert device.c.behind == {"a", "b"}


def test_a_pooled_buffer_taken_on_another_stream_stands_behind_its_last_use() -> None:
    device, pool = Device(), Buffers(torch.device("cpu"))
    pool._current = device.current
    buffer = pool.acquire(4, torch.float32)
    on(device, device.b, pool.release, buffer)
    device.here = device.a
    assert pool.acquire(4, torch.float32) is buffer
    assert device.a.behind == {"b"}
    pool.release(buffer)
    assert pool.acquire(4, torch.float32) is buffer
    assert device.a.behind == {"b"}, "the same stream needs no wait"


@dataclass
class Recorded:
    """A mock of a device's tensor."""

    streams: list[FakeStream] = field(default_factory=list)

    def record_stream(self, stream: FakeStream) -> None:
        self.streams.append(stream)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_memory_of_a_collective_waited_for_on_another_stream_is_not_freed_early(
    elsewhere: bool,
) -> None:
    device, kept = Device(), Recorded()
    collectives = object.__new__(Collectives)
    collectives.comm_context = CommContext()
    collectives.trace, collectives._current = Trace(), device.current

    class Work:
        def wait(self) -> None:
            return

    handle = Handle(Work(), keep=cast(Any, (kept,)), stream=device.a, arrival=Arrival())
    device.here = device.b if elsewhere else device.a
    collectives.wait(handle, "unit", "weight", "forward")
    assert kept.streams == ([device.b] if elsewhere else [])
    on(device, device.c, collectives.wait, handle, "unit", "weight", "forward")
    assert device.c.behind == {device.b.name if elsewhere else "a"}, "a later wait orders it, too"


def test_the_cpu_has_neither_streams_nor_a_clock_of_its_own() -> None:
    cpu = torch.device("cpu")
    assert current_stream(cpu) is None
    assert device_clock(cpu) is None
    streams = SlotStreams(None)
    streams.before_overwrite("w")
    streams.read("w")


class LateClock:
    """Marks are indexes of a list; their times are set later."""

    def __init__(self, times: list[float]) -> None:
        self.times, self.marks, self.restarts = times, 0, 0

    def restart(self) -> None:
        self.restarts += 1

    def mark(self) -> tuple[str, int]:
        self.marks += 1
        return "mark", self.marks - 1

    def seconds(self, mark: tuple[str, int]) -> float:
        return self.times[mark[1]]

    def between(self, start: tuple[str, int], end: tuple[str, int]) -> float:
        return self.times[end[1]] - self.times[start[1]]


def test_a_trace_with_a_clock_gives_the_devices_times_once_they_are_known() -> None:
    clock = LateClock([10.0, 11.0, 11.5, 14.0, 15.0])
    trace = Trace(enabled=True, clock=clock)
    trace.begin_step()
    gather = trace.record("AG", "layers.1", "w", "forward", 8, in_flight=True)  # 10
    other = trace.record("RS", "layers.0", "w", "backward", 8, in_flight=True)  # 11
    start, end = trace.now(), trace.now()  # 11.5, 14
    trace.waited(start, end)
    trace.record("WAIT", "layers.1", "w", "forward", start=start, end=end)
    trace.finish(gather)  # 15
    trace.finish(other, 13.0)  # a CPU backend's thread reports the host's time
    assert trace.exposed_seconds == pytest.approx(2.5)
    trace.resolve()
    assert [(e.kind, e.start, e.end) for e in trace.events] == [
        ("AG", 10.0, 15.0), ("RS", 11.0, 13.0), ("WAIT", 11.5, 14.0),
    ]  # fmt: skip
    assert clock.restarts == 1
    trace.begin_step()
    assert trace.exposed_seconds == 0.0


def test_a_step_without_events_never_restarts_the_clock_and_knows_its_waits() -> None:
    """A restart makes the host wait until the device is idle."""
    clock = LateClock([1.0, 1.25])
    trace = Trace(enabled=False, clock=clock)
    trace.begin_step()
    trace.waited(trace.now(), trace.now())
    assert trace.exposed_seconds == pytest.approx(0.25)
    assert clock.restarts == 0


def test_a_step_that_is_not_measured_marks_nothing_unless_it_is_recorded() -> None:
    clock = LateClock([1.0, 1.25])
    trace = Trace(enabled=False, clock=clock)
    trace.begin_step(measured=False)
    trace.waited(trace.now(), trace.now())
    assert clock.marks == 0
    assert trace.take_waits()() is None
    trace.enabled = True
    trace.begin_step(measured=False)
    trace.waited(trace.now(), trace.now())
    assert (clock.marks, clock.restarts) == (2, 1)
    waits = trace.take_waits()
    trace.enabled = False
    trace.begin_step(measured=False)  # a step is read while the next one is queued
    assert waits() == pytest.approx(0.25)
    without = Trace()
    without.begin_step(measured=False)
    without.waited(1.0, 1.5)
    assert without.take_waits()() == 0.5


def test_a_wait_counts_once_however_often_it_is_asked_for() -> None:
    trace = Trace()
    trace.waited(1.0, 1.5)
    trace.waited(2.0, 2.25)
    assert trace.exposed_seconds == trace.exposed_seconds == 0.75
    trace.exposed_seconds = 0.0
    assert trace.exposed_seconds == 0.0
