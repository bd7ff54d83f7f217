"""An emulated link between the ranks of a weight group, of which only one exists.

EMULATION: a collective is a copy on this device, delayed to the time that the given bandwidth would
take. No byte leaves the device. What is real: the schedule, the launches, the streams and events,
and the kernels that compute meanwhile. On a GPU the copies run on a side stream, on a CPU in a
thread; in both cases transfers queue behind one another like messages on one link.

The peers' data is known because all ranks are equal: a peer's shard is this rank's shard (so that
an unsharded weight is this shard, repeated), and a peer's part of a gradient is the part that this
rank would send to it. The sum of the parts is the exact gradient of the shard in a model whose
weights are that shard repeated, which one plain process can train too: :mod:`tools.gpu.model`
compares the losses.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.wp.collectives import Collectives, Transport, Work

Copies = Sequence[tuple[Tensor, Tensor]]
"""Pairs of tensors of equal shape, target and source; each is transferred in two halves."""

_SPIN = 1_000_000  # cycles per calibration


@dataclass(frozen=True)
class Pace:
    """Speed and random delays of a link.

    Attributes:
        bytes_per_second: payload; ``None``: unlimited.
        most_delay: maximum random delay in seconds, before and after each transfer.
        poison: write NaN first, so that reading or overwriting data too early shows.
        seed: of the delays.
    """

    bytes_per_second: float | None = None
    most_delay: float = 0.0
    poison: bool = False
    seed: int = 0

    def seconds(self, nbytes: int) -> float:
        """The duration of ``nbytes``."""
        return nbytes / self.bytes_per_second if self.bytes_per_second else 0.0


class Link(Protocol):
    """One link; transfers complete in the order in which they were sent."""

    def send(self, copies: Copies, nbytes: int) -> Work:
        """Start a transfer that counts as ``nbytes``. Does not block."""

    def busy_seconds(self) -> float:
        """Seconds spent in transfers since the last call; blocks until they are complete."""

    def close(self) -> None:
        """Release resources; no transfer follows."""


def make_link(device: torch.device, pace: Pace) -> Link:
    """A link for tensors of ``device``."""
    return StreamLink(device, pace) if device.type == "cuda" else ThreadLink(pace)


def _halves(copies: Copies) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """The first half of a transfer's rows and the rest, which arrive separately."""
    early, late = [], []
    for target, source in copies:
        middle = len(target) // 2
        early.append((target[:middle], source[:middle]))
        late.append((target[middle:], source[middle:]))
    return early, late


def _poison(copies: Copies) -> None:
    for target, _ in copies:
        target.fill_(float("nan"))


def _copy(copies: Copies) -> None:
    for target, source in copies:
        target.copy_(source)


class StreamLink:
    """On a GPU: a side stream, delayed by a kernel that spins."""

    def __init__(self, device: torch.device, pace: Pace) -> None:
        self._device, self._pace = device, pace
        self._random = random.Random(pace.seed)
        self._stream = torch.cuda.Stream(device)
        self._cycles = cycles_per_second(device)
        self._copied = copied_bytes_per_second(device)
        self._spans: list[tuple[Any, Any]] = []

    def send(self, copies: Copies, nbytes: int) -> Work:
        """Runs after the work queued on the current stream, as NCCL's stream does."""
        moved = sum(target.numel() * target.element_size() for target, _ in copies)
        hold = max(0.0, self._pace.seconds(nbytes) - moved / self._copied)
        early, late = _halves(copies)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            begin.record()
            self._delay()
            if self._pace.poison:
                _poison(copies)
            _copy(early)
            self._hold(hold)
            _copy(late)
            self._delay()
            end.record()
        self._spans.append((begin, end))
        return _Arrival(end, self._device)

    def busy_seconds(self) -> float:
        """Measured by events around each transfer."""
        torch.cuda.synchronize(self._device)
        spans, self._spans = self._spans, []
        return sum(float(begin.elapsed_time(end)) for begin, end in spans) / 1e3

    def close(self) -> None:
        """Nothing to release."""
        torch.cuda.synchronize(self._device)

    def _delay(self) -> None:
        self._hold(self._random.uniform(0.0, self._pace.most_delay))

    def _hold(self, seconds: float) -> None:
        if seconds > 0:
            torch.cuda._sleep(int(seconds * self._cycles))


