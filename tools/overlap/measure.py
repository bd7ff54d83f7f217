"""Measurements within a rank: waits, bytes on its interface, processor time, memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

SAMPLE_SECONDS = 0.004


class WaitClock:
    """Times every ``Work.wait``: when the computing thread waited for communication.

    Blocking collectives wait in Python and are included; DDP waits in C++ and is not.
    """

    def __init__(self) -> None:
        self.intervals: list[tuple[float, float]] = []
        self._original: Any = None

    def install(self) -> None:
        """Replace ``torch.distributed.Work.wait`` in this process."""
        original = self._original = dist.Work.wait
        intervals = self.intervals

        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(work, *args, **kwargs)
            finally:
                intervals.append((start, time.perf_counter()))

        dist.Work.wait = wait  # type: ignore[method-assign, assignment]

    def take(self) -> list[tuple[float, float]]:
        """The intervals since the last call."""
        taken = list(self.intervals)
        self.intervals.clear()
        return taken


def sent(interface: str) -> int | None:
    """Bytes sent so far by an interface of this process's network namespace, headers included.

    ``None`` for ``"lo"``, which carries other processes' bytes, too.
    """
    if interface == "lo":
        return None
    # Not /sys, which shows the namespace in which it was mounted.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])  # the first eight columns are received data
    raise RuntimeError(f"this network namespace has no interface {interface}")


class Sampler(AbstractContextManager["Sampler"]):
    """Samples an interface every 4 ms in a separate thread: bytes sent over time.

    Attributes:
        samples: ``(perf_counter seconds, bytes sent so far)``.
    """

    def __init__(self, interface: str) -> None:
        self._interface = interface
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.samples: list[tuple[float, int]] = []

    def _sample(self) -> None:
        while True:
            nbytes = sent(self._interface)
            if nbytes is None:
                return
            self.samples.append((time.perf_counter(), nbytes))
            if self._stop.wait(SAMPLE_SECONDS):
                return

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def reset_peak() -> None:
    """Reset the peak of resident memory to the current value."""
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def peak_of(model: nn.Module, figure: Callable[[], int]) -> Iterator[list[int]]:
    """Call ``figure`` at every linear layer's forward and backward; yields ``[peak]``.

    Uses hooks on outputs only, which do not interfere with a variant's own hooks.
    """
    peak = [0]

    def look(*_: Any) -> None:
        peak[0] = max(peak[0], figure())

    def after(module: nn.Module, args: Any, output: Tensor) -> None:
        look()
        if output.requires_grad:
            output.register_hook(look)

    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    handles = [layer.register_forward_pre_hook(look) for layer in layers]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield peak
    finally:
        for handle in handles:
            handle.remove()