class _Arrival:
    """The end of a transfer on the side stream."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        """Make the current stream wait for it; the host does not block."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


def cycles_per_second(device: torch.device) -> float:
    """Cycles per second of the spinning kernel, measured now."""
    seconds = _seconds(device, lambda: torch.cuda._sleep(_SPIN))
    return _SPIN / seconds


def copied_bytes_per_second(device: torch.device, nbytes: int = 64 << 20) -> float:
    """Bytes per second of a copy on the device, counting each byte once."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return nbytes / _seconds(device, lambda: target.copy_(source))


def _seconds(device: torch.device, work: Any, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(device))
        work()
        end.record(torch.cuda.current_stream(device))
        torch.cuda.synchronize(device)
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return sorted(times[1:])[repeats // 2]


class ThreadLink:
    """On a CPU: a thread that copies and sleeps. It uses a little time of the computing cores."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._random = random.Random(pace.seed)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._busy = 0.0
        self._last: _Job | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, copies: Copies, nbytes: int) -> Work:
        """The thread runs it after the earlier transfers."""
        job = self._last = _Job(copies, self._pace.seconds(nbytes))
        self._jobs.put(job)
        return job

    def busy_seconds(self) -> float:
        """Measured by the thread's clock."""
        if self._last is not None:
            self._last.wait()
        busy, self._busy = self._busy, 0.0
        return busy

    def close(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            start = time.perf_counter()
            try:
                with torch.no_grad():
                    self._transfer(job, start)
            except Exception as error:  # noqa: BLE001 - raised by wait
                job.error = error
            self._busy += time.perf_counter() - start
            job.over.set()

    def _transfer(self, job: _Job, start: float) -> None:
        delays = [self._random.uniform(0.0, self._pace.most_delay) for _ in range(2)]
        early, late = _halves(job.copies)
        time.sleep(delays[0])
        if self._pace.poison:
            _poison(job.copies)
        _copy(early)
        time.sleep(max(0.0, start + delays[0] + job.seconds - time.perf_counter()))
        _copy(late)
        time.sleep(delays[1])


class _Job:
    """A transfer of a :class:`ThreadLink`."""

    def __init__(self, copies: Copies, seconds: float) -> None:
        self.copies, self.seconds = copies, seconds
        self.over = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> None:
        """Block until it is complete.

        Raises:
            RuntimeError: it failed.
        """
        self.over.wait()
        if self.error is not None:
            raise RuntimeError(f"an emulated transfer failed: {self.error}") from self.error


class EmulatedCollectives(Collectives):
    """Collectives over an emulated link; otherwise the same as :class:`Collectives`.

    Pass ``functools.partial(EmulatedCollectives, link=link)`` to ``parallelize``, in a process
    group whose backend sends nothing (``"fake"``).
    """

    def __init__(self, *args: Any, link: Link, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.transport = _EmulatedTransport(self.group, self._device, link)


class _EmulatedTransport(Transport):
    def __init__(self, group: dist.ProcessGroup, device: torch.device, link: Link) -> None:
        super().__init__(group, device)
        self._link = link

    def all_gather(self, output: Tensor, shard: Tensor) -> Work:
        return self.all_gathers([output], [shard])

    def all_gathers(self, outputs: list[Tensor], shards: list[Tensor]) -> Work:
        copies, nbytes = [], 0
        for output, shard in zip(outputs, shards, strict=True):
            rows = output.view(self.size, -1)
            copies.append((rows, shard.view(1, -1).expand_as(rows)))
            nbytes += (self.size - 1) * shard.numel() * shard.element_size()
        return self._link.send(copies, nbytes)

    def all_to_all(self, output: Tensor, pieces: Tensor) -> Work:
        sent = pieces.numel() * pieces.element_size() * (self.size - 1) // self.size
        return self._link.send([(output.view(-1), pieces.view(-1))], sent)
